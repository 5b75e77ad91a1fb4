"""Each example does what it says, with few steps."""

from __future__ import annotations

import importlib.util
import re
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import pytest

import phalanx
from phalanx.cli.main import main

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["own_environment", "own_network", "own_algorithm"])
def test_own_code(name, capsys):
    run = example(name).main(steps=1_000)
    assert run.end == "1,000 steps done"
    assert "mean score of the last 100 games: " in capsys.readouterr().out


def test_the_algorithm_in_the_documents_runs_as_it_stands():
    """With fewer steps; it learns from each rollout, and what it logs is there."""
    blocks = re.findall(r"^```python\n(.*?)^```", (EXAMPLES.parent / "docs/python.md").read_text(), re.M | re.S)
    (text,) = [block for block in blocks if "class Reinforce" in block]
    assert "100_000" in text
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(text.replace("100_000", "1_000"), names)
    assert names["run"].end == "1,000 steps done" and 0 < names["run"].records[-1]["loss/entropy"] < 0.7


def test_callbacks_stop_and_go_on(capsys):
    run = example("callbacks").main(steps=20_000, enough=5.0)
    assert "stopped by on_record" in capsys.readouterr().out
    assert run.end.endswith("steps done")


def test_an_agent_is_served_by_a_script(tmp_path):
    trained = example("own_algorithm").main(steps=500)
    done = subprocess.run(
        [sys.executable, EXAMPLES / "serve.py", trained.directory], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    env, over, score = gymnasium.make("CartPole-v1"), False, 0
    with phalanx.load(trained.directory, best=True, greedy=True) as agent:
        observation, _ = env.reset(seed=0)
        while not over:
            observation, _, terminated, truncated, _ = env.step(agent.act(observation))
            score, over = score + 1, terminated or truncated
        mean = statistics.mean(agent.evaluate(games=10, greedy=False))
    assert f"one game: {score}\n" in done.stdout
    assert f"10 games as `phalanx eval` plays them: {mean:.1f}\n" in done.stdout
    (per_step,) = re.findall(r"reward per step: (\S+)", done.stdout)
    assert 0.8 < float(per_step) < 1  # a step that begins an episode pays nothing, and games are short


COMMANDS = [
    line.strip().removeprefix("phalanx ").replace("examples/", f"{EXAMPLES}/")
    for path in sorted(EXAMPLES.glob("*.py"))
    for line in path.read_text().splitlines()
    if line.startswith("    phalanx ")
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.split()[1])
def test_the_commands_that_examples_name(command):
    assert main([*shlex.split(command), "--run.steps", "300"]) == 0


def test_every_example_has_a_test():
    tested = Path(__file__).read_text()
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert len(COMMANDS) == 3 and all(f'"{name}' in tested for name in names)
