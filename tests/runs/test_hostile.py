"""A run directory that was received from anybody: nothing outside it is read, written or removed, and nothing waits."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phalanx.config import Experiment
from phalanx.config.stored import load, save
from phalanx.errors import RunError, UserError
from phalanx.runs.checkpoint import Checkpoints
from phalanx.runs.logger import Logger
from phalanx.runs.pack import unpack
from phalanx.runs.screen import REQUIRED, Goal, PlainLines
from whole_runs import newest

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A file and a directory of somebody else."""
    place = tmp_path / "outside"
    place.mkdir()
    (place / "precious").write_text("kept")
    return place


@pytest.fixture
def reports() -> list[str]:
    return []


@pytest.fixture
def saved(tmp_path: Path, reports: list[str]) -> Checkpoints:
    """Two checkpoints, of steps 1 and 2."""
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep=3, report=reports.append)
    for steps in (1, 2):
        write(checkpoints, steps)
    return checkpoints


def write(saved: Checkpoints, steps: int) -> Path:
    return saved.write({"w": torch.ones(2)}, {"steps": steps, "array": np.arange(3)}, steps, float(steps))


def seal(directory: Path, **changes: Any) -> None:
    """Change a manifest and give it the checksum that fits; a value of None takes the key away."""
    path = directory / "manifest.json"
    body = {**json.loads(path.read_text()), **changes}
    body = {key: value for key, value in body.items() if value is not None and key != "sha256"}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({**body, "sha256": digest}))


def entry(path: Path, size: int | None = None) -> dict[str, Any]:
    data = path.read_bytes()
    return {"bytes": len(data) if size is None else size, "sha256": hashlib.sha256(data).hexdigest()}


def change_file(directory: Path, name: str, text: str) -> None:
    """Another text for a file of a checkpoint, with a manifest that agrees."""
    (directory / name).write_text(text)
    files = json.loads((directory / "manifest.json").read_text())["files"]
    seal(directory, files={**files, name: entry(directory / name)})


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def listening(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # names of sockets are short
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


def password_file(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def directory(path: Path) -> None:
    path.mkdir()


STRANGE = [pipe, endless, listening, password_file, directory]


class TestManifest:
    @pytest.mark.parametrize(
        "name", ["/etc/passwd", "../../outside/precious", "..", ".", "", "a\0b", "x/../state.json"]
    )
    def test_names_files_of_its_own_directory_only(
        self, saved: Checkpoints, reports: list[str], outside: Path, name: str
    ) -> None:
        newer = saved.directory / "step-000000000002"
        files = json.loads((newer / "manifest.json").read_text())["files"]
        seal(newer, files={**files, name: entry(outside / "precious")})
        assert saved.load().steps == 1
        assert len(reports) == 1 and "not a file in its own directory" in reports[0]

    @pytest.mark.parametrize("name", ["model.safetensors", "state.json", "manifest.json", "replay-frames.bin"])
    @pytest.mark.parametrize("make", STRANGE)
    def test_a_file_that_is_none_is_refused_at_once(
        self, saved: Checkpoints, reports: list[str], name: str, make: Callable[[Path], None]
    ) -> None:
        """The last name is in no manifest, but whoever restores a memory would open it."""
        strange = saved.directory / "step-000000000002" / name
        strange.unlink(missing_ok=True)
        make(strange)
        assert saved.load().steps == 1
        assert len(reports) == 1 and str(strange) in reports[0] and "not a plain file" in reports[0]
        assert saved.load_best().steps == 1
        write(saved, 3)
        assert saved.load().steps == 3

    def test_a_huge_file_is_not_read(self, saved: Checkpoints, reports: list[str]) -> None:
        newer = saved.directory / "step-000000000002"
        for name in ("model.safetensors", "manifest.json"):
            os.truncate(newer / name, 1 << 42)  # without taking any room
            assert saved.load().steps == 1
        assert "bytes" in reports[0] and "larger than" in reports[1]

    @pytest.mark.parametrize(
        "changes",
        [
            {"files": []},
            {"files": {}},
            {"files": None},
            {"files": {name: 5 for name in ("model.safetensors", "state.safetensors", "state.json")}},
            {"files": {name: {"bytes": "9"} for name in ("model.safetensors", "state.safetensors", "state.json")}},
            {"format": None},
            {"format": [1]},
            {"steps": None},
            {"steps": 2.0},
            {"steps": "2"},
            {"score": "high"},
            {"score": [1]},
            {"score": float("nan")},
        ],
        ids=str,
    )
    def test_of_wrong_types_or_without_keys_is_damage(
        self, saved: Checkpoints, reports: list[str], changes: dict[str, Any]
    ) -> None:
        seal(saved.directory / "step-000000000002", **changes)
        assert saved.load().steps == saved.load_best().steps == 1
        assert "manifest.json" in reports[0]
        write(saved, 3)
        assert json.loads((saved.directory / "best.json").read_text())["steps"] == 3

    @pytest.mark.parametrize("text", [DEEP, '{"a":' * 50_000 + "1" + "}" * 50_000, "9" * 5000, "null", "[]", "\0"])
    def test_that_is_none_is_damage(self, saved: Checkpoints, reports: list[str], text: str) -> None:
        (saved.directory / "step-000000000002" / "manifest.json").write_text(text)
        assert saved.load().steps == 1
        assert "\n" not in reports[0] and len(reports[0]) < 500


class TestState:
    REFERENCE = {"$": "array", "name": "0 state.array", "dtype": "<i8", "shape": [3]}

    @pytest.mark.parametrize(
        "value",
        [
            {"$": "array"},
            {"$": "planet", "name": "0 state.array"},
            {**REFERENCE, "name": "nothing"},
            {**REFERENCE, "name": ["a"]},
            {**REFERENCE, "shape": [-3]},
            {**REFERENCE, "shape": [-1, -3]},
            {**REFERENCE, "shape": [10**30]},
            {**REFERENCE, "shape": [1 << 40]},
            {**REFERENCE, "shape": [3.0]},
            {**REFERENCE, "shape": 3},
            {**REFERENCE, "shape": [2]},
            {**REFERENCE, "$": "scalar"},
            {**REFERENCE, "dtype": "|O"},
            {**REFERENCE, "dtype": "nonsense"},
            {**REFERENCE, "dtype": ["<i8"]},
            {"$": "int", "value": 5},
            {"$": "int", "value": "thousand"},
            {"$": "float"},
            {"$": "dict", "items": 4},
            {"$": "dict", "items": [[[1], 2]]},
            {"$": "dict", "items": [[1.5, 2]]},
        ],
        ids=str,
    )
    def test_values_that_cannot_be_are_damage(self, saved: Checkpoints, reports: list[str], value: Any) -> None:
        newer = saved.directory / "step-000000000002"
        change_file(newer, "state.json", json.dumps({"steps": value}))
        assert saved.load().steps == 1
        assert len(reports) == 1 and str(newer) in reports[0] and "\n" not in reports[0]

    @pytest.mark.parametrize("text", [DEEP, "", "{", "\x80"])
    def test_that_is_no_json_or_nested_too_deep_is_damage(
        self, saved: Checkpoints, reports: list[str], text: str
    ) -> None:
        change_file(saved.directory / "step-000000000002", "state.json", text)
        assert saved.load().steps == 1
        assert len(reports) == 1

    def test_one_byte_does_not_fill_an_array_of_any_size(self) -> None:
        with pytest.raises(ValueError, match="does not have 1 bytes"):
            unpack({**self.REFERENCE, "dtype": "|u1", "shape": [4096]}, {"0 state.array": torch.zeros(1).byte()})

    def test_the_caller_may_refuse_one(self, saved: Checkpoints, reports: list[str]) -> None:
        def check(state: Any) -> None:
            if state["steps"] == 2:
                raise ValueError("too new")

        saved.check = check
        assert saved.load().steps == 1
        assert "too new" in reports[0]


class TestLinks:
    """What a link leads to is neither written nor removed."""

    NAMES = (".tmp-best.json", ".tmp-step-000000000003", ".old-step-000000000002", "best.json", "step-000000000003")

    @pytest.mark.parametrize("to", ["precious", ".", "nowhere"])
    @pytest.mark.parametrize("name", NAMES)
    def test_of_checkpoints_are_never_followed(self, saved: Checkpoints, outside: Path, name: str, to: str) -> None:
        link = saved.directory / name
        link.unlink(missing_ok=True)
        link.symlink_to(outside / to)
        for steps in (3, 4):
            write(saved, steps)
            assert saved.load().steps == steps
        assert {path.name: path.read_text() for path in outside.iterdir()} == {"precious": "kept"}
        assert not [path.name for path in saved.directory.iterdir() if path.name.startswith(".")]

    def test_a_checkpoint_on_another_disk_is_loaded_replaced_and_pruned(
        self, saved: Checkpoints, tmp_path: Path
    ) -> None:
        for steps in (1, 2):
            path = saved.directory / f"step-{steps:012d}"
            shutil.move(path, tmp_path / path.name)
            path.symlink_to(tmp_path / path.name)
        assert saved.load().steps == 2
        saved.keep = 1
        for steps in (2, 3, 4):
            write(saved, steps)
            assert saved.load().steps == steps
        assert sorted(path.name for path in saved.directory.iterdir()) == ["best.json", "step-000000000004"]
        assert len(list((tmp_path / "step-000000000001").iterdir())) == 4

    def test_checkpoints_may_be_on_another_disk_where_nothing_else_is_touched(
        self, saved: Checkpoints, outside: Path
    ) -> None:
        for name in (".tmp-mine", ".old-mine", ".tmp-step-x"):
            (outside / name).write_text("kept")
        before = sorted(path.name for path in outside.iterdir())
        shutil.rmtree(saved.directory)
        saved.directory.symlink_to(outside)
        for steps in (3, 4):
            write(saved, steps)
        assert saved.load().steps == 4
        assert [name for name in sorted(p.name for p in outside.iterdir()) if "00" not in name] == sorted(
            [*before, "best.json"]
        )

    def test_of_the_configuration_are_never_followed(self, tmp_path: Path, outside: Path) -> None:
        run = tmp_path / "run"
        run.mkdir()
        for name in (".tmp-config.json", "config.json"):
            (run / name).symlink_to(outside / "precious")
        save(Experiment(), run / "config.json")
        assert (outside / "precious").read_text() == "kept"
        assert load(run / "config.json") == Experiment()
        assert [path.name for path in run.iterdir()] == ["config.json"]


def record(steps: int) -> dict[str, Any]:
    return {**dict.fromkeys(REQUIRED, 0), "steps": steps, "sps": 1.0}


class TestRecords:
    def logger(self, run: Path) -> Logger:
        return Logger(run, PlainLines(Goal("x", 100), sys.stdout), resume=True)

    @pytest.mark.parametrize("name", ["metrics.jsonl", "events.log"])
    @pytest.mark.parametrize("make", STRANGE)
    def test_that_are_no_plain_files_are_refused(self, tmp_path: Path, name: str, make: Callable[[Path], None]) -> None:
        make(tmp_path / name)
        with pytest.raises(UserError, match=f"{name} is not a plain file; remove it"):
            self.logger(tmp_path)

    def test_are_not_rewritten_through_a_link(self, tmp_path: Path, outside: Path) -> None:
        (tmp_path / "metrics.jsonl").write_text('{"steps": 1}\n')
        (tmp_path / ".tmp-metrics.jsonl").symlink_to(outside / "precious")
        with self.logger(tmp_path) as log:
            log.record(record(2))
        assert (outside / "precious").read_text() == "kept"
        assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2

    def test_that_are_nonsense_are_forgotten(self, tmp_path: Path) -> None:
        lines = [DEEP, '{"steps": 1' + "0" * 400 + "}", '{"steps": []}', '{"steps": 1}']
        (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        with self.logger(tmp_path):
            assert (tmp_path / "metrics.jsonl").read_text() == '{"steps": 1}\n'


class TestConfiguration:
    @pytest.mark.parametrize("make", [endless, pipe, listening, directory])
    def test_that_is_no_plain_file_is_one_sentence(self, tmp_path: Path, make: Callable[[Path], None]) -> None:
        make(tmp_path / "config.json")
        with pytest.raises(UserError, match=r"config\.json does not exist"):
            load(tmp_path / "config.json")

    def test_a_link_or_a_huge_file_is_one_sentence(self, tmp_path: Path, outside: Path) -> None:
        save(Experiment(), outside / "config.json")
        (tmp_path / "config.json").symlink_to(outside / "config.json")
        with pytest.raises(UserError, match="not a plain file"):
            load(tmp_path / "config.json")
        (tmp_path / "config.json").unlink()
        save(Experiment(), tmp_path / "config.json")
        os.truncate(tmp_path / "config.json", 1 << 42)
        with pytest.raises(UserError, match="larger than"):
            load(tmp_path / "config.json")

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("env", "x" * 10_000 + "\n"),
            ("run", [[1] * 10_000]),
            ("model", {"torso": "line\nline" * 1000}),
            ("run", {"steps": 10**400}),
            ("run", {"seconds": 10**400}),
            ("line\nline" * 1000, 1),
        ],
        ids=range(6),
    )
    def test_of_wrong_types_is_one_short_sentence(self, tmp_path: Path, key: str, value: Any) -> None:
        (tmp_path / "config.json").write_text(json.dumps({key: value}))
        with pytest.raises(UserError) as raised:
            load(tmp_path / "config.json")
        assert "\n" not in str(raised.value) and len(str(raised.value)) < 1500

    def test_nested_too_deep_is_one_sentence(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(DEEP)
        with pytest.raises(UserError, match="not valid JSON"):
            load(tmp_path / "config.json")

    def test_a_key_that_was_removed_is_said(self, tmp_path: Path, reports: list[str]) -> None:
        path = tmp_path / "config.json"
        save(Experiment(), path)
        values = json.loads(path.read_text())
        del values["algorithm"]["discount"], values["topology"]
        path.write_text(json.dumps(values))
        assert load(path, reports.append) == Experiment()
        assert reports == [
            f"{path} lacks algorithm.discount; taking the default 0.99",
            f"{path} lacks topology.name; taking the default serial",
        ]

    def test_a_removed_key_is_said_by_the_commands(self, train: Any, resume: Any, tmp_path: Path, capsys: Any) -> None:
        assert train("a2c-catch", "--topology", "serial") == 0
        path = tmp_path / "run/config.json"
        values = json.loads(path.read_text())
        del values["run"]["eval_games"]
        path.write_text(json.dumps(values))
        capsys.readouterr()
        assert resume() == 0
        assert capsys.readouterr().err == f"phalanx: {path} lacks run.eval_games; taking the default 10\n"


def edited_state(run: Path, steps: int, edit: Callable[[Any], None]) -> None:
    """Change the state.json of a run's checkpoint, so that nothing but the change is wrong."""
    path = run / f"checkpoints/step-{steps:012d}"
    state = json.loads((path / "state.json").read_text())
    edit(state)
    change_file(path, "state.json", json.dumps(state))


def replica_of(state: Any) -> Any:
    return state["replicas"][0]


EDITS: dict[str, Callable[[Any], Any]] = {
    "no replicas": lambda state: state.pop("replicas"),
    "not one replica": lambda state: state.update(replicas=[]),
    "a list for a replica": lambda state: state.update(replicas=[[]]),
    "no clocks": lambda state: state.pop("clocks"),
    "no clock": lambda state: state["clocks"].pop("updates"),
    "a word for a clock": lambda state: state["clocks"].update(steps="many"),
    "a stranger among the clocks": lambda state: state["clocks"].update(evil=1),
    "no store": lambda state: state.pop("store"),
    "no rule": lambda state: state["store"].pop("rule"),
    "a number for the rule": lambda state: state["store"].update(rule=5),
    "no shuffle": lambda state: replica_of(state)["learner"].pop("shuffle"),
    "a number for a generator": lambda state: replica_of(state)["learner"].update(shuffle=5),
    "no frames": lambda state: replica_of(state)["sampling"]["collector"].pop("frames"),
    "no environments": lambda state: replica_of(state)["sampling"].update(envs={}),
    "one environment less": lambda state: replica_of(state)["sampling"]["envs"]["slots"].pop(),
    "an environment without a state": lambda state: replica_of(state)["sampling"]["envs"]["slots"][0].pop("env"),
    "no time": lambda state: state.pop("time_s"),
    "a word for the time": lambda state: state.update(time_s="long"),
    "words for scores": lambda state: state["scores"].update(scores=["high"]),
    "no scores": lambda state: state.update(scores=None),
}


class TestRun:
    """Through the command line: the older checkpoint is used, or one sentence says that there is none."""

    @pytest.fixture(scope="class")
    def trained(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A run with checkpoints of steps 128 and 256."""
        from phalanx.cli.main import main

        place = tmp_path_factory.mktemp("runs")
        flags = ["--run.directory", str(place), "--run.name", "run", "--topology", "serial", "--run.steps", "256"]
        assert main(["train", "a2c-catch", *flags, "--run.checkpoint-updates", "1"]) == 0
        return place / "run"

    @pytest.fixture
    def run(self, trained: Path, tmp_path: Path) -> Path:
        return Path(shutil.copytree(trained, tmp_path / "run"))

    @pytest.mark.parametrize("edit", EDITS)
    def test_a_state_that_does_not_fit_is_told_and_the_older_used(
        self, run: Path, resume: Any, capsys: Any, edit: str
    ) -> None:
        edited_state(run, 256, EDITS[edit])
        assert resume() == 0
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and "step-000000000256" in error and "; trying another checkpoint" in error
        assert newest(run).steps == 256
        assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["steps"] == 256

    @pytest.mark.parametrize("edit", ["no clock", "no rule", "no frames"])
    def test_states_none_of_which_fits_are_sentences(self, run: Path, resume: Any, capsys: Any, edit: str) -> None:
        for steps in (128, 256):
            edited_state(run, steps, EDITS[edit])
        assert resume() == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 3 and all(line.startswith("phalanx: ") for line in lines)
        assert "start the run anew" in lines[-1]

    def test_evaluation_uses_the_older_one_too(self, run: Path, capsys: Any) -> None:
        from phalanx.cli.main import main

        edited_state(run, 256, EDITS["a word for a clock"])
        assert main(["eval", str(run), "--games", "2"]) == 0
        shown = capsys.readouterr()
        assert "128 steps of training" in shown.out and shown.err.count("\n") == 1

    def test_weights_of_another_model_are_told_and_the_older_used(self, run: Path, resume: Any, capsys: Any) -> None:
        loaded = newest(run)
        wide = {name: torch.zeros(*tensor.shape, 2) for name, tensor in loaded.weights.items()}
        Checkpoints(run / "checkpoints", keep=3).write(wide, loaded.state, 256, None)
        assert resume() == 0
        assert "this model needs" in capsys.readouterr().err
        assert newest(run).steps == 256

    def test_evidence_is_not_written_through_a_link(
        self, train: Any, tmp_path: Path, outside: Path, capsys: Any
    ) -> None:
        from phalanx.runs.session import Session

        recording = Session.recording

        @contextlib.contextmanager
        def with_link(session: Session, *arguments: Any) -> Iterator[None]:
            with recording(session, *arguments):
                (session.directory / "not-finite.safetensors").symlink_to(outside / "precious")
                yield

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Session, "recording", with_link)
            flags = ("--optimizer.learning-rate", 1e38, "--topology", "serial")
            assert train("a2c-catch", *flags, steps=10_000) == 1
        assert (outside / "precious").read_text() == "kept"
        assert (tmp_path / "run/not-finite.safetensors").stat().st_size > 100


class TestMoved:
    """A directory that goes away is noticed with the next record."""

    def test_to_another_place_is_named(self, tmp_path: Path) -> None:
        with Logger(tmp_path / "here", PlainLines(Goal("x", 100), sys.stdout)) as log:
            log.record(record(1))
            (tmp_path / "here").rename(tmp_path / "there")
            with pytest.raises(RunError, match=f"here was moved to {tmp_path}/there while"):
                log.record(record(2))
            (tmp_path / "here").mkdir()  # another one in its place is another one
            with pytest.raises(RunError, match="was moved"):
                log.record(record(2))
            (tmp_path / "here").rmdir()
            (tmp_path / "there").rename(tmp_path / "here")
            log.record(record(3))

    def test_removed_is_said(self, tmp_path: Path) -> None:
        with Logger(tmp_path / "here", PlainLines(Goal("x", 100), sys.stdout)) as log:
            shutil.rmtree(tmp_path / "here")
            with pytest.raises(RunError, match="here was removed while the run went on"):
                log.record(record(1))
