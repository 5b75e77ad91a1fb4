"""Workers and the evaluator of dba3c around parameter servers in this process: no Ray, the same classes."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import Counter

import pytest
import torch

from phalanx.cluster.member import MemberOrder
from phalanx.config import DBA3CConfig
from phalanx.config.presets import preset
from phalanx.errors import UserError
from phalanx.parameters.client import ShardsHere
from phalanx.parameters.flat import FlatParameters
from phalanx.parameters.rules import make_rule
from phalanx.parameters.shards import ParameterShard, QuorumShard, cut
from phalanx.replica.build import make_model
from phalanx.runtime.device import Compute
from phalanx.runtime.share import Share
from phalanx.topologies import serial
from phalanx.topologies.dba3c_roles import Evaluator, Worker
from phalanx.types import Progress

CPU = Compute(torch.device("cpu"))
PATIENCE = 120.0  # seconds after which a test gives up; nothing here takes them


@pytest.fixture(autouse=True)
def threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def experiment_of(**topology):
    experiment = preset("dba3c-catch")
    return dataclasses.replace(
        experiment,
        topology=dataclasses.replace(experiment.topology, **topology),
        run=dataclasses.replace(experiment.run, precision="float32"),
    ).validate()


def servers_of(experiment, spec):
    flat = FlatParameters(make_model(experiment, spec)).flat
    rule, parts = make_rule(experiment.optimizer), cut(len(flat), experiment.topology.shards)
    quorum = experiment.topology.quorum_of_workers
    return [QuorumShard(flat[p], rule, quorum=quorum) if quorum else ParameterShard(flat[p], rule) for p in parts]


def spec_of(experiment):
    with serial.make_envs(experiment, CPU, print) as envs:
        return envs.spec


@contextlib.contextmanager
def crew(experiment, count):
    """The servers of a run, and so many of its workers."""
    servers = servers_of(experiment, spec_of(experiment))
    with contextlib.ExitStack() as stack:
        workers = []
        for rank in range(count):
            order = MemberOrder(
                experiment, Share(rank, experiment.topology.workers), lambda: ShardsHere(servers), 10 + rank
            )
            workers.append(Worker(order))
            stack.enter_context(workers[-1].open)
        try:
            yield servers, workers
        finally:
            for server in servers:  # whoever waits for a step is let go, so that threads end
                if isinstance(server, QuorumShard):
                    server.set_quorum(1)


def go_on(workers, until):
    """Ask all of them in turn, as a fleet does, until something is so; all they told, by worker."""
    told = [[] for _ in workers]
    own = [Progress() for _ in workers]
    deadline = time.monotonic() + PATIENCE
    while not until():
        assert time.monotonic() < deadline
        for rank, worker in enumerate(workers):
            others = [progress for other, progress in enumerate(own) if other != rank]
            steps = sum(progress.steps for progress in others)
            version = max((progress.version for progress in own), default=0)
            done = worker.work(Progress(steps, 0, version, sum(progress.episodes for progress in others)), 0.02)
            assert not done.failed
            own[rank] = done.own
            told[rank].append(done)
    return told


def test_workers_make_every_step_together_and_hold_the_same_bits():
    experiment = experiment_of(workers=2, shards=3, quorum=1.0)
    with crew(experiment, 2) as (servers, workers):
        told = go_on(workers, lambda: servers[0].version >= 60)
        last = [of_one[-1] for of_one in told]
        assert all(done.counts.get("late", 0) == 0 for done in last)
        assert servers[0].counts["waiting"] - servers[0].counts["applied"] in (0, 1)  # both in every step
        scores = [score for of_one in told for done in of_one for score in done.report.scores]
        steps = sum(done.own.steps for done in last)
        assert steps >= 60 * 2 * experiment.topology.batch * 0.9
        unreported = sum(done.own.episodes for done in last) - len(scores)  # of games that ended while it was made
        assert 0 <= unreported <= experiment.sampler.environments and len(scores) > 10
        lags = sum((done.report.lags for of_one in told for done in of_one), Counter())
        assert 0 <= min(lags) <= max(lags) <= 2  # a batch in the queue, and one that is learnt from
        values, state, apart = workers[1].whole()  # while they go on: all of it of one step
        assert int(state["rule"]["t"]) == state["version"] >= 60 and not apart
        assert len(values) == len(workers[0].shared.parameters.flat)
        firsts = [worker.node.agents.rules.first for worker in workers]
        assert firsts == [0, experiment.sampler.environments // 2]  # no game is played twice
    trainers = [worker.shared.trainers[0] for worker in workers]
    for store in trainers:
        store.pull(store.parameters)
    assert torch.equal(trainers[0].parameters.flat, trainers[1].parameters.flat)


def test_a_worker_answers_while_its_step_waits_for_others():
    """So nobody takes it for dead, and its simulators have filled the queue; a lower quorum lets it go on."""
    experiment = experiment_of(workers=2, quorum=1.0)
    with crew(experiment, 1) as (servers, (worker,)):
        queue = worker.node.queue
        told = go_on([worker], lambda: servers[0].counts["waiting"] and queue.room <= 0)
        for _ in range(20):
            told[0].append(worker.work(Progress(), 0.01))
        assert servers[0].version == 0
        assert told[0][-1].own.updates == 0
        for server in servers:
            server.set_quorum(1)
        go_on([worker], lambda: servers[0].version >= 3)


def test_a_worker_without_a_batch_acts_with_the_steps_of_others():
    experiment = experiment_of(workers=2, quorum=0.5, batch=100_000)
    with crew(experiment, 1) as (servers, (worker,)):
        for server in servers:
            for version in range(4):
                server.push(99, version, version, torch.ones_like(server.values), 0.1)
        (predictor,) = worker.node.predictors.hands
        go_on([worker], lambda: predictor.version == 4)
        newest = torch.cat([server.values for server in servers])
        assert torch.equal(predictor.parameters.flat, newest)


def test_workers_apply_gradients_as_they_come_if_asked():
    """The asynchronous mode, for comparison: every gradient is an update, and some come late."""
    experiment = experiment_of(workers=2, asynchronous=True)
    with crew(experiment, 2) as (servers, workers):
        told = go_on(workers, lambda: servers[0].version >= 40)
        assert sum(of_one[-1].counts["pushes"] for of_one in told) == pytest.approx(servers[0].version, abs=4)
        assert servers[0].counts["late"] == 0
        staleness = sum((done.report.staleness for of_one in told for done in of_one), Counter())
        assert staleness.total() >= 38


@pytest.mark.parametrize(("quorum", "workers", "gradients"), [(0.94, 64, 60), (0.75, 4, 3), (0.9, 10, 9), (0.1, 2, 1)])
def test_a_quorum_is_a_share_of_the_workers(quorum, workers, gradients):
    assert DBA3CConfig(workers=workers, quorum=quorum).quorum_of_workers == gradients
    assert DBA3CConfig(workers=workers, quorum=quorum, asynchronous=True).quorum_of_workers == 0


def test_the_preset_has_the_numbers_of_the_paper():
    experiment = preset("dba3c").validate()
    optimizer, topology = experiment.optimizer, experiment.topology
    assert (optimizer.rule, optimizer.learning_rate) == ("adam-tf", 0.001)
    assert (optimizer.beta1, optimizer.beta2, optimizer.epsilon) == (0.8, 0.75, 1e-8)
    assert (optimizer.clip, optimizer.clip_norm) == ("average", 0.1)
    assert (topology.workers, topology.cores, topology.batch, topology.shards) == (64, 12, 32, 4)
    assert (topology.agents, topology.queue, topology.quorum_of_workers) == (10, 1, 60)
    assert (topology.evaluate_every, experiment.run.eval_games, experiment.run.target_score) == (1_000, 50, 300.0)


def test_the_evaluator_plays_frozen_parameters_and_says_when_they_are_good_enough():
    experiment = experiment_of(workers=1, evaluate_every=5)
    experiment = dataclasses.replace(experiment, run=dataclasses.replace(experiment.run, target_score=-1.0))
    spec = spec_of(experiment)
    servers = servers_of(experiment, spec)
    evaluator = Evaluator(MemberOrder(experiment, Share(), lambda: ShardsHere(servers), 7, extra=spec))
    assert evaluator.work(Progress(), 0.0).report is None
    for server in servers:
        for version in range(12):
            server.push(0, version, version, torch.zeros_like(server.values), 0.0)
    done = evaluator.work(Progress(), 0.0)
    assert done.report.numbers["eval/version"] == 12
    assert done.report.numbers["eval/games"] == experiment.run.eval_games
    assert done.over
    assert evaluator.work(Progress(), 0.0).report is None  # until 15


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"workers": 3}, "8 environments do not divide among 3 workers with 1 simulators each; use .* 9"),
        ({"agents": 3}, "8 environments do not divide among 2 workers with 3 simulators each; use .* 12"),
    ],
)
def test_environments_that_do_not_divide_are_refused(flags, words):
    with pytest.raises(UserError, match=words):
        experiment_of(**flags)
