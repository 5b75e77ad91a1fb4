"""A quorum while workers and servers come and go."""

from __future__ import annotations

import pytest
import torch

from phalanx.cluster.quorum import Quorum
from phalanx.errors import RunError
from phalanx.parameters.rules import SGD
from phalanx.parameters.shards import QuorumShard, Verdict


def test_a_quorum_is_lowered_to_those_that_live_and_raised_when_they_are_back():
    quorum = Quorum(3, "lower")
    assert quorum.look(4) == quorum.look(3) == ""
    assert quorum.look(2) == "2 workers are alive: a step takes the gradients of 2 from now on"
    assert quorum.look(2) == ""
    assert quorum.look(0) == "0 workers are alive: a step takes the gradients of 1 from now on"
    assert quorum.look(4) == "4 workers are alive: a step takes the gradients of 3 from now on"
    assert quorum.present == 3


def test_or_the_run_stops_if_that_was_chosen():
    quorum = Quorum(3, "stop")
    assert quorum.look(3) == ""
    with pytest.raises(RunError, match=r"1 worker is alive, but a step needs the gradients of 3; .*too-few lower"):
        quorum.look(1)


def test_without_steps_there_is_nothing_to_lower():
    assert Quorum(0, "stop").look(0) == ""


def test_a_gradient_that_waited_in_a_server_that_died_counts_when_it_comes_again():
    """The copy its successor begins with knows that it had come, but does not have it."""
    shard = QuorumShard(torch.zeros(16), SGD(0.0), quorum=2)
    assert shard.push(0, 1, 0, torch.ones(16), 1.0).verdict is Verdict.WAITING
    copy = shard.state()
    successor = QuorumShard(torch.zeros(16), SGD(0.0), quorum=2)
    successor.restore(copy)
    assert successor.push(0, 1, 0, torch.ones(16), 1.0).verdict is Verdict.WAITING
    assert successor.push(1, 1, 0, torch.full((16,), 3.0), 1.0).verdict is Verdict.APPLIED
    assert torch.equal(successor.values, torch.full((16,), -2.0))
