"""What Tab offers: the words themselves, and that bash and zsh get them from the script that is printed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.cli.completion import OPTIONS, SCRIPTS, candidates
from phalanx.cli.main import COMMANDS, main
from phalanx.config.presets import PRESETS


def test_commands_and_presets():
    assert candidates(["tr"]) == ["train"] and candidates(["--v"]) == ["--version"]
    assert set(candidates([""])) == {*COMMANDS, "--help", "--version"}
    assert candidates(["plan", "dqn-"]) == [name for name in PRESETS if name.startswith("dqn-")]
    assert candidates(["train", "de"]) == ["default"]
    assert candidates(["study", ""]) and candidates(["bench", "g"]) == ["gpu"]


def test_flags_are_those_of_the_preset_on_the_line():
    assert candidates(["train", "ppo", "--algorithm.ep"]) == ["--algorithm.epochs"]
    assert not candidates(["train", "a2c", "--algorithm.ep"])
    assert not candidates(["plan", "a2c", "--topology.predictors"])
    assert "--topology.predictors" in candidates(["plan", "a2c", "--topology", "ga3c", "--topology."])
    assert "--seconds" in candidates(["tune", "ppo", "--s"]) and "--sampler.horizon" in candidates(
        ["tune", "ppo", "--"]
    )


def test_values_where_they_are_few():
    assert candidates(["train", "a2c", "--run.precision", "b"]) == ["bfloat16"]
    assert candidates(["train", "a2c", "--run.loggers", ""]) == ["wandb", "trackio"]
    assert candidates(["train", "ppo", "--sampler.overlap", ""]) == ["True", "False"]
    assert candidates(["train", "ppo", "--topology", "se"]) == ["serial"]


@pytest.mark.parametrize("command", OPTIONS)
def test_options_of_other_commands(command):
    assert candidates([command, "default" if command == "tune" else "x", "--"])


def test_what_is_wrong_already_completes_to_nothing(capsys):
    assert main(["completion", "words", "train", "pppo", "--"]) == 0
    assert main(["completion", "words", "nonsense", ""]) == 0
    assert main(["completion", "words", "train", "ppo", "--topology", "x", "--"]) == 0
    assert capsys.readouterr().out.split() == []


TRY = {
    "bash": """
eval "$(phalanx completion bash)"
COMP_WORDS=(phalanx train ppo --run.prec); COMP_CWORD=3; _phalanx; echo "${COMPREPLY[@]}"
COMP_WORDS=(phalanx train ""); COMP_CWORD=2; _phalanx; echo "${#COMPREPLY[@]}"
complete -p phalanx
""",
    "zsh": """
compdef() { print "$@" }
compadd() { shift; print -- "${(P)1}" ; print ${#${(P)1}} }
eval "$(phalanx completion zsh)"
words=(phalanx train ppo --run.prec) CURRENT=4; _phalanx
words=(phalanx train ''); CURRENT=3; _phalanx
""",
}


@pytest.mark.parametrize("shell", SCRIPTS)
def test_the_script_works_in_its_shell(shell, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    (tmp_path / "phalanx").write_text(f'#!/bin/sh\nexec {sys.executable} -m phalanx "$@"\n')
    (tmp_path / "phalanx").chmod(0o755)
    root = str(Path(main.__code__.co_filename).parents[2])
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": root}
    done = subprocess.run([shell, "-c", TRY[shell]], env=env, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    lines = done.stdout.split("\n")
    assert "--run.precision" in lines and any(str(len(PRESETS) + 1) == line for line in lines)
    assert any("_phalanx phalanx" in line for line in lines)


def test_games_are_those_beside_the_emulator():
    assert candidates(["train", "ppo", "--env.game", "pong"]) == ["pong"]
    assert len(candidates(["train", "ppo", "--env.game", ""])) > 50
