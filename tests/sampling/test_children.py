"""Env workers run their owner's code, die in any way at any time, print what they like, and are never lost unheard."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

from faulty import FaultyFactory, Ledger, LedgerFactory, play
from phalanx.errors import RunError
from phalanx.runtime import deaths as deaths_of_children
from phalanx.runtime.child import shortened
from phalanx.sampling.processes import ProcessEnvs

TREE = Path(__file__).parent.parent.parent
IMPORTABLE = os.pathsep.join([str(TREE), str(Path(__file__).parent)])


class Talkative(Ledger):
    """Prints, raises or exits at its third step, as its word says."""

    def __init__(self, index: int, incarnation: int, word: str) -> None:
        super().__init__(index, incarnation)
        self.word, self.total = word, 0

    def step(self, action, frame):
        self.total += 1
        if self.word == "print":
            print("the simulator says hello")
            print("x" * 100_000, file=sys.stderr, flush=True)
        elif self.word and self.total == 3 and self.index == 1 and self.incarnation == 0:
            if self.word == "exit":
                sys.exit(0)
            raise KeyboardInterrupt if self.word == "interrupt" else ValueError("begin" + 5_000_000 * "x" + "end")
        return super().step(action, frame)


@dataclass(frozen=True)
class Fragile:
    """Makes environment 1 of these incarnations only to be killed; others say their word."""

    mortal: tuple[int, ...] = ()
    word: str = ""

    def __call__(self, index: int, incarnation: int = 0) -> Ledger:
        if index == 1 and incarnation in self.mortal:
            os.kill(os.getpid(), signal.SIGKILL)
        return Talkative(index, incarnation, self.word)


def outcome_of(factory, steps=12, **options):
    """Reports of a short play, and its deaths; environment 1 has a worker of its own."""
    reports: list[str] = []
    envs = ProcessEnvs(factory, 2, 1, report=reports.append, **options)
    try:
        play(envs, steps)
    finally:
        envs.close()
    return reports, envs.budget.deaths


def test_a_death_at_the_first_start_is_an_event():
    reports, deaths = outcome_of(Fragile(mortal=(0,)))
    assert deaths == len(reports) == 1
    assert "SIGKILL" in reports[0]


def test_a_successor_that_dies_while_it_starts_has_a_successor():
    reports: list[str] = []
    envs = ProcessEnvs(Fragile(mortal=(1, 2)), 2, 1, report=reports.append)
    try:
        play(envs, 3)
        os.kill(envs.workers[1].process.pid, signal.SIGKILL)
        rows, _ = play(envs, 5)
    finally:
        envs.close()
    assert envs.budget.deaths == len(reports) == 3
    assert rows[1][-1][0][0][1] == 3  # the incarnation that lives


@pytest.mark.parametrize("at", [0, 1])
def test_an_environment_that_raises_before_its_first_step_ends_the_run_at_once(at):
    reports: list[str] = []
    factory = FaultyFactory("raise", at=1, always=True) if at else BrokenReset()
    envs = ProcessEnvs(factory, 2, 2, report=reports.append)
    try:
        with pytest.raises(RunError) as failure:
            play(envs, 30)
    finally:
        envs.close()
    assert str(failure.value).count('the simulator fell over")') == 1  # the line of its traceback
    assert "before its first step" in str(failure.value)
    assert reports == []


@dataclass(frozen=True)
class BrokenReset:
    def __call__(self, index: int, incarnation: int = 0) -> Ledger:
        return WithoutStart(index, incarnation)


class WithoutStart(Ledger):
    def reset(self, frame):
        raise ValueError("the simulator fell over")


def test_deaths_without_a_step_between_them_end_the_run():
    with pytest.raises(RunError, match="died 3 times in a row without a step"):
        outcome_of(FaultyFactory("kill", at=1, always=True), max_deaths_in_a_row=2)


def test_more_deaths_within_an_hour_than_allowed_end_the_run():
    with pytest.raises(RunError, match="more than 2 env workers died within an hour"):
        outcome_of(FaultyFactory("kill", at=3, always=True), steps=30, max_deaths=2, max_deaths_in_a_row=1)


def test_deaths_that_are_rare_never_end_a_run(monkeypatch):
    monkeypatch.setattr(deaths_of_children, "HOUR", 0.0)
    reports, deaths = outcome_of(
        FaultyFactory("kill", at=3, always=True), steps=12, max_deaths=1, max_deaths_in_a_row=1
    )
    assert deaths == len(reports) >= 3


@pytest.mark.parametrize("word", ["exit", "interrupt"])
def test_an_environment_that_leaves_its_process_has_failed_like_any_other(word):
    reports, deaths = outcome_of(Fragile(word=word))
    assert deaths == len(reports) == 1
    assert {"exit": "SystemExit", "interrupt": "KeyboardInterrupt"}[word] in reports[0]


def test_a_message_of_megabytes_is_cut_at_both_ends_and_heard():
    reports, deaths = outcome_of(Fragile(word="raise"))
    assert deaths == len(reports) == 1
    assert "ValueError: beginxxx" in reports[0] and "xxxend" in reports[0]
    assert "characters left out" in reports[0] and len(reports[0]) < 20_000


def test_short_messages_stay_as_they_are():
    assert shortened("short") == "short"
    assert shortened("0123456789", 4) == "01\n[... 6 characters left out ...]\n89"


def test_a_worker_that_is_killed_while_it_restores_is_replaced():
    envs, other = ProcessEnvs(LedgerFactory(), 2, 2), ProcessEnvs(LedgerFactory(), 2, 2)
    try:
        play(envs, 4)
        state = envs.state()
        other.recv(0)
        os.kill(other.workers[1].process.pid, signal.SIGKILL)
        other.restore(state)
        assert other.state()["slots"] == state["slots"]
        assert other.budget.deaths == 1
    finally:
        envs.close()
        other.close()


OWNER = """
    import sys
    from test_children import Fragile, play
    from phalanx.sampling.processes import ProcessEnvs
    envs = ProcessEnvs(Fragile(word="print"), 2, 1)
    play(envs, 5)
    envs.close()
    open(sys.argv[1], "w").write(str(envs.budget.deaths))
"""


@pytest.mark.parametrize("read", [True, False])
def test_what_environments_print_is_shown_where_somebody_reads_and_harms_nobody_elsewhere(read, tmp_path):
    deaths = tmp_path / "deaths"
    command = [sys.executable, "-c", textwrap.dedent(OWNER), str(deaths)]
    reader, writer = os.pipe()
    if not read:
        os.close(reader)
    owner = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": IMPORTABLE}, stdout=writer, stderr=writer)
    os.close(writer)
    shown = b""
    if read:
        with os.fdopen(reader, "rb") as file:
            shown = file.read()
    assert owner.wait(60) == 0
    assert deaths.read_text() == "0"
    assert shown.count(b"the simulator says hello") == (10 if read else 0)


MINE = """
    import gymnasium
    class Mine(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-1, 1, (2,))
        action_space = gymnasium.spaces.Discrete(2)
        def reset(self, *, seed=None, options=None):
            return self.observation_space.sample() * 0, {}
        def step(self, action):
            return self.observation_space.sample() * 0, 1.0, False, True, {}
    gymnasium.register("Mine-v0", Mine)
"""


def test_workers_run_no_stray_code_of_the_current_directory_but_find_environments_there(tmp_path):
    stray = "open(__import__('os').environ['STRAY'], 'a').write(__file__)\nraise SystemExit(3)\n"
    for module in ("random.py", "struct.py", "numpy/__init__.py", "phalanx/__init__.py"):
        path = tmp_path / module
        path.parent.mkdir(exist_ok=True)
        path.write_text(stray)
    (tmp_path / "mine.py").write_text(textwrap.dedent(MINE))
    program = "import sys; sys.path.remove(''); from phalanx.cli.main import entry; entry()"
    flags = ["train", "ppo-gym", "--env.id", "mine:Mine-v0", "--topology", "synchronous", "--run.steps", "2048"]
    run = subprocess.run(
        [sys.executable, "-c", program, *flags, "--run.directory", "out"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(TREE), "STRAY": str(tmp_path / "stray")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert not (tmp_path / "stray").exists()
    assert run.returncode == 0, run.stderr
