"""Threads that share parameters: none is lost, and on a GPU each one's work waits for that of the one before."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import torch
from torch import nn

from phalanx.config import OptimizerConfig
from phalanx.parameters.client import ShardedStore, ShardsHere
from phalanx.parameters.flat import FlatParameters
from phalanx.parameters.followed import FollowedParameters
from phalanx.parameters.local import LocalStore
from phalanx.parameters.locked import LockedStore, SharedParameters
from phalanx.parameters.rules import SGD, make_rule
from phalanx.parameters.shards import ParameterShard
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


def test_updates_of_others_between_pull_and_push_are_counted():
    shared = SharedParameters(
        LocalStore(vector(), make_rule(OptimizerConfig(rule="sgd")), lambda gradient: gradient.norm())
    )
    reader, first, second = (shared.store_of(vector()) for _ in range(3))

    def push(store: LockedStore) -> None:
        store.push(Gradient(torch.zeros(1000), torch.tensor(0.0), 0), 1.0)

    for _ in range(3):
        push(first)
    reader.pull(second.parameters)  # by somebody else
    push(second)
    assert shared.take_staleness() == {0: 3, 3: 1}
    push(second)  # from what it pushed itself
    first.pull(first.parameters)
    push(first)
    push(second)
    assert shared.take_staleness() == {0: 2, 1: 1}
    assert shared.take_staleness() == {}


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


def test_who_follows_servers_finds_newer_parameters_after_a_slice_has_fallen_back():
    """As when a server dies with its standby: predictors know newer parameters by their version."""
    servers = [ParameterShard(torch.zeros(500), SGD(0.0)) for _ in range(2)]
    beginning = servers[1].state()

    def connect(parameters: FlatParameters) -> ShardedStore:
        return ShardedStore(ShardsHere(servers), parameters, SGD(0.0), lambda flat: flat.norm())

    shared = FollowedParameters(vector(), connect)
    trainer, predictor, acting = shared.store_of(vector()), shared.store_of(shared.parameters), vector()

    def push(times: int) -> None:
        for _ in range(times):
            trainer.push(Gradient(torch.full((1000,), -1.0), torch.tensor(0.0), 0), 1.0)

    push(20)
    assert (shared.newest(), predictor.pull(acting)) == (20, 20)
    servers[1].restore(beginning)
    push(3)
    assert shared.newest() == 22  # the first of them is not told from what was lost
    predictor.pull(acting)
    lengths = [part.stop - part.start for part in shared.follower.shards.parts]
    assert acting.flat.tolist() == [23.0] * lengths[0] + [3.0] * lengths[1]
