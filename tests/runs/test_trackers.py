"""Trackers of others get every record, and whatever they do, the run goes on without noticing."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from phalanx.cli.main import main
from phalanx.config.stored import load
from phalanx.runs import trackers
from phalanx.runs.trackers import Trackers, wandb_id
from whole_runs import descendants, records

FLAGS = ("--topology", "serial", "--run.log-every", "0.05")
STAND_IN = """
import json, os, sys, time

class Run:
    def log(self, values, step):
        if {fails} and step > 500:
            raise RuntimeError("no room")
        keep(log=values, step=step)

def keep(**line):
    print(json.dumps(line), file=open({out!r}, "a"))

def init(project, name, config, resume):
    if {hangs}:
        time.sleep(600)
    keep(project=project, name=name, seed=config["run"]["seed"], resume=resume)
    print("much that must not reach the terminal")
    return Run()

def finish():
    keep(finished=True)
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A package `trackio` that keeps what it gets in a file, and fails or hangs if told to."""

    def make(fails: bool = False, hangs: bool = False) -> Path:
        out, place = tmp_path / "out.jsonl", tmp_path / "packages"
        place.mkdir()
        (place / "trackio.py").write_text(STAND_IN.format(fails=fails, hangs=hangs, out=str(out)))
        monkeypatch.syspath_prepend(str(place))
        return out

    return make


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_record_arrives_and_a_resumed_run_goes_on(stand_in, train, resume, tmp_path, capfd):
    out = stand_in()
    assert train("a2c-catch", *FLAGS, "--run.loggers", "trackio", steps=3000) == 0
    begun, *logged, finished = lines(out)
    assert begun == {"project": "phalanx", "name": "run", "seed": 0, "resume": "never"}
    assert finished == {"finished": True}
    kept = [{name: value for name, value in each.items() if value is not None} for each in records(tmp_path / "run")]
    assert [each["log"] for each in logged] == kept and [each["step"] for each in logged][-1] == kept[-1]["steps"]
    shown = capfd.readouterr()
    assert "must not reach" not in shown.out + shown.err
    assert "trackio: trackio show --project phalanx" in (tmp_path / "run/events.log").read_text()
    assert load(tmp_path / "run/config.json").run.loggers == ("trackio",)
    assert resume("--run.steps", 4000) == 0
    assert [line["resume"] for line in lines(out) if "resume" in line] == ["never", "allow"]


def test_one_that_fails_is_said_once_and_the_run_ends_well(stand_in, train, tmp_path, capsys):
    stand_in(fails=True)
    assert train("a2c-catch", *FLAGS, "--run.loggers", "trackio", steps=3000) == 0
    sentence = "the logger trackio is left out from here on (RuntimeError: no room); the run is not affected"
    assert capsys.readouterr().out.count(sentence) == 1
    assert (tmp_path / "run/events.log").read_text().count(sentence) == 1
    assert records(tmp_path / "run")[-1]["steps"] >= 3000


def test_one_that_hangs_holds_up_nothing_but_the_end_and_that_not_for_ever(
    stand_in, train, tmp_path, monkeypatch, capsys
):
    stand_in(hangs=True)
    monkeypatch.setattr(trackers, "PATIENCE", 0.3)
    assert train("a2c-catch", *FLAGS, "--run.loggers", "trackio", steps=1000) == 0
    assert "left out from here on (it did not finish within 0.3 s)" in capsys.readouterr().out
    assert not descendants(os.getpid())


def test_one_that_takes_nothing_any_more_is_given_up(stand_in, tmp_path):
    """Its end of the socket is full after some megabytes."""
    stand_in(hangs=True)
    followed = Trackers(("trackio",), tmp_path, {"run": {"seed": 0}}, resumed=False)
    told = [sentence for _ in range(300) for sentence in followed.record({"steps": 1, "text": "x" * 10_000})]
    assert len(told) == 1 and "(it takes no records any more)" in told[0]
    assert followed.close() == [] and not descendants(os.getpid())


def test_no_process_left_for_it_stops_nothing(tmp_path, monkeypatch):
    def fail(*arguments: Any, **options: Any) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("phalanx.runtime.child.Child.start", fail)
    followed = Trackers(("trackio",), tmp_path, {}, resumed=False)
    assert "left out from here on (BlockingIOError:" in followed.record({"steps": 1})[0]
    assert followed.record({"steps": 2}) == followed.close() == []


@pytest.mark.parametrize("verb", ["train", "resume"])
def test_a_package_that_is_not_there_is_one_sentence_and_nothing_is_made(verb, train, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("phalanx.probe.find_spec", lambda name: None)
    flags = ["--run.loggers", "wandb"]
    if verb == "resume":
        assert train("a2c-catch", *FLAGS) == 0
        command = ["resume", str(tmp_path / "run"), "--run.steps", "900", *flags]
    else:
        command = ["train", "a2c-catch", "--run.directory", str(tmp_path / "runs"), *flags]
    assert main(command) == 2
    assert "run.loggers names wandb, which is not installed; run: pip install wandb" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_an_unknown_one_is_refused(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["plan", "a2c-catch", "--run.loggers", "wanda"])
    assert caught.value.code == 2
    assert "wandb" in capsys.readouterr().err


def test_the_newest_directory_tells_by_which_name_wandb_knows_a_run(tmp_path):
    assert wandb_id(tmp_path) is None
    for name in ("offline-run-20260301_120000-aaaa", "run-20260302_090000-bbbb", "offline-run-20260301_130000-cccc"):
        (tmp_path / "wandb" / name).mkdir(parents=True)
    assert wandb_id(tmp_path) == "bbbb"


@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_itself_offline(train, resume, tmp_path, monkeypatch, capsys):
    for name in ("WANDB_PROJECT", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert train("a2c-catch", *FLAGS, "--run.loggers", "wandb", steps=2000) == 0
    assert resume("--run.steps", 3000) == 0
    written = sorted((tmp_path / "run/wandb").glob("offline-run-*"))
    assert len(written) == 2 and len({path.name.rpartition("-")[2] for path in written}) == 1
    assert capsys.readouterr().out.count("wandb: offline, for `wandb sync ") == 2
    kept = b"".join(next(path.glob("*.wandb")).read_bytes() for path in written)
    assert b"explained_variance" in kept and str(records(tmp_path / "run")[-1]["steps"]).encode() in kept
    assert not descendants(os.getpid())


@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_without_a_login_asks_nobody(train, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert train("a2c-catch", *FLAGS, "--run.loggers", "wandb", steps=2000) == 0
    assert "nobody is logged in: run `wandb login`, or set WANDB_MODE=offline" in capsys.readouterr().out
