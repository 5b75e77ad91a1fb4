"""The README's commands and Python, and those of docs, do what they say, with small budgets.

`tests/test_docs.py` parses every command; `make check-install` runs the README's in an environment of their own.
Studies, benchmarks and the tuner of samplers run in tests of their own, with other flags than in the documents.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from test_docs import COMPLETE, HELP
from torch import nn

import phalanx
from phalanx.cli.main import main

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def install_check() -> Any:
    spec = importlib.util.spec_from_file_location("install_check", ROOT / "benchmarks/install_check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def programs(page: str) -> list[str]:
    """Its blocks of Python, with small budgets."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    return [re.sub(r"\b\d+_000\b", "500", block).replace("games=30", "games=3") for block in blocks]


def test_the_commands_of_the_readme(capsys):
    commands = install_check().readme_commands()
    assert {words[0] for words in commands} == {"train", "plan", "resume", "eval", "play", "export"}
    for words in commands:
        if words[0] != "train" or words[1].endswith("-gym"):  # Atari takes long; make check-install plays it
            words = [word.replace("Acrobot", "CartPole") for word in words]  # whose games are short
            assert main(words) == 0
    shown = capsys.readouterr().out
    assert "2,000 steps done" in shown and "2 games of CartPole-v1" in shown
    assert Path("game.mp4").is_file() and Path("package/replay.mp4").is_file()


def test_the_python_of_the_readme(capsys):
    found = install_check().readme_programs()
    assert len(found) == 2
    names: dict[str, Any] = {"__name__": "__main__"}
    for program in found:
        exec(program, names)
    assert len(names["scores"]) == 3 and names["action"] in (0, 1)


def test_the_python_of_the_documents():
    """One block after the other, as in a notebook; a class without bodies is left out, and `test_examples.py` has the
    whole algorithm."""
    first, train, use, torso, skeleton, reinforce = programs("docs/python.md")
    assert "class Mine" in skeleton and "class Reinforce" in reinforce
    observations, first_of_all = np.zeros((3, 4), np.float32), np.ones(3, bool)
    names = {"__name__": "__main__", "observation": observations[0], "nn": nn, "phalanx": phalanx}
    names |= {"observations": observations, "first": first_of_all, "dataclass": dataclass}
    exec(first, names)
    exec(train.replace("LunarLander-v3", "CartPole-v1"), names)  # which needs no further package
    exec(use.replace("runs/NAME", str(names["run"].directory)), names)
    assert len(names["actions"]) == 3 and len(names["scores"]) == 3
    exec(torso, names)
    phalanx.train("a2c-gym", model=names["torso"], overrides={"run.steps": 40}, quiet=True)
    exec(skeleton, names)


def test_the_wrapper_of_the_documents():
    names: dict[str, Any] = {"gymnasium": gymnasium, "numpy": np}
    exec(programs("docs/environments.md")[0], names)
    env = names["FewTorques"](gymnasium.make("Pendulum-v1"))
    env.reset(seed=0)
    assert env.action_space.n == 3 and len(env.step(1)) == 5


RUNS = [words for words in COMPLETE if words.split()[0] in ("train", "resume", "eval", "play", "export")]
RUNS = [words for words in RUNS if not HELP & {*shlex.split(words)} and "--topology.address" not in words]
MOMENT = ("--run.steps", "3000", "--run.seconds", "10", "--run.device", "cpu", "--sampler.decorrelation", "10")


@pytest.mark.slow
@pytest.mark.parametrize("words", RUNS)
def test_a_command_of_the_documents_runs(words, capfd):
    """For a moment, on this machine. Those of a cluster are tried with several nodes in `cluster/test_hosts.py`."""
    name, *rest = shlex.split(words)
    if "--run.loggers" in rest:
        for package in rest[rest.index("--run.loggers") + 1 :]:
            pytest.importorskip(package)
    for file in re.findall(r"--from (\S+)", words):
        Path(file).write_text("{}")
    if name == "train":
        atari = () if rest[0].endswith(("-gym", "-catch")) else ("--sampler.environments", "16")
        given = () if "--sampler.environments" in rest else atari
        short = MOMENT if "--run.loggers" in rest or not rest[0].endswith("-catch") else MOMENT[:4]
        assert main([name, *rest, *given, *short]) == 0
        return
    assert main(["train", "dqn-catch", "--run.steps", "300", "--run.name", "NAME"]) == 0
    more = {"resume": ("--run.steps", "600"), "play": (), "eval": (), "export": ("--games", "3")}[name]
    assert main([name, *rest, *(more if name != "export" or "--games" not in rest else ())]) == 0
