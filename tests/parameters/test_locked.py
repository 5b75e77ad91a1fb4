"""Threads that share parameters: none is lost, and on a GPU each one's work waits for that of the one before."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import torch
from torch import nn

from phalanx.config import OptimizerConfig
from phalanx.parameters.flat import FlatParameters
from phalanx.parameters.local import LocalStore
from phalanx.parameters.locked import LockedStore, SharedParameters
from phalanx.parameters.rules import make_rule
from phalanx.types import Gradient


def vector(value: float = 0.0) -> FlatParameters:
    module = nn.Module()
    module.vector = nn.Parameter(torch.full((1000,), value))
    return FlatParameters(module)


def test_every_gradient_of_every_thread_is_applied_and_no_copy_is_half_of_one():
    rule = make_rule(OptimizerConfig(rule="sgd"))
    shared = SharedParameters(LocalStore(vector(), rule, lambda gradient: gradient.norm()))
    torn = []

    def train() -> None:
        store = LockedStore(shared, vector())
        for _ in range(200):
            version = store.push(Gradient(torch.full((1000,), -1.0), torch.tensor(0.0), 0), 1.0)
            copy = store.parameters.flat
            torn.append(not bool((copy == version).all()))

    threads = [threading.Thread(target=train) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert shared.version == 800 == len(torn)
    assert bool((shared.store.parameters.flat == 800).all())
    assert not any(torn)


def test_on_a_gpu_each_turn_waits_for_the_one_before(monkeypatch):
    """What is launched within a turn stands between a wait for the last turn's event and the next one of it."""
    told: list[str] = []

    class Event:
        def wait(self) -> None:
            told.append("wait")

        def record(self) -> None:
            told.append("record")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: told.append("done")))
    store = SimpleNamespace(
        parameters=SimpleNamespace(flat=SimpleNamespace(is_cuda=True)),
        version=1,
        push=lambda gradient, rate: told.append("push") or 1,
        pull=lambda parameters: told.append("pull") or 1,
        state=lambda: told.append("state"),
        restore=lambda state: told.append("restore"),
    )
    locked = LockedStore(SharedParameters(store), store.parameters)
    locked.push(None, 0.1)
    assert told == ["done", "wait", "push", "pull", "record"]  # its gradient is there before others have to wait
    for name, arguments in (("pull", [None]), ("state", []), ("restore", [{}])):
        told.clear()
        getattr(locked, name)(*arguments)
        assert told == ["wait", name, "record"]
