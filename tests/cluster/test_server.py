"""A parameter server and its standby, in this process."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
import threading
import time

import pytest
import torch

from phalanx.cluster import server as servers
from phalanx.cluster.server import InBlock, NoParametersError, ShardOrder, ShardServer, with_arrays
from phalanx.cluster.standby import Standby
from phalanx.config import OptimizerConfig
from phalanx.parameters.blocks import SharedBlock
from phalanx.parameters.client import states_of
from phalanx.parameters.rules import make_rule
from phalanx.parameters.shards import Verdict

SIZE = 32
CONFIG = OptimizerConfig(rule="sgd", clip="none")
ONES = torch.ones(SIZE).numpy()


def standby_of(version=0):
    standby, rule = Standby(), make_rule(CONFIG)
    (state,) = states_of(torch.zeros(SIZE), {"version": version, "rule": rule.init(SIZE)}, [slice(0, SIZE)], rule)
    standby.keep(0, with_arrays(state))
    return standby


def server_of(standby, delay=0.0, **order):
    def keep(shard, state):
        time.sleep(delay)
        return standby.keep(shard, state)

    return ShardServer(ShardOrder(0, SIZE, CONFIG, **order), keep, standby.kept)


def in_threads(count, target):
    failures = []

    def guarded(worker):
        try:
            target(worker)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(worker,)) for worker in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)


@dataclasses.dataclass
class Watching:
    """An update rule that looks, whenever it is applied, how many updates would be lost."""

    rule: object
    lost: object
    most: int = 0

    def __getattr__(self, name):
        return getattr(self.rule, name)

    def apply(self, *arguments):
        self.rule.apply(*arguments)
        self.most = max(self.most, self.lost() + 1)


@pytest.mark.parametrize("quorum", [0, 2])
def test_never_more_updates_are_lost_than_was_said(quorum):
    """Several workers push while a slow copy is under way."""
    standby = standby_of()
    server = server_of(standby, delay=0.003, snapshot_every=7, quorum=quorum)
    shard = server.shard
    shard.rule = Watching(shard.rule, lambda: shard.version - standby.kept(0)["version"])

    def push(worker):
        for sequence in range(60):
            server.push(worker, sequence, shard.version, 0.1, 0.05, ONES)

    in_threads(4, push)
    assert shard.version > 40
    assert shard.rule.most == 7


@pytest.mark.parametrize("patience", [60.0, 0.0], ids=["waited for", "gone for long"])
def test_a_copy_that_did_not_arrive_is_none(monkeypatch, patience):
    """The server sends another one soon; only if the standby is gone for long it goes on and may lose more."""
    monkeypatch.setattr(servers, "COPY_TIMEOUT", patience)
    monkeypatch.setattr(servers, "RETRY", 0.001)
    standby, tries = standby_of(), []

    def keep(shard, state):
        tries.append(state["version"])
        return standby.keep(shard, state) if len(tries) > 3 else False

    server = ShardServer(ShardOrder(0, SIZE, CONFIG, snapshot_every=2), keep, standby.kept)
    server.shard.rule = Watching(server.shard.rule, lambda: server.shard.version - standby.kept(0)["version"])
    for sequence in range(9):
        server.push(0, sequence, sequence, 0.1, 0.0, ONES)
    assert tries == ([2, 2, 2, 2, 4, 6, 8] if patience else [2, 4, 6, 8])
    assert server.kept_version == standby.kept(0)["version"] == 8
    assert server.shard.rule.most == (2 if patience else 8)


def test_a_successor_takes_again_what_waited_when_the_copy_was_made():
    """A gradient that waits for its step is no part of the copy; without it the step might never end."""
    standby = standby_of()
    first = server_of(standby, quorum=2)
    assert first.push(0, 5, 0, 1.0, 0.0, ONES).verdict is Verdict.WAITING
    first.copy()
    successor = server_of(standby, quorum=2)
    assert successor.push(0, 5, 0, 1.0, 0.0, ONES).verdict is Verdict.WAITING
    assert successor.push(1, 5, 0, 1.0, 0.0, ONES).verdict is Verdict.APPLIED
    assert torch.equal(successor.shard.values, -torch.ones(SIZE))


def test_a_successor_applies_nothing_twice():
    standby = standby_of()
    first = server_of(standby)
    first.push(3, 1, 0, 1.0, 0.0, ONES)
    first.copy()
    successor = server_of(standby)
    receipt = successor.push(3, 1, 0, 1.0, 0.0, ONES)  # the answer was lost with the first one
    assert receipt.repeated and receipt.verdict is Verdict.APPLIED
    assert torch.equal(successor.shard.values, -torch.ones(SIZE))
    assert receipt.incarnation != first.shard.incarnation


def test_a_server_without_parameters_says_so_until_it_is_given_some():
    """It lets nobody wait: all its threads could be taken when somebody brings it parameters."""
    server = server_of(Standby())
    assert server.describe().began_with == -1
    calls = (
        lambda: server.push(0, 1, 9, 1.0, 0.0, ONES),
        lambda: server.read(None, False),
        server.version,
        server.state,
    )
    for call in calls:
        with pytest.raises(NoParametersError):
            call()
    server.copy()  # there is nothing to copy
    server.restore(standby_of(version=9).kept(0))
    assert server.push(0, 1, 9, 1.0, 0.0, ONES).version == 10
    assert server.describe().began_with == 9


def test_steps_that_are_not_there_are_not_read():
    standby = standby_of(version=44)
    server = server_of(standby, quorum=1)
    assert server.read(43, False) == (-1, None)
    server.push(0, 0, 44, 1.0, 0.0, ONES)
    assert server.read(44, False)[0] == 44
    server.push(0, 1, 46, 1.0, 0.0, ONES)  # the others are further: 45 is passed over, and step 46 is made
    assert server.version() == 47
    assert server.read(46, False)[1].tolist() == [-1.0] * SIZE
    assert server.read(45, False) == (-1, None)


def test_what_a_standby_keeps_can_be_read_without_torch():
    standby = standby_of()
    server = server_of(standby)
    server.push(0, 1, 0, 1.0, 0.0, ONES)
    copied = pickle.dumps(with_arrays(server.shard.state()))
    code = "import pickle, sys; pickle.loads(sys.stdin.buffer.read()); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], input=copied, check=True)


def test_the_memory_of_workers_that_are_gone_is_given_back():
    server = server_of(standby_of())

    def push(worker):
        block = SharedBlock.create(SIZE)
        block.numbers.fill_(1.0)
        block.header[0] = 1
        server.push(worker, 1, server.shard.version, 1.0, 0.0, InBlock(block.address, 0))
        return block

    alive = push(0)
    for worker in range(1, 20):
        push(worker)
    assert server.shard.version == 20
    assert len(server.blocks) <= 2
    assert alive.address in server.blocks


def test_a_step_that_a_lower_quorum_ends_is_copied_when_it_is_due():
    """Nobody may push at that moment who would do it, and all would wait for it."""
    standby = standby_of()
    server = server_of(standby, quorum=2, snapshot_every=1)
    assert server.push(0, 1, 0, 1.0, 0.0, ONES).verdict is Verdict.WAITING
    server.set_quorum(1)
    assert server.shard.version == standby.kept(0)["version"] == 1
    assert server.shard.limit == 2
