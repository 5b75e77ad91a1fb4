"""Environments that misbehave on demand, factories for them that can be sent to a worker process, and a way to play."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from phalanx.types import EnvSpec, Outcome

LENGTH = 7


class Ledger:
    """Frame [environment, incarnation, episode, step, action, checksum]: each transition can be told from any other."""

    spec = EnvSpec((6,), np.float32, actions=5)

    def __init__(self, index: int, incarnation: int) -> None:
        self.index, self.incarnation = index, incarnation
        self.episode, self.count, self.action = 0, 0, -1

    def reset(self, frame: np.ndarray) -> None:
        self.episode, self.count, self.action = self.episode + 1, 0, -1
        self.write(frame)

    def step(self, action: int, frame: np.ndarray) -> Outcome:
        self.count, self.action = self.count + 1, action
        self.write(frame)
        over = self.count == LENGTH + self.index % 3
        return Outcome(float(self.count), float(self.count) if over else np.nan, over, False)

    def write(self, frame: np.ndarray) -> None:
        frame[:5] = self.index, self.incarnation, self.episode, self.count, self.action
        frame[5] = checksum(frame)

    def prepare(self) -> None: ...

    def render(self) -> np.ndarray:
        return np.zeros((2, 2, 3), np.uint8)

    def state(self) -> dict:
        return dict(vars(self))

    def restore(self, state: dict) -> None:
        vars(self).update(state)

    def close(self) -> None: ...


def checksum(frame: np.ndarray) -> float:
    return float(frame[:5] @ np.array([3, 5, 7, 11, 13], np.float32))


class Faulty(Ledger):
    """Fails once, in the given environment at the given step of its first incarnation; or is slow in every one."""

    def __init__(self, index: int, incarnation: int, plan: FaultyFactory) -> None:
        super().__init__(index, incarnation)
        self.plan, self.total = plan, 0

    def step(self, action: int, frame: np.ndarray) -> Outcome:
        self.total += 1
        plan = self.plan
        if plan.fault == "slow":
            time.sleep(0.25)
        elif self.index == plan.culprit and self.total == plan.at and (plan.always or self.incarnation == 0):
            frame[:] = 666.0  # a torn row that nobody must see
            if plan.fault == "raise":
                raise ValueError("the simulator fell over")
            if plan.fault == "hang":
                time.sleep(3600)
            os.kill(os.getpid(), signal.SIGKILL if plan.fault == "kill" else signal.SIGSEGV)
        return super().step(action, frame)

    def restore(self, state: dict) -> None:
        if self.plan.fault == "hung restore":
            time.sleep(3600)
        super().restore(state)

    def state(self) -> dict:
        if self.plan.fault == "state" and self.index == self.plan.culprit and self.incarnation == 0:
            raise ValueError("the simulator has no state")
        return super().state()


@dataclass(frozen=True)
class LedgerFactory:
    def __call__(self, index: int, incarnation: int = 0) -> Ledger:
        return Ledger(index, incarnation)


@dataclass(frozen=True)
class FaultyFactory:
    fault: str
    culprit: int = 1
    at: int = 5
    always: bool = False

    def __call__(self, index: int, incarnation: int = 0) -> Faulty:
        return Faulty(index, incarnation, self)


def descendants(pid: int) -> list[int]:
    """Processes whose parent is `pid`, and theirs."""
    children = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[1]) == pid and fields[0] != "Z":
                children.append(int(entry.name))
    return children + [grandchild for child in children for grandchild in descendants(child)]


def play(envs, steps, seed=0):
    """Every delivered row, by environment, under fixed pseudo-random actions per environment and step."""
    environments = envs.groups[-1].stop
    actions = np.random.default_rng(seed).integers(envs.spec.actions, size=(steps, environments))
    rows = [[] for _ in range(environments)]

    def take(group):
        step = envs.recv(group)
        for offset, row in enumerate(range(environments)[envs.groups[group]]):
            values = step[offset]
            frames = (values.observation.copy(), values.last_observation.copy() if values.truncated else 0)
            flags = [values.reward, values.score, values.terminated, values.truncated, values.first, values.cut]
            rows[row].append((frames, [float(flag) for flag in flags]))

    away, taken = list(range(len(envs.groups))), [0 for _ in envs.groups]
    while away:
        group = envs.ready(away)
        away.remove(group)
        take(group)
        if taken[group] < steps:
            envs.send(group, actions[taken[group], envs.groups[group]])
            taken[group] += 1
            away.append(group)
    return rows, actions
