"""A quorum of n of n equals one learner with the n-fold batch, without Ray and with it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import threading
from functools import cache

import pytest
import torch

from phalanx.cluster.engine import running
from phalanx.cluster.server import ShardOrder, with_arrays
from phalanx.config import SerialConfig
from phalanx.config.presets import preset
from phalanx.parameters.client import ShardedStore, ShardsHere, states_of
from phalanx.parameters.flat import FlatParameters
from phalanx.parameters.rules import make_clip, make_rule
from phalanx.parameters.shards import QuorumShard, cut
from phalanx.replay.latest import LatestRollout
from phalanx.replica.build import local_store, make_learner, make_model, make_replica
from phalanx.runtime.clocks import Clocks
from phalanx.runtime.device import Compute
from phalanx.runtime.share import WHOLE
from phalanx.runtime.timing import Timing
from phalanx.topologies import serial
from phalanx.types import Rollout

CPU = Compute(torch.device("cpu"))
WORKERS, STEPS, SERVERS = 4, 30, 2


@cache
def experiment_of():
    """A2C with the rule of Distributed BA3C; the clip is each worker's own, and would tell them apart."""
    made = preset("dba3c-catch")
    optimizer = dataclasses.replace(made.optimizer, clip="none")
    return dataclasses.replace(made, optimizer=optimizer, topology=SerialConfig()).validate()


@cache
def rollouts():
    """Of all environments, one for each step."""
    experiment = experiment_of()
    with (
        serial.make_envs(experiment, CPU, print) as envs,
        make_replica(experiment, envs, CPU, print) as replica,
    ):
        return envs.spec, [copy.deepcopy(replica.collector.collect()) for _ in range(STEPS)]


def learn(make_store, columns=slice(None)):
    """The parameters after an update on these environments of each rollout."""
    experiment, (spec, made) = experiment_of(), rollouts()
    model = make_model(experiment, spec)
    parameters = FlatParameters(model)
    store = make_store(experiment, parameters)
    learner = make_learner(experiment, model, parameters, store, CPU, Clocks(), Timing(), print, WHOLE)
    experience = LatestRollout()
    for rollout in made:
        experience.put(Rollout(**{name: value[:, columns] for name, value in rollout.tensors().items()}))
        learner.learn(experience)
    return parameters.flat


@contextlib.contextmanager
def here(parts, states):
    """Servers in this process."""
    rule = make_rule(experiment_of().optimizer)
    shards = [QuorumShard(torch.zeros(part.stop - part.start), rule, quorum=WORKERS) for part in parts]
    for shard, state in zip(shards, states, strict=True):
        shard.restore(state)
    yield lambda: ShardsHere(shards)


@contextlib.contextmanager
def on_ray(parts, states):
    """Servers in processes of their own."""
    pytest.importorskip("ray")
    with running(""):
        from phalanx.cluster.servers import start_servers

        optimizer = experiment_of().optimizer
        orders = [
            ShardOrder(number, part.stop - part.start, optimizer, quorum=WORKERS) for number, part in enumerate(parts)
        ]
        servers = start_servers(orders, parts, [with_arrays(state) for state in states], WORKERS)
        try:
            yield servers.reach(bfloat16=False)
        finally:
            servers.end()


@pytest.mark.parametrize("servers", [here, on_ray])
def test_a_quorum_of_all_equals_one_learner_with_all_their_environments(servers):
    """Within 1e-5 after 30 steps; among themselves the workers hold the same bits."""
    alone = learn(local_store)
    experiment, spec = experiment_of(), rollouts()[0]
    begun = FlatParameters(make_model(experiment, spec)).flat
    rule, parts = make_rule(experiment.optimizer), cut(len(begun), SERVERS)
    each = experiment.sampler.environments // WORKERS
    results: dict[int, torch.Tensor] = {}
    with servers(parts, states_of(begun, {"version": 0, "rule": rule.init(len(begun))}, parts, rule)) as reach:

        def work(worker):
            def make_store(experiment, parameters):
                clip = make_clip(experiment.optimizer, parameters.slices.values())
                return ShardedStore(reach(), parameters, rule, clip, worker, consistent=True)

            results[worker] = learn(make_store, slice(worker * each, (worker + 1) * each))

        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(WORKERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    assert len(results) == WORKERS, "a worker failed, or hangs"
    assert all(torch.equal(results[0], other) for other in results.values())
    torch.testing.assert_close(results[0], alone, atol=1e-5, rtol=0.0)
    assert (alone - begun).abs().max() > 0.01
