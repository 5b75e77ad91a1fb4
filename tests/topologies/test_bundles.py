"""Bundles of gorila around parameter servers in this process: no Ray, the same classes."""

from __future__ import annotations

import contextlib
import dataclasses
import threading

import pytest
import torch

from phalanx.cluster.member import MemberOrder
from phalanx.config import DBA3CConfig, GorilaConfig, OptimizerConfig, SerialConfig
from phalanx.config.presets import preset
from phalanx.errors import UserError
from phalanx.parameters.client import ShardsHere
from phalanx.parameters.flat import FlatParameters
from phalanx.parameters.rules import make_rule
from phalanx.parameters.shards import ParameterShard, cut
from phalanx.registry import make_evaluation_policy
from phalanx.replica.build import make_model, make_replica
from phalanx.runtime.device import Compute
from phalanx.runtime.share import Share
from phalanx.sampling.evaluator import evaluate
from phalanx.topologies import serial
from phalanx.topologies.bundle import Bundle
from phalanx.types import Progress

CPU = Compute(torch.device("cpu"))
ADAGRAD = OptimizerConfig(rule="adagrad", learning_rate=0.02, epsilon=1e-3, initial_accumulator=0.01, clip="none")


@pytest.fixture(autouse=True)
def one_thread():
    """The first weights depend on it in their last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def experiment_of(name, topology, steps, algorithm=None, **sampler):
    experiment = preset(name)
    return dataclasses.replace(
        experiment,
        algorithm=dataclasses.replace(experiment.algorithm, **(algorithm or {})),
        optimizer=ADAGRAD if "catch" in name and isinstance(topology, GorilaConfig) else experiment.optimizer,
        sampler=dataclasses.replace(experiment.sampler, **sampler),
        topology=topology,
        run=dataclasses.replace(experiment.run, steps=steps, precision="float32"),
    ).validate()


def shards_of(experiment, spec, bound=0):
    flat = FlatParameters(make_model(experiment, spec)).flat
    rule, parts = make_rule(experiment.optimizer), cut(len(flat), experiment.topology.shards)
    return [ParameterShard(flat[part], rule, bound) for part in parts]


def spec_of(experiment):
    with serial.make_envs(experiment, CPU, print) as envs:
        return envs.spec


@contextlib.contextmanager
def bundle_of(experiment, shards, rank=0, count=1):
    bundle = Bundle(MemberOrder(experiment, Share(rank, count), lambda: ShardsHere(shards), rank))
    with bundle.open:
        yield bundle


@pytest.mark.parametrize("name", ["dqn-catch", "c51-catch", "eps-rainbow-catch"])
def test_gorila_with_one_bundle_equals_serial(name):
    """No bounds, a pull before each acting step, AdaGrad, target network and epsilon by updates: bit for bit."""
    clocks = {"target_clock": "updates", "target_every": 50, "epsilon_clock": "updates", "epsilon_length": 300}
    topology = GorilaConfig(bundles=1, shards=3, poll_every=1)
    experiment = experiment_of(name, topology, 2_000, clocks, environments=4)
    with bundle_of(experiment, shards := shards_of(experiment, spec_of(experiment))) as bundle:
        scores = []
        while bundle.replica.progress.steps < experiment.run.steps:
            done = bundle.work(Progress(), 0.2)
            scores += done.report.scores if done.report else []
        ours = torch.cat([shard.values for shard in shards])
        assert torch.equal(ours, bundle.replica.parameters.flat)
        assert done.own.version == shards[0].version > 150
        assert done.counts == {"pushes": shards[0].version, "stale": 0, "late": 0}
    alone = dataclasses.replace(experiment, optimizer=ADAGRAD, topology=SerialConfig()).validate()
    with serial.make_envs(alone, CPU, print) as envs, make_replica(alone, envs, CPU, print) as replica:
        theirs = []
        while replica.progress.steps < alone.run.steps:
            theirs += replica.iterate().scores
        assert torch.equal(ours, replica.parameters.flat)
    assert scores == theirs
    assert scores


def in_threads(bundles, done):
    """Each bundle works in a thread of its own until all of them are done; what each told last."""
    told = {}

    def work(rank):
        while not done():
            others = Progress(
                sum(bundle.clocks.own_progress().steps for bundle in bundles if bundle is not bundles[rank])
            )
            told[rank] = bundles[rank].work(others, 0.05)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(bundles))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    return told


def test_bundles_go_by_the_updates_of_all():
    """Epsilon and target network follow what the servers have applied, whoever made the gradients."""
    clocks = {"epsilon_clock": "updates", "epsilon_length": 400, "target_clock": "updates", "target_every": 50}
    experiment = experiment_of("gorila-catch", GorilaConfig(bundles=2, shards=2), 4_000, clocks)
    shards = shards_of(experiment, spec_of(experiment))
    with bundle_of(experiment, shards, 0, 2) as one, bundle_of(experiment, shards, 1, 2) as other:
        told = in_threads([one, other], lambda: one.replica.progress.steps >= 4_000)
        version = shards[0].version
        assert sum(done.counts["pushes"] for done in told.values()) == version
        for bundle in (one, other):
            assert bundle.replica.progress.updates == pytest.approx(version, abs=100)
            assert bundle.replica.learner.algorithm.tick >= version // 50 - 2
            policy = bundle.replica.collector.buffers[0].policy
            assert float(policy.now) < 0.1


@pytest.mark.parametrize(
    ("name", "topology", "words"),
    [("a2c-catch", GorilaConfig(), "replay memories"), ("dqn-catch", DBA3CConfig(), "short segments")],
)
def test_an_algorithm_that_does_not_fit_is_refused(name, topology, words):
    with pytest.raises(UserError, match=words):
        dataclasses.replace(preset(name), topology=topology).validate()


def test_two_bundles_with_bounds_learn_catch():
    """By turns, as threads of one process would share one core anyway."""
    experiment = experiment_of("gorila-catch", preset("gorila-catch").topology, 40_000)
    shards = shards_of(experiment, spec := spec_of(experiment), bound=experiment.topology.staleness)
    with bundle_of(experiment, shards, 0, 2) as one, bundle_of(experiment, shards, 1, 2) as other:
        score, own, looked = -1.0, [Progress(), Progress()], 0
        while score < 0.8 and sum(each.steps for each in own) < 40_000:
            for rank, bundle in enumerate((one, other)):
                elsewhere = own[1 - rank]
                own[rank] = bundle.work(Progress(elsewhere.steps, 0, shards[0].version), 0.0).own
            if sum(each.steps for each in own) >= looked + 4_000:
                looked += 4_000
                score = evaluated(experiment, shards, spec)
    assert score >= 0.8


def evaluated(experiment, shards, spec):
    """The mean score of games with what the servers have."""
    model = make_model(experiment, spec)
    ShardsHere(shards).read(FlatParameters(model).flat, [None for _ in shards])
    policy = make_evaluation_policy(experiment, model, CPU, greedy=True)
    scores = evaluate(experiment.env, policy, CPU, 50, 1, Progress())
    return sum(scores) / len(scores)
