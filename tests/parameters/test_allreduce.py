"""The store of learners in lock step: a mean before what a single store does, and the same bits everywhere."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.config import OptimizerConfig
from phalanx.errors import NotFinite
from phalanx.parameters.allreduce import AllReduceStore
from phalanx.parameters.flat import FlatParameters
from phalanx.parameters.local import LocalStore
from phalanx.parameters.rules import make_clip, make_rule
from phalanx.runtime.group import Group, PeerLost, meeting_point
from phalanx.types import Gradient

CONFIG = OptimizerConfig(rule="adam", clip="global", clip_norm=0.1, epsilon=1e-3)


def parameters(seed: int = 0) -> FlatParameters:
    torch.manual_seed(seed)
    return FlatParameters(nn.Linear(7, 5))


def together(size: int, member: Callable[[AllReduceStore, Group], Any]) -> list[Any]:
    """What each of `size` learners, in threads of their own, returns; an error is a result, too."""
    store, results = meeting_point(), [None] * size

    def run(rank: int) -> None:
        try:
            group = Group(meeting_point(store.port), 0, rank, size, timeout=20.0)
            own = all_parameters[rank]
            learner = AllReduceStore(own, make_rule(CONFIG), make_clip(CONFIG, own.slices.values()), size, False)
            learner.join(group, source=0)
            results[rank] = member(learner, group)
            group.close()
        except Exception as error:
            results[rank] = error

    all_parameters = [parameters(rank) for rank in range(size)]  # each begins with its own
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return results


def gradients(count: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(40, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_learners_apply_the_mean_of_their_gradients(size):
    """Everybody begins with what the first has; the clip is of the mean."""
    pushes = [gradients(20, seed) for seed in range(size)]

    def member(store: AllReduceStore, group: Group) -> tuple[Tensor, int, int]:
        for flat in pushes[group.rank]:
            version = store.push(Gradient(flat.clone(), torch.tensor(1.0), 0), 0.01)
        return store.parameters.flat.clone(), version, store.checksum()

    results = together(size, member)
    own = parameters(0)
    reference = LocalStore(own, make_rule(CONFIG), make_clip(CONFIG, own.slices.values()))
    for flats in zip(*pushes, strict=True):
        reference.push(Gradient(torch.stack(flats).mean(0), torch.tensor(1.0), 0), 0.01)
    for flat, version, checksum in results:
        torch.testing.assert_close(flat, own.flat, rtol=0, atol=1e-6)
        assert version == 20
        assert torch.equal(flat, results[0][0])
        assert checksum == results[0][2]


@pytest.mark.parametrize("bad", ["gradient", "loss"])
def test_what_is_not_finite_in_one_is_refused_by_all(bad):
    def member(store: AllReduceStore, group: Group) -> tuple[bool, bool]:
        before = store.parameters.flat.clone()
        (flat,), loss = gradients(1, group.rank), torch.tensor(1.0)
        if group.rank == 1 and bad == "gradient":
            flat[3] = torch.nan
        if group.rank == 1 and bad == "loss":
            loss = torch.tensor(torch.inf)
        with pytest.raises(NotFinite):
            store.push(Gradient(flat, loss, 0), 0.01)
        return torch.equal(before, store.parameters.flat), store.version == 0

    assert together(3, member) == [(True, True)] * 3


def test_statistics_are_means_over_all():
    def member(store: AllReduceStore, group: Group) -> float:
        return float(store.peers.mean(torch.tensor(float(group.rank))))

    assert together(3, member) == [1.0] * 3


def test_who_leaves_is_missed_by_the_others():
    def member(store: AllReduceStore, group: Group) -> str:
        if group.rank == 1:
            store.leave()
            return "left"
        with pytest.raises(PeerLost):
            for flat in gradients(50, 0):
                store.push(Gradient(flat, torch.tensor(1.0), 0), 0.01)
        store.leave()
        return "missed"

    assert together(3, member) == ["missed", "left", "missed"]


def test_without_a_group_nothing_is_pushed():
    own = parameters()
    store = AllReduceStore(own, make_rule(CONFIG), make_clip(CONFIG, own.slices.values()), 2, False)
    with pytest.raises(PeerLost):
        store.push(Gradient(gradients(1, 0)[0], torch.tensor(1.0), 0), 0.01)


def test_objects_reach_everybody():
    def member(store: AllReduceStore, group: Group) -> tuple[list[Any], Any]:
        own = {"rank": group.rank, "text": "x" * 1000 * group.rank}
        return [one["rank"] for one in group.objects(own)], group.object_of(1, own)["rank"]

    assert together(3, member) == [([0, 1, 2], 1)] * 3


def test_a_group_whose_members_do_not_come_is_given_up(monkeypatch):
    monkeypatch.setattr("phalanx.runtime.group.FORMING_TIMEOUT", 1.0)
    with pytest.raises(PeerLost):
        Group(meeting_point(), 0, 0, 2, timeout=20.0)


def test_an_exchange_may_take_longer_than_forming_the_group(monkeypatch):
    """Rank 0 evaluates, say."""
    monkeypatch.setattr("phalanx.runtime.group.FORMING_TIMEOUT", 1.0)

    def member(store: AllReduceStore, group: Group) -> float:
        time.sleep(1.5 * group.rank)
        return float(store.peers.mean(torch.tensor(float(group.rank))))

    assert together(2, member) == [0.5] * 2


def stop_in_a_group(port: int) -> None:
    group = Group(meeting_point(port), 0, 1, 2, timeout=9.0)
    os.kill(os.getpid(), signal.SIGSTOP)
    group.close()


@pytest.mark.parametrize("noticed_by", ["watch", "timeout"])
def test_a_member_that_vanished_is_not_waited_for(monkeypatch, noticed_by):
    """Nothing closes its connections, as of a host that was switched off. Nor is the exchange waited for that it will
    never answer, when the group is closed."""
    monkeypatch.setattr("phalanx.runtime.group.LOOK", 0.1)

    def watch() -> None:
        if noticed_by == "watch":
            raise PeerLost("no sign of life")

    store = meeting_point()
    other = multiprocessing.get_context("fork").Process(target=stop_in_a_group, args=(store.port,), daemon=True)
    other.start()
    try:
        group = Group(store, 0, 0, 2, timeout=1000.0 if noticed_by == "watch" else 0.3, watch=watch)
        while Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)
        with pytest.raises(PeerLost):
            group.average(torch.ones(3))
        closing = threading.Thread(target=group.close, daemon=True)
        closing.start()
        closing.join(10)
        assert not closing.is_alive()
    finally:
        other.kill()
        other.join(10)
