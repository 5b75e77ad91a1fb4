"""Environments of users that end the program, raise, or show what is not finite: named, told once, nothing lost."""

from __future__ import annotations

import math
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.envs import ReplayingEnv
from phalanx.envs.toy import Catch, Identity
from phalanx.errors import EnvironmentFailed, RunError, UserError
from phalanx.runtime.signals import Interrupted
from phalanx.sampling.serial import SerialEnvs
from phalanx.sampling.slot import Slot, SlotRules, allocate_step, blame, too_long_to_restore
from phalanx.types import Outcome
from whole_runs import newest


def leave(code: object) -> Any:
    def end() -> None:
        sys.exit(code)  # type: ignore[arg-type]

    return end


def throw(error: type[BaseException]) -> Any:
    def end() -> None:
        raise error("over")

    return end


WAYS = [
    pytest.param(leave(0), "called sys.exit(0)", id="exit"),
    pytest.param(throw(KeyboardInterrupt), "raised KeyboardInterrupt: over", id="interrupt"),
    pytest.param(throw(GeneratorExit), "raised GeneratorExit: over", id="generator"),
    pytest.param(throw(ValueError), "raised ValueError: over", id="error"),
]


@pytest.mark.parametrize(("end", "words"), WAYS)
def test_a_step_that_ends_the_program_ends_the_run_with_its_name_and_a_checkpoint(
    train, tmp_path, monkeypatch, capsys, end, words
):
    step, calls = Catch.step, []

    def failing(self: Catch, action: int, frame: np.ndarray) -> Any:
        calls.append(action)
        if len(calls) == 300:
            end()
        return step(self, action, frame)

    monkeypatch.setattr(Catch, "step", failing)
    assert train("a2c-catch", "--topology", "serial", "--sampler.decorrelation", 0, steps=5000) == 1
    error = capsys.readouterr().err
    line = end.__code__.co_firstlineno + 1
    assert error.splitlines()[-1] == f"phalanx: environment 3 {words} ({Path(__file__).name}:{line})"
    assert error.count("Traceback (most recent call last)") == 1
    assert newest(tmp_path / "run").steps == 256


@pytest.mark.parametrize(("end", "words"), WAYS)
@pytest.mark.parametrize("call", ["reset", "close", "state", "prepare", "restore"])
def test_every_call_of_an_environment_is_its_own_fault(monkeypatch, call, end, words):
    monkeypatch.setattr(signal, "getsignal", lambda number: None)  # as where somebody heeds Ctrl-C
    envs = SerialEnvs(lambda index, incarnation: ledger(index), 2)
    envs.recv(0)
    state = envs.state()
    setattr(envs.slots[1].env, call, lambda *arguments: end())
    calls = {
        "reset": envs.slots[1].reset,
        "close": envs.close,
        "state": envs.state,
        "prepare": envs.slots[1].prepare,
        "restore": lambda: envs.restore(state),
    }
    with pytest.raises(EnvironmentFailed) as raised:
        calls[call]()
    assert str(raised.value).startswith(f"environment 1 {words} ({Path(__file__).name}:")
    assert raised.value.__cause__ is not None


def test_a_factory_is_its_environments_own_fault():
    def factory(index: int, incarnation: int) -> Any:
        sys.exit(3) if index else None
        return ledger(index)

    with pytest.raises(EnvironmentFailed, match=r"environment 1 called sys.exit\(3\)"):
        SerialEnvs(factory, 2)


def test_sentences_and_ctrl_c_are_passed_on():
    for error in (UserError("a"), RunError("b"), KeyboardInterrupt()):
        assert blame(0, error) is error
    step, env = allocate_step(ledger(0).spec, 1), ledger(0)
    slot = Slot(0, env, step, SlotRules())
    slot.begin()

    def interrupted(action: int, frame: np.ndarray) -> Outcome:
        raise Interrupted

    env.step = interrupted
    with pytest.raises(Interrupted):
        slot.advance(0)


def test_an_error_of_closing_does_not_hide_another():
    envs = SerialEnvs(lambda index, incarnation: ledger(index), 2)
    envs.slots[0].env.close = leave(0)
    closed: list[int] = []
    envs.slots[1].env.close = lambda: closed.append(1)

    def run() -> None:
        try:
            raise RunError("the reason")
        finally:
            envs.close()

    with pytest.raises(RunError, match="the reason"):
        run()
    assert closed == [1]


@pytest.mark.parametrize("flags", [(), ("--topology", "synchronous", "--sampler.workers", 1)])
def test_a_last_observation_that_is_not_finite_names_its_environment(train, tmp_path, capsys, monkeypatch, flags):
    """The frame that only a truncated episode's value is made of."""
    if flags:
        from phalanx.topologies import serial, synchronous

        monkeypatch.setattr(synchronous, "make_envs", lambda *arguments: serial.make_envs(*arguments))
    step, calls = Identity.step, []

    def truncated(self: Identity, action: int, frame: np.ndarray) -> Any:
        calls.append(action)
        reward, score, _, _ = step(self, action, frame)
        if len(calls) != 301:
            return Outcome(reward, score, False, False)
        frame[:] = math.nan
        return Outcome(reward, 0.0, False, True)

    monkeypatch.setattr(Identity, "step", truncated)
    flags = flags or ("--topology", "serial")
    assert train("a2c-catch", "--env.name", "identity", "--sampler.decorrelation", 0, *flags, steps=10_000) == 1
    error = capsys.readouterr().err
    assert "the last observation of a truncated episode of environment [4] is not finite" in error
    assert error.count("\n") == 1


def ledger(index: int) -> Any:
    from faulty import Ledger

    return Ledger(index, 0)


class Endless:
    """An environment whose episode never ends and is too long to be saved after `limit` steps."""

    def __init__(self, limit: int) -> None:
        self.inner, self.limit, self.heartbeat = ledger(0), limit, lambda: None
        self.spec = self.inner.spec

    def reset(self, frame: np.ndarray) -> None:
        self.inner.reset(frame)

    def step(self, action: int, frame: np.ndarray) -> Outcome:
        self.inner.step(action, frame)
        return Outcome(1.0, math.nan, False, False)

    def state(self) -> dict[str, Any]:
        return {**self.inner.state(), "unsaved": self.inner.count if self.inner.count > self.limit else 0}

    def restore(self, state: dict[str, Any]) -> None:
        for _ in range(state["count"]):
            self.heartbeat()
        self.inner.restore({name: value for name, value in state.items() if name != "unsaved"})

    def prepare(self) -> None: ...

    def render(self) -> np.ndarray:
        return self.inner.render()

    def close(self) -> None: ...


class TestEpisodesTooLongToRestore:
    def restored(self, steps: int, twice: bool = False) -> tuple[SerialEnvs, list[str], dict[str, Any]]:
        said: list[str] = []
        envs = SerialEnvs(lambda index, incarnation: Endless(10), 1)
        envs.recv(0)
        for _ in range(steps):
            envs.send(0, np.zeros(1, np.int64))
        state = envs.state()
        other = SerialEnvs(lambda index, incarnation: Endless(10), 1, report=said.append)
        other.restore(state)
        if twice:
            state, said[1:] = other.state(), []
            other = SerialEnvs(lambda index, incarnation: Endless(10), 1)
            other.restore(state)
        return other, said, state

    @pytest.mark.parametrize("twice", [False, True])
    def test_are_followed_by_new_ones_that_nothing_is_learnt_across(self, twice):
        """Also where the run is saved again before it has gone on."""
        envs, said, _ = self.restored(11, twice)
        assert len(said) == 1 and "environments [0] were too long to be played again (up to 11 steps)" in said[0]
        envs.send(0, np.zeros(1, np.int64))
        row = envs.recv(0)[0]
        assert row.cut and row.first and row.reward == 0 and math.isnan(row.score)
        assert tuple(row.observation[2:4]) == (2, 0)  # the next episode, before its first step
        assert envs.slots[0].requests == 12
        envs.send(0, np.zeros(1, np.int64))
        row = envs.recv(0)[0]
        assert not row.cut and not row.first and row.reward == 1

    def test_are_no_others(self):
        envs, said, state = self.restored(10)
        assert said == [] and too_long_to_restore(state["slots"]) is None
        envs.send(0, np.zeros(1, np.int64))
        assert not envs.recv(0)[0].cut and envs.recv(0)[0].observation[3] == 11

    def test_are_over_where_the_slot_waits_for_the_next(self):
        envs, _, state = self.restored(11)
        over = {**state["slots"][0], "idle": True}
        assert too_long_to_restore([over]) is None
        envs.slots[0].restore(over)
        assert not envs.slots[0].fresh


def test_a_slot_gives_its_beat_to_an_environment_that_plays_again():
    env, beats = Endless(100), []
    assert isinstance(env, ReplayingEnv) and not isinstance(ledger(0), ReplayingEnv)
    slot = Slot(0, env, allocate_step(env.spec, 1), SlotRules())
    slot.heartbeat = lambda: beats.append(1)
    slot.begin()
    for _ in range(7):
        slot.advance(0)
    slot.restore(slot.state())
    assert len(beats) == 7
