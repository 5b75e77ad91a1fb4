"""On a GPU: stores that join several learners do with one what the local store does, inside and beside graphs."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch

from phalanx.config.presets import preset
from phalanx.parameters.allreduce import AllReduceStore
from phalanx.parameters.chunked import CentralParameters, ChunkLockedStore
from phalanx.parameters.rules import make_clip, make_rule
from phalanx.replica.build import local_store, make_replica
from phalanx.runtime.device import choose_compute
from phalanx.runtime.group import Group, meeting_point
from phalanx.topologies import synchronous

pytestmark = pytest.mark.gpu


def all_reduce(nccl):
    def make(experiment, parameters):
        clip = make_clip(experiment.optimizer, parameters.slices.values())
        store = AllReduceStore(parameters, make_rule(experiment.optimizer), clip, 1, capturable=nccl)
        store.join(Group(meeting_point(), 0, 0, 1, 60.0, nccl), source=0)
        return store

    return make


def chunk_locked(experiment, parameters):
    rule, clip = make_rule(experiment.optimizer), make_clip(experiment.optimizer, parameters.slices.values())
    central = CentralParameters.create(parameters.flat.cpu(), rule.init(parameters.flat.numel()), 3)
    return ChunkLockedStore(central, parameters, rule, clip)


STORES = {"NCCL": all_reduce(True), "gloo": all_reduce(False), "chunks": chunk_locked}


def run(name, make_store, **algorithm):
    experiment = preset(name)
    experiment = dataclasses.replace(
        experiment,
        algorithm=dataclasses.replace(experiment.algorithm, **algorithm),
        sampler=dataclasses.replace(experiment.sampler, environments=8, horizon=8, workers=2, decorrelation=8),
        run=dataclasses.replace(experiment.run, device="cuda", seed=3),
        topology=type(preset("a2c").topology)(),
    ).validate()
    compute = choose_compute(experiment.run).install()
    with contextlib.ExitStack() as stack:
        envs = stack.enter_context(synchronous.make_envs(experiment, compute, print))
        replica = stack.enter_context(make_replica(experiment, envs, compute, pytest.fail, make_store))
        while replica.progress.updates < 8:
            replica.iterate()
        torch.cuda.synchronize()
        kind = type(replica.learner).__name__, getattr(replica.learner, "whole_updates", None)
        return replica.parameters.flat.cpu().clone(), replica.progress, kind


@pytest.mark.parametrize("name", ["a2c-catch", "ppo-catch", "dqn-catch", "c51-catch"])
@pytest.mark.parametrize("store", STORES)
def test_with_one_learner_it_is_the_local_store(store, name):
    """NCCL is part of the update's graph, statistics of the batch included; the others push beside it."""
    memory = {"learning_starts": 200} if hasattr(preset(name).algorithm, "learning_starts") else {}
    statistics = {"normalize_advantage": True} if name == "a2c-catch" else {}
    ours = run(name, STORES[store], **memory, **statistics)
    theirs = run(name, local_store, **memory, **statistics)
    assert ours[2] == (("GraphLearner", True) if store == "NCCL" else ours[2])
    assert ours[2] == (("GraphLearner", False) if store == "chunks" else ours[2])
    assert ours[1] == theirs[1]
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=2e-4)
