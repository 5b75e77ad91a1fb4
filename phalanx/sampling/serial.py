"""Environments stepped one after the other in this process: the reference for every other VectorEnvs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from phalanx.errors import EnvironmentFailed
from phalanx.sampling.slot import (
    EnvFactory,
    Slot,
    SlotRules,
    allocate_step,
    blamed,
    group_slices,
    too_long_to_restore,
)
from phalanx.types import EnvStep


class SerialEnvs:
    """A list of slots and one step buffer."""

    shared_memory = False

    def __init__(
        self,
        factory: EnvFactory,
        environments: int,
        groups: int = 1,
        rules: SlotRules | None = None,
        report: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self.report = report
        envs, rules = [], rules or SlotRules()
        for number in range(rules.first, rules.first + environments):
            with blamed(number):
                envs.append(factory(number, 0))
        self.spec = envs[0].spec
        self.groups = group_slices(environments, groups)
        self.buffer = allocate_step(self.spec, environments)
        self.slots = [Slot(index, env, self.buffer, rules) for index, env in enumerate(envs)]

    def ready(self, groups: Sequence[int], wait: bool = True) -> int | None:
        return groups[0]

    def recv(self, group: int) -> EnvStep:
        for slot in self.slots[self.groups[group]]:
            if slot.fresh:
                slot.begin()
        return self.buffer[self.groups[group]]

    def send(self, group: int, actions: np.ndarray) -> None:
        for slot, action in zip(self.slots[self.groups[group]], actions.tolist(), strict=True):
            slot.advance(action)

    def unbalanced(self) -> bool:
        return False

    def balance(self) -> None:
        """One process has nothing to balance."""

    def state(self) -> dict[str, Any]:
        return {"slots": [slot.state() for slot in self.slots]}

    def restore(self, state: dict[str, Any]) -> None:
        for slot, saved in zip(self.slots, state["slots"], strict=True):
            slot.restore(saved)
        if sentence := too_long_to_restore(state["slots"]):
            self.report(sentence)

    def __enter__(self) -> SerialEnvs:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every environment, also after one that fails; that is told unless another error is under way."""
        under_way, failures = sys.exc_info()[0], []
        for slot in self.slots:
            try:
                with blamed(slot.number):
                    slot.env.close()
            except EnvironmentFailed as failure:
                failures.append(failure)
        if failures and under_way is None:
            raise failures[0]
