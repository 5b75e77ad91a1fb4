from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from phalanx.errors import RunError, UserError
from phalanx.runs import checkpoint
from phalanx.runs.background import BackgroundWriter
from phalanx.runs.checkpoint import Checkpoints
from whole_runs import same

ALL_FILES = ("model.safetensors", "state.safetensors", "state.json", "manifest.json")


def weights_of(steps: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((3, 2), float(steps)), "b": torch.tensor(steps, dtype=torch.bfloat16)}


def state_of(steps: int) -> dict[str, Any]:
    return {"steps": steps, "array": np.arange(steps % 7 + 1), "bytes": bytes(range(9)), "nan": float("nan")}


@pytest.fixture
def reports() -> list[str]:
    return []


@pytest.fixture
def saved(tmp_path: Path, reports: list[str]) -> Checkpoints:
    return Checkpoints(tmp_path / "run" / "checkpoints", keep=3, report=reports.append)


def write(saved: Checkpoints, steps: int, score: float | None = None) -> Path:
    return saved.write(weights_of(steps), state_of(steps), steps, score)


def names(saved: Checkpoints) -> list[str]:
    return sorted(path.name for path in saved.directory.iterdir() if path.name != "best.json")


def step_names(*steps: int) -> list[str]:
    return [f"step-{n:012d}" for n in steps]


def assert_loads(saved: Checkpoints, steps: int) -> None:
    loaded = saved.load()
    assert loaded.steps == steps
    assert same(weights_of(steps), loaded.weights)
    assert same(state_of(steps), loaded.state)


def test_round_trip(saved: Checkpoints) -> None:
    path = write(saved, 1234567, 3.5)
    assert path == saved.directory / "step-000001234567"
    assert sorted(file.name for file in path.iterdir()) == sorted(ALL_FILES)
    assert_loads(saved, 1234567)
    loaded = saved.load(torch.device("cpu"))
    assert (loaded.score, loaded.path) == (3.5, path)


def test_weights_that_share_memory_or_are_views(saved: Checkpoints) -> None:
    flat = torch.arange(12.0, requires_grad=True)
    weights = {"a": flat[:6].view(2, 3), "b": flat[6:], "tied": flat[6:], "t": flat.view(3, 4).T, "all": flat}
    saved.write(weights, {"flat": flat, "again": flat}, 1, None)
    loaded = saved.load()
    for name, tensor in weights.items():
        assert torch.equal(loaded.weights[name], tensor)
    assert torch.equal(loaded.state["again"], flat)


def test_nothing_is_pickled(saved: Checkpoints) -> None:
    path = write(saved, 5)
    for file in path.iterdir():
        head = file.read_bytes()
        assert head[:1] != b"\x80" and head[:2] != b"PK"


class TestDamage:
    @pytest.mark.parametrize("name", ALL_FILES)
    @pytest.mark.parametrize("keep", [0.0, 0.5])
    def test_truncated(self, saved: Checkpoints, reports: list[str], name: str, keep: float) -> None:
        write(saved, 1), write(saved, 2)
        file = saved.directory / step_names(2)[0] / name
        data = file.read_bytes()
        file.write_bytes(data[: int(len(data) * keep)])
        assert_loads(saved, 1)
        assert len(reports) == 1 and str(file) in reports[0] and "damaged" in reports[0]

    @pytest.mark.parametrize("name", ALL_FILES)
    def test_any_flipped_bit(self, saved: Checkpoints, reports: list[str], name: str) -> None:
        write(saved, 1), write(saved, 2, 0.25)
        file = saved.directory / step_names(2)[0] / name
        data = file.read_bytes()
        positions = np.random.default_rng(0).permutation(len(data) * 8)[:150].tolist()
        for count, position in enumerate(positions, 1):
            flipped = bytearray(data)
            flipped[position // 8] ^= 1 << position % 8
            file.write_bytes(flipped)
            assert saved.load().steps == 1, f"bit {position}"
            assert len(reports) == count and str(file) in reports[-1]
        file.write_bytes(data)
        assert saved.load().steps == 2

    @pytest.mark.parametrize("name", ALL_FILES)
    def test_missing_file(self, saved: Checkpoints, reports: list[str], name: str) -> None:
        write(saved, 1), write(saved, 2)
        (saved.directory / step_names(2)[0] / name).unlink()
        assert_loads(saved, 1)
        assert len(reports) == 1 and name in reports[0] and "missing" in reports[0]

    def test_empty_directory_and_copied_directory(self, saved: Checkpoints, reports: list[str]) -> None:
        first = write(saved, 1)
        (saved.directory / step_names(2)[0]).mkdir()
        shutil.copytree(first, saved.directory / step_names(3)[0])
        assert_loads(saved, 1)
        assert len(reports) == 2

    def test_unknown_format(self, saved: Checkpoints, reports: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        write(saved, 1)
        monkeypatch.setattr(checkpoint, "FORMAT", 3)
        with pytest.raises(UserError):
            saved.load()
        assert "format 2" in reports[0]

    def test_none_is_usable(self, saved: Checkpoints, reports: list[str]) -> None:
        with pytest.raises(UserError, match="holds no checkpoint"):
            saved.load()
        (write(saved, 1) / "state.json").unlink()
        with pytest.raises(UserError, match="none of the checkpoints"):
            saved.load()
        with pytest.raises(UserError, match="none of the checkpoints"):
            saved.load_best()

    @pytest.mark.parametrize("keep", [1, 2])
    def test_a_resumed_run_does_not_keep_the_damaged_one(self, saved: Checkpoints, keep: int) -> None:
        write(saved, 100), write(saved, 200, 50.0)
        state = saved.directory / step_names(200)[0] / "state.json"
        state.write_text(state.read_text().replace("200", "201"))
        assert saved.load().steps == 100
        saved.keep = keep
        write(saved, 250, 1.0)
        assert names(saved) == step_names(100, 250)[-keep:]
        assert json.loads((saved.directory / "best.json").read_text())["steps"] == 250
        assert_loads(saved, 250)

    def test_a_truncated_one_takes_no_place_of_a_whole_one(self, saved: Checkpoints) -> None:
        saved.keep = 2
        write(saved, 1)
        (write(saved, 2) / "model.safetensors").write_bytes(b"")
        write(saved, 3)
        assert names(saved) == step_names(1, 3)

    def test_a_damaged_one_that_is_written_again_counts(self, saved: Checkpoints) -> None:
        write(saved, 1)
        (write(saved, 2) / "state.json").unlink()
        assert saved.load().steps == 1
        write(saved, 2)
        write(saved, 3)
        assert names(saved) == step_names(1, 2, 3)

    def test_later_ones_go_when_an_earlier_step_is_written(self, saved: Checkpoints) -> None:
        write(saved, 100), write(saved, 200, 9.0)
        write(saved, 150, 1.0)
        assert names(saved) == step_names(100, 150)
        assert_loads(saved, 150)


class Crash(BaseException):
    """Stands for a killed process: no handler of errors sees it."""


def crash(*args: Any, **kwargs: Any) -> None:
    raise Crash


class TestCrash:
    @pytest.mark.parametrize("where", ["save_file", "_manifest", "_sync", "_digest"])
    def test_in_the_middle_of_a_write(
        self, saved: Checkpoints, monkeypatch: pytest.MonkeyPatch, where: str, reports: list[str]
    ) -> None:
        write(saved, 1)
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, where, crash)
            patch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)
            with pytest.raises(Crash):
                write(saved, 2)
        assert any(name.startswith(".tmp-") for name in names(saved))
        assert_loads(saved, 1)
        assert not reports
        write(saved, 3)
        assert names(saved) == step_names(1, 3)

    @pytest.mark.parametrize("rename", range(4))  # to the side, into place, best.json, pruned
    def test_at_each_rename_while_one_is_replaced(
        self, saved: Checkpoints, monkeypatch: pytest.MonkeyPatch, rename: int
    ) -> None:
        saved.keep = 1
        write(saved, 1, 1.0)
        real, calls = os.replace, iter(range(100))

        def replace(source: Any, target: Any) -> None:
            if next(calls) >= rename:
                raise Crash
            real(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", replace)
            patch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)
            with pytest.raises(Crash):
                write(saved, 1, 1.0)
        assert_loads(saved, 1)
        write(saved, 2)
        assert_loads(saved, 2)
        assert names(saved) == step_names(1, 2)  # 1 has the best score

    def test_temporary_files_go_at_once_where_it_was_only_an_error(
        self, saved: Checkpoints, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write(saved, 1)
        monkeypatch.setattr(checkpoint, "_manifest", crash)
        with pytest.raises(Crash):
            write(saved, 2)
        assert names(saved) == step_names(1)

    def test_same_steps_are_replaced(self, saved: Checkpoints) -> None:
        write(saved, 1)
        saved.write(weights_of(9), state_of(9), 1, None)
        assert saved.load().state["steps"] == 9
        assert names(saved) == step_names(1)


class TestFullDisk:
    @pytest.mark.parametrize(
        "error",
        [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error (os error 28)")],
    )
    @pytest.mark.parametrize("where", ["save_file", "_sync", "_manifest"])
    def test_earlier_ones_stay(
        self, saved: Checkpoints, monkeypatch: pytest.MonkeyPatch, error: Exception, where: str
    ) -> None:
        write(saved, 1), write(saved, 2)

        def full(*args: Any, **kwargs: Any) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, where, full)
            with pytest.raises(RunError) as raised:
                write(saved, 3)
        sentence = str(raised.value)
        assert str(saved.directory / step_names(3)[0]) in sentence and "MiB free" in sentence and "\n" not in sentence
        assert names(saved) == step_names(1, 2)
        assert_loads(saved, 2)

    def test_the_replaced_one_comes_back(self, saved: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
        write(saved, 1)
        real, calls = os.replace, iter(range(100))

        def replace(source: Any, target: Any) -> None:
            if next(calls) == 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            real(source, target)

        monkeypatch.setattr(os, "replace", replace)
        with pytest.raises(RunError):
            write(saved, 1)
        assert names(saved) == step_names(1)
        assert_loads(saved, 1)


class TestPruning:
    def test_newest_and_best_stay(self, saved: Checkpoints) -> None:
        scores: list[float | None] = [None, 5.0, 1.0, None, 2.0, float("nan"), 3.0]
        for steps, score in enumerate(scores, 1):
            write(saved, steps, score)
        assert names(saved) == step_names(2, 5, 6, 7)
        assert json.loads((saved.directory / "best.json").read_text())["checkpoint"] == step_names(2)[0]
        assert (saved.load_best().steps, saved.load_best().score) == (2, 5.0)
        write(saved, 8, 6.0)
        assert names(saved) == step_names(6, 7, 8)
        assert saved.load_best().steps == 8

    def test_of_equal_scores_the_newest_is_best_and_kept(self, saved: Checkpoints) -> None:
        saved.keep = 1
        for steps, score in [(1, 2.0), (2, 2.0), (3, 0.0)]:
            write(saved, steps, score)
        assert names(saved) == step_names(2, 3)
        assert saved.load_best().steps == 2

    def test_best_falls_back_and_reports(self, saved: Checkpoints, reports: list[str]) -> None:
        for steps, score in [(1, 2.0), (2, 3.0), (3, None)]:
            write(saved, steps, score)
        data = saved.directory / step_names(2)[0] / "model.safetensors"
        data.write_bytes(data.read_bytes()[:-1] + b"\xff")
        assert saved.load_best().steps == 1
        assert str(data) in reports[0]

    def test_a_best_that_is_gone_is_no_longer_named(self, saved: Checkpoints, reports: list[str]) -> None:
        write(saved, 10), write(saved, 20, 5.0)
        (saved.directory / step_names(20)[0] / "model.safetensors").write_bytes(b"")
        assert saved.load().steps == 10
        write(saved, 15)
        assert not (saved.directory / "best.json").exists()

    def test_others_may_read_what_the_umask_lets_them_read(self, saved: Checkpoints) -> None:
        write(saved, 1)
        files = list((saved.directory / step_names(1)[0]).iterdir())
        assert {path.stat().st_mode for path in files} == {
            (saved.directory / step_names(1)[0] / "manifest.json").stat().st_mode
        }

    def test_without_scores_the_newest_is_best(self, saved: Checkpoints) -> None:
        write(saved, 1), write(saved, 2)
        assert saved.load_best().steps == 2
        assert not (saved.directory / "best.json").exists()


def test_a_writer_that_was_interrupted_before_it_began_is_not_waited_for(saved: Checkpoints) -> None:
    writer = BackgroundWriter(saved)
    writer.thread = threading.Thread()
    writer.finish()
    assert writer.thread is None
