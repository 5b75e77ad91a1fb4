"""A node turn by turn: what its graphs compute beside the eager way, what a resumed one does, how great lags become."""

from __future__ import annotations

import pytest
import torch
from node_runs import Driven, experiment_of, node_of

from phalanx.config import ToyConfig
from phalanx.sampling.graph_inference import sizes_up_to

TOYS = {"catch": ToyConfig(), "truncated": ToyConfig("counter", stack=3, length=7)}


def driven(experiment, graphs, turns):
    with node_of(experiment, graphs, pytest.fail) as node:
        Driven(node).run(turns)
        segments = [segment.state() for segment in node.queue.segments]
        trainer = node.trainers.hands[0]
        graphs_made = len(node.predictors.hands[0].inference.launches) if graphs else 0
        numbers = trainer.take_numbers()
        return node.parameters.flat.clone(), node.progress, numbers, segments + trainer.batch, graphs_made


@pytest.mark.parametrize("min_batch", [1, 12, 20])
@pytest.mark.parametrize("toy", TOYS)
@pytest.mark.parametrize("name", ["a2c-catch", "ppo-catch"])
def test_graphs_of_predictors_and_trainers_do_what_eager_ones_do(name, toy, min_batch):
    """With more agents than the smallest graph has rows, and batches of several sizes."""
    rate = {"rule": "sgd"} if toy == "truncated" else {}
    flags = {"algorithm": {"minibatches": 1}} if name == "ppo-catch" else {}
    experiment = experiment_of(name, TOYS[toy], agents=3, each=4, min_batch=min_batch, **rate, **flags)
    ours, theirs = driven(experiment, True, 60), driven(experiment, False, 60)
    assert ours[1] == theirs[1] and ours[1].updates > 10
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=2e-5)
    assert ours[2][0] == theirs[2][0]  # lags
    assert ours[2][1].keys() == theirs[2][1].keys()
    for key, value in theirs[2][1].items():
        assert ours[2][1][key] == pytest.approx(value, rel=1e-3, abs=1e-4), key
    assert ours[4] <= 2


@pytest.mark.parametrize(("most", "sizes"), [(1, [1]), (8, [8]), (9, [8, 9]), (128, [8, 32, 128]), (40, [8, 32, 40])])
def test_there_are_few_sizes_of_graphs_and_room_for_all(most, sizes):
    assert list(sizes_up_to(most)) == sizes
