"""Environments that misbehave on demand, and factories for them that can be sent to a worker process."""

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
