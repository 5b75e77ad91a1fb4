"""Where a run comes from: kept in config.json, compared when it is resumed, of no effect otherwise."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import phalanx
from phalanx.cli.main import main
from phalanx.config.presets import preset
from phalanx.config.stored import load, load_origin, save
from phalanx.runs.origin import changes, commit, origin

TINY = ("--topology", "serial", "--run.steps", "200")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs")
    assert main(["train", "a2c-catch", *TINY, "--run.directory", str(directory), "--run.name", "run"]) == 0
    return directory / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def edit(run: Path, made_with: Any) -> None:
    values = json.loads((run / "config.json").read_text())
    values.pop("made_with")
    if made_with is not None:
        values["made_with"] = made_with
    (run / "config.json").write_text(json.dumps(values))


def resumed(run: Path, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(["resume", str(run), "--run.steps", "400"]) == 0
    return capsys.readouterr().out


def test_versions_and_machine_are_kept(run: Path) -> None:
    kept = load_origin(run / "config.json")
    assert kept == origin(torch.cuda.get_device_name() if torch.cuda.is_available() else None)
    assert kept["versions"]["phalanx"] == phalanx.__version__
    assert kept["versions"]["torch"].startswith(torch.__version__.partition("+")[0])
    assert kept["machine"]["cores"] >= 1 and kept["machine"]["cpu"]
    assert load(run / "config.json", pytest.fail).preset == "a2c-catch"


def test_the_same_are_not_mentioned(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "others than before" not in resumed(run, capsys)


def test_others_are_named_once(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = load_origin(run / "config.json")
    before = {
        **kept,
        "versions": {**kept["versions"], "torch": "2.\x1b[31m9"},
        "machine": {**kept["machine"], "cores": 99},
    }
    edit(run, before)
    shown = resumed(run, capsys)
    assert (
        f"versions or machine differ from before: torch 2.?[31m9 -> {kept['versions']['torch']}, cores 99 -> " in shown
    )
    assert load_origin(run / "config.json") == kept


@pytest.mark.parametrize(
    "made_with", [None, [], 5, {}, {"versions": 3}, {"versions": {"torch": None}}, {"a": {"b": {}}}]
)
def test_those_of_earlier_versions_or_of_anybody_are_resumed(
    run: Path, capsys: pytest.CaptureFixture[str], made_with: Any
) -> None:
    edit(run, made_with)
    assert "others than before" not in resumed(run, capsys)


def test_a_configuration_without_it_is_read_and_one_with_it_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    save(preset("a2c"), path)
    assert load_origin(path) is None
    save(preset("a2c"), path, origin())
    assert load(path, pytest.fail) == preset("a2c")


def test_what_differs_is_told_in_words() -> None:
    before = {"versions": {"torch": "1", "gymnasium": "1", "commit": None}, "machine": {"cores": 2}}
    now = {"versions": {"torch": "2", "gymnasium": "1", "commit": "a"}, "machine": {"cores": 4}}
    assert changes(before, now) == ["torch 1 -> 2", "cores 2 -> 4"]
    assert changes(before, before) == []
    assert len(changes({"machine": {"cores": "9" * 10**6}}, now)[0]) < 300


def test_the_commit_is_that_of_the_tree_it_runs_from() -> None:
    root = Path(phalanx.__file__).parent.parent
    if not (root / ".git").exists():
        assert commit() is None
        return
    done = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert str(commit()).removesuffix("-dirty") == done.stdout.strip()
