"""ga3c with its threads: no step is lost or learnt twice, lag is bounded, it learns, dies and ends as it should."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import Counter

import pytest
import torch
from node_runs import PATIENCE, experiment_of, node_of

from phalanx.cli.main import main
from phalanx.config.overrides import with_overrides
from phalanx.config.presets import preset
from phalanx.replica import node as node_module
from phalanx.runs.keeper import holds_games
from phalanx.topologies import ga3c
from whole_runs import descendants, newest, records, same

from faulty import LENGTH, FaultyFactory, LedgerFactory  # isort: skip  (whole_runs knows where it is)


@pytest.fixture
def learnt(monkeypatch):
    """Every rollout that trainers of a node learn from, whose environments keep a ledger."""
    rollouts = []
    merged = node_module.merged

    def noted(segments):
        rollouts.append(merged(segments))
        return rollouts[-1]

    monkeypatch.setattr(node_module, "merged", noted)
    monkeypatch.setattr(ga3c, "MakeEnv", lambda *arguments: LedgerFactory())
    return rollouts


def entries(frames, steps, cut):
    """Of the ledger: [environment, incarnation, episode, step] that each of the steps of a segment was taken from."""
    before = frames[-cut.shape[0] - 1 :][:steps]
    return [tuple(row[:4].int().tolist()) for row, lost in zip(before, cut[:steps], strict=True) if not lost]


def of_rollouts(rollouts):
    found, rewards = [], 0.0
    for rollout in rollouts:
        counts = ~rollout.cut
        for b in range(rollout.environments):
            found += entries(rollout.frames[:, b], rollout.steps, rollout.cut[:, b])
        steps = rollout.frames[-rollout.steps - 1 : -1, :, 3] + 1
        assert torch.equal(rollout.reward[counts], steps[counts])  # each has its own reward, the last one, too
        ends = steps == LENGTH + rollout.frames[-rollout.steps - 1 : -1, :, 0] % 3
        assert torch.equal(rollout.terminated[counts], ends[counts])
        rewards += float(rollout.reward[counts].sum())
    return found, rewards


def in_flight(node):
    """What agents have done and nobody has learnt from, while the node pauses: in the queue, with trainers, open; and
    how many steps predictors have not received."""
    found, segments = [], node.segments
    waiting = [*node.queue.segments, *(segment for hand in node.trainers.hands for segment in hand.batch)]
    for segment in waiting:
        found += entries(segment.frames, segment.steps, torch.from_numpy(segment.columns["cut"]))
    for row in range(node.agents.started * node.agents.envs_per_agent):
        cut = torch.from_numpy(segments.columns["cut"][row].copy())
        cut[segments.position[row] :] = False
        found += entries(segments.frames[row], int(segments.position[row]), cut)
    return found, int(segments.waiting.sum())


def without_gaps(found):
    """Each environment's steps are all there, once each, from its first one on."""
    assert max(Counter(found).values()) == 1, "learnt twice"
    last: dict[tuple[int, int], tuple[int, int]] = {}
    for index, incarnation, episode, step in sorted(found):
        before = last.get((index, incarnation))
        expected = (1, 0) if before is None else before
        assert (episode, step) == expected, "lost"
        over = step + 1 == LENGTH + index % 3
        last[index, incarnation] = (episode + 1, 0) if over else (episode, step + 1)
    return last


def work(node, seconds):
    """Let it run, look after it, and note the lags."""
    return node.iterate(seconds).lags


@pytest.mark.parametrize("each", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_two_hundred_random_changes_under_load_lose_no_reward(learnt, each):
    """What agents saw is what was learnt from and what is in flight."""
    chance, lags = random.Random(each), Counter()
    experiment = experiment_of(agents=6, each=each, horizon=4, queue=4, min_batch=6, max_threads=3, rule="sgd")
    with node_of(experiment) as node:
        for change in range(200):
            node.resize(chance.randint(1, 6), chance.randint(1, 3), chance.randint(1, 3))
            lags += work(node, 0.005)
            if change % 40 == 20:
                lags += work(node, 1.0)
        node.resize(6, 2, 2)
        lags += work(node, 0.5)
        with node.gate.shut(PATIENCE):
            assert node.agents.all_arrived(PATIENCE)
            lags += work(node, 0.0)
            trained, rewards = of_rollouts(learnt)
            flying, not_received = in_flight(node)
            last = without_gaps(trained + flying)
            assert len(last) == 6 * each
            taken = each * int((node.agents.exchange.dones[0] - 1).sum())  # each agent's first request is a reset
            assert taken == len(trained) + len(flying) + not_received
            assert lags.total() == len(trained) > 500
            assert rewards == sum(step + 1 for _, _, _, step in trained)
            assert node.queue.promised == 0


def test_agents_that_are_killed_lose_only_the_step_they_were_at(learnt):
    chance, reports, done = random.Random(5), [], []
    experiment = experiment_of(agents=4, each=2, horizon=4, queue=4, min_batch=6, rule="sgd")
    with node_of(experiment, tell=reports.append) as node:
        exchange, note_death = node.agents.exchange, node.agents._note_death

        def done_by(number):
            """Steps of this incarnation: the first thing each does is a reset."""
            return max(0, int(exchange.dones[0, number] - node.agents.done_at_birth[number, 0]) - 1)

        node.agents._note_death = lambda dead: done.append(done_by(dead.number)) or note_death(dead)
        node.resize(4, 2, 2)
        deadline = time.monotonic() + PATIENCE
        while not all(node.agents.up):
            work(node, 0.05)
            assert time.monotonic() < deadline
        for kills in range(1, 7):
            victim = node.agents.workers[chance.randrange(4)]
            os.kill(victim.process.pid, signal.SIGKILL)
            while len(reports) < kills or not all(node.agents.up):
                work(node, 0.05)
                assert time.monotonic() < deadline
            work(node, 0.2)
        with node.gate.shut(PATIENCE):
            assert node.agents.all_arrived(PATIENCE)
            trained, _ = of_rollouts(learnt)
            flying, _ = in_flight(node)
            last = without_gaps(trained + flying)
            not_received = int((node.segments.waiting & ~node.agents.step.cut).sum())
            taken = 2 * (sum(done) + sum(done_by(number) for number in range(4)))
            assert taken == len(trained) + len(flying) + not_received
        assert len(reports) == 6 and "SIGKILL" in reports[0]
        assert len(last) > 8  # environments of successors, too
        assert {index for index, _ in last} == set(range(8))


@pytest.mark.parametrize("name", ["a2c-catch", "ppo-catch"])
def test_with_one_of_each_and_a_queue_of_one_lag_is_two_at_most(name, monkeypatch):
    """Of an update of A2C, and of PPO's several updates for each segment as many times more. And every reward, which
    ends an episode, is learnt from."""
    merged, rewards, scores = node_module.merged, [], []

    def noted(segments):
        rollout = merged(segments)
        rewards.append(float(rollout.reward[~rollout.cut].sum()))
        return rollout

    monkeypatch.setattr(node_module, "merged", noted)
    algorithm = {"epochs": 1, "minibatches": 1} if name == "ppo-catch" else {}
    topology = {"predictors": 1, "trainers": 1, "queue": 1}
    experiment = experiment_of(name, agents=1, steps=1500, algorithm=algorithm, **topology)
    lags = Counter()
    with node_of(experiment) as node:
        node.resize(1, 1, 1)
        deadline = time.monotonic() + PATIENCE
        while not (node.questions.over and node.quiescent):
            report = node.iterate(0.1)
            lags, scores = lags + report.lags, scores + report.scores
            assert time.monotonic() < deadline
        report = node.iterate(0.0)
        lags, scores = lags + report.lags, scores + report.scores
        assert sum(rewards) == sum(scores) and len(scores) > 100
        assert node.progress.steps == lags.total() == 1500
        assert node.progress.version == node.progress.updates >= 300
    assert max(lags) <= 2


STATES = {
    "nobody was started": lambda node: None,
    "agents are starting": lambda node: node.resize(4, 2, 2),
    "everybody works": lambda node: (node.resize(4, 2, 2), reach(node, lambda: node.progress.updates > 5)),
    "agents are held by a full queue": lambda node: (
        node.resize(4, 2, 2),
        reach(node, lambda: node.progress.updates > 1),
        stop_trainers(node),
        reach(node, lambda: node.questions.held > 0 and node.queue.room <= 0),
    ),
    "nothing comes into the queue": lambda node: (
        node.resize(4, 2, 2),
        reach(node, lambda: node.progress.updates > 1),
        node.agents.play(0),
        reach(node, lambda: len(node.queue) == 0),
    ),
    "an agent hangs": lambda node: (node.resize(4, 2, 2), reach(node, lambda: node.progress.steps > 60)),
    "the gate is shut": lambda node: (
        node.resize(4, 2, 2),
        reach(node, lambda: node.progress.updates > 1),
        setattr(node.gate, "is_shut", True),
    ),
}


def reach(node, condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        work(node, 0.02)
        assert time.monotonic() < deadline


def stop_trainers(node):
    for trainer in node.trainers.hands:
        trainer.turn = lambda seconds: time.sleep(0.01)


@pytest.mark.parametrize("state", STATES)
def test_it_ends_from_every_state_and_leaves_nothing(monkeypatch, state):
    """Threads that did not end in the time they are given would still be there."""
    fault = FaultyFactory("hang", culprit=1, at=6, always=True) if state == "an agent hangs" else LedgerFactory()
    monkeypatch.setattr(ga3c, "MakeEnv", lambda *arguments: fault)
    before, threads = set(descendants(os.getpid())), set(threading.enumerate())
    with node_of(experiment_of(agents=4, queue=3, rule="sgd")) as node:
        STATES[state](node)
    assert set(threading.enumerate()) <= threads
    assert set(descendants(os.getpid())) <= before


FEW = ("--topology", "ga3c", "--topology.predictors", 2, "--topology.trainers", 2)


@pytest.mark.parametrize(
    ("preset", "flags"),
    [
        ("a2c-catch", ("--sampler.horizon", 5, "--topology.min-batch", 40)),
        ("ppo-catch", ("--sampler.horizon", 8, "--topology.min-batch", 128, "--algorithm.minibatches", 4)),
    ],
    ids=["a2c", "ppo"],
)
def test_catch_is_learnt_and_recorded(train, tmp_path, preset, flags):
    """By eight agents; and the records say who works and who waits."""
    agents = ("--sampler.environments", 8, "--topology.agents", 8, "--run.log-every", 0.5)
    target = ("--run.target-score", 0.8)
    assert train(preset, *FEW, *agents, *flags, *target, steps=300_000) == 0
    recorded = records(tmp_path / "run")
    last = recorded[-1]
    assert max(record["score"] or -1.0 for record in recorded) >= 0.8 and last["steps"] < 300_000
    assert (last["agents"], last["predictors"], last["trainers"]) == (8, 2, 2)
    for name in ("pps", "tps", "batch_fill", "lag_mean"):
        assert max(record[name] for record in recorded) > 0, name
    assert {"queue_prediction", "queue_training", "held", "lag_max"} <= set(last)
    assert any("staleness_mean" in record for record in recorded)


def test_a_preset_makes_about_as_many_updates_here_as_elsewhere(train, tmp_path, capsys):
    """Though its trainers are handed short segments: PPO would make an update of each minibatch of each of them."""
    flags = ("--sampler.environments", 4, "--sampler.horizon", 64, "--algorithm.minibatches", 4)
    assert main(["plan", "ppo-catch", *map(str, FEW), *map(str, flags)]) == 0
    epochs = preset("ppo-catch").algorithm.epochs
    said = f"{epochs} epochs x 4 minibatches from segments of at least 256 steps together, a rollout of 4 x 64; "
    assert said in capsys.readouterr().out
    assert train("ppo-catch", *FEW, *flags, steps=1280) == 0
    last = records(tmp_path / "run")[-1]
    assert last["steps"] == 1280  # 5 rollouts, and what the two trainers have left at the end
    assert 0 < last["updates"] <= (5 + 2) * 4 * epochs


def test_what_a_trainer_learns_from_at_once_follows_from_the_rollout_and_the_queue():
    asked = with_overrides(preset("ppo-gym"), {"topology": "ga3c"})
    assert asked.validate().topology.min_batch == 8 * 128
    assert with_overrides(asked, {"topology.queue": 3}).validate().topology.min_batch == 3 * 128
    assert with_overrides(asked, {"topology.min_batch": 7}).validate().topology.min_batch == 7
    assert with_overrides(asked, {"sampler.environments": 4}).validate().topology.min_batch == 4 * 128
    batch = {"topology": "ga3c", "sampler.horizon": 0, "sampler.batch": 512}
    assert with_overrides(preset("ppo-gym"), batch).validate().topology.min_batch == 512
    assert preset("ga3c").validate().topology.min_batch == 20


def test_a_run_is_resumed_and_meets_its_budget(train, resume, tmp_path, monkeypatch):
    """And its games go on: nothing is played at random before they do."""
    make_agents, seen = ga3c.make_agents, []

    def noted(experiment, *arguments):
        seen.append((experiment.sampler.decorrelation, experiment.run.seed))
        return make_agents(experiment, *arguments)

    monkeypatch.setattr(ga3c, "make_agents", noted)
    size = ("--sampler.environments", 4, "--sampler.horizon", 5, "--sampler.decorrelation", 20)
    flags = ("a2c-catch", *FEW, *size, "--topology.queue", 3, "--topology.min-batch", 1)
    often = ("--run.checkpoint-updates", 150, "--run.keep-checkpoints", 99)
    assert train(*flags, *often, steps=2000) == 0
    first = newest(tmp_path / "run")
    assert first.steps == 2000 == records(tmp_path / "run")[-1]["steps"]
    assert resume("--run.steps", 4001, "--topology.predictors", 1, "--topology.trainers", 3) == 0
    again = newest(tmp_path / "run")
    assert again.steps == 4001
    (before, seed), after = seen
    assert before == 20 and after == (0, seed)
    assert not holds_games(experiment_of(agents=4, horizon=6), again.state["replicas"][0])  # of another size
    assert holds_games(experiment_of(agents=4), again.state["replicas"][0])
    assert not same(first.weights, again.weights)
    clocks = again.state["clocks"]
    assert clocks["updates"] == clocks["version"] > first.state["clocks"]["updates"]


@pytest.mark.parametrize("kind", ["measured", pytest.param("walk", marks=pytest.mark.slow)])
def test_the_tuner_changes_numbers_and_tells(train, resume, tmp_path, kind):
    flags = ("--topology.tuner", kind, "--topology.tuner-window", 0.2, "--topology.max-agents", 6)
    run = ("--sampler.environments", 1, "--sampler.horizon", 5, "--run.seconds", 4, "--topology.max-threads", 3)
    assert train("a2c-catch", *FEW, *flags, *run, steps=10**7) == 0
    history = [json.loads(line) for line in (tmp_path / "run/tuner.jsonl").read_text().splitlines()]
    assert len({tuple(window["setting"].values()) for window in history}) > 1
    assert all(1 <= window["setting"]["agents"] <= 6 for window in history)
    assert (tmp_path / "run/tuner.svg").read_text().startswith("<svg")
    assert resume("--run.steps", newest(tmp_path / "run").steps + 100) == 0
