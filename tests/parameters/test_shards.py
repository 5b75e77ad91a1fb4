"""Parameter servers, without a network: threads stand for workers."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from phalanx.config import OptimizerConfig
from phalanx.parameters import client as client_module
from phalanx.parameters import shards as shard_module
from phalanx.parameters.client import ShardedStore, ShardsHere
from phalanx.parameters.flat import FlatParameters
from phalanx.parameters.guard import LossGuard
from phalanx.parameters.local import LocalStore
from phalanx.parameters.rules import SGD, AdaGrad, make_clip, make_rule
from phalanx.parameters.shards import ALIGNMENT, ParameterShard, QuorumShard, Verdict, cut
from phalanx.types import Gradient

RULES = ["rmsprop", "rmsprop-inside", "adam", "adam-tf", "adagrad", "sgd"]
PLAIN = SGD(0.0)


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(13, 21), nn.Tanh(), nn.Linear(21, 3))


def gradient_of(flat, version=0, loss=1.0):
    return Gradient(flat.clone(), torch.tensor(loss), version)


def stores_of(shards, count, config, model=network, **options):
    """So many learners with models of their own around the same shards."""
    rule = make_rule(config)
    made = []
    for worker in range(count):
        parameters = FlatParameters(model())
        clip = make_clip(config, parameters.slices.values())
        made.append(ShardedStore(ShardsHere(shards), parameters, rule, clip, worker, **options))
    return made


@settings(max_examples=200, deadline=None)
@given(size=st.integers(1, 5_000), count=st.integers(1, 40))
def test_slices_cover_a_vector_and_are_balanced(size, count):
    parts = cut(size, count)
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == size
    assert all(part.start % ALIGNMENT == 0 or part.start == size for part in parts)
    lengths = [part.stop - part.start for part in parts]
    assert max(lengths) - min(lengths) <= 2 * ALIGNMENT


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("quorum", [False, True])
def test_shards_equal_one_shard_and_a_local_store_bit_for_bit(rule, quorum):
    config = OptimizerConfig(rule=rule, epsilon=1e-3, clip="global", clip_norm=0.5)
    flat = FlatParameters(network()).flat
    stores = [
        LocalStore(local := FlatParameters(network()), make_rule(config), make_clip(config, [slice(0, len(flat))]))
    ]
    for count in (1, 2, 5, 11):
        made = make_rule(config)
        parts = cut(len(flat), count)
        shards = [QuorumShard(flat[p], made, quorum=1) if quorum else ParameterShard(flat[p], made) for p in parts]
        stores += stores_of(shards, 1, config, consistent=quorum)
    generator = torch.Generator().manual_seed(3)
    for step in range(30):
        gradient = torch.randn(len(flat), generator=generator)
        for store in stores:
            store.push(gradient_of(gradient), 0.01 / (step + 1))
    for store in stores[1:]:
        assert torch.equal(store.parameters.flat, local.flat)
        for name, value in stores[0].state()["rule"].items():
            assert torch.equal(store.state()["rule"][name], value)


def losses(model, rows, targets):
    return nn.functional.mse_loss(model(rows), targets)


@pytest.mark.parametrize("rule", RULES)
def test_a_quorum_of_all_equals_one_learner_with_all_their_batches(rule):
    """Within 1e-5 after 30 steps; the learners themselves hold the same bits."""
    workers, batch = 4, 8
    config = OptimizerConfig(rule=rule, epsilon=1e-2, clip="none")
    rows, targets = torch.randn(30, workers * batch, 13), torch.randn(30, workers * batch, 3)

    def gradient(parameters, model, part, step):
        parameters.clear()
        loss = losses(model, rows[step, part], targets[step, part])
        loss.backward()
        return Gradient(parameters.grad, loss.detach(), step)

    model = network()
    alone = FlatParameters(model)
    store = LocalStore(alone, make_rule(config), make_clip(config, []))
    for step in range(30):
        store.push(gradient(alone, model, slice(None), step), 0.01)

    begun = FlatParameters(network()).flat
    shards = [QuorumShard(begun[p], make_rule(config), quorum=workers) for p in cut(len(begun), 3)]

    def learn(worker, results):
        model = network()
        parameters = FlatParameters(model)
        own = ShardedStore(
            ShardsHere(shards), parameters, make_rule(config), make_clip(config, []), worker, consistent=True
        )
        part = slice(worker * batch, (worker + 1) * batch)
        for step in range(30):
            assert own.push(gradient(parameters, model, part, step), 0.01) == step + 1
        results[worker] = parameters.flat

    results = in_threads(learn, workers)
    assert all(torch.equal(results[0], other) for other in results.values())
    torch.testing.assert_close(results[0], alone.flat, atol=1e-5, rtol=1e-5)


def in_threads(target, count):
    results: dict[int, object] = {}
    threads = [threading.Thread(target=target, args=(worker, results)) for worker in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == count, "a worker failed, or hangs"
    return results


def test_a_push_that_comes_twice_counts_once():
    shard = ParameterShard(torch.zeros(16), PLAIN)
    first = shard.push(3, 1, 0, torch.ones(16), 1.0)
    again = shard.push(3, 1, 0, torch.ones(16), 1.0)
    older = shard.push(3, 0, 0, torch.ones(16), 1.0)
    assert (first.verdict, first.repeated) == (Verdict.APPLIED, False)
    assert (again.verdict, again.repeated, again.version) == (Verdict.APPLIED, True, 1)
    assert older.repeated
    assert torch.equal(shard.values, -torch.ones(16))
    assert shard.push(4, 1, 0, torch.ones(16), 1.0).version == 2  # another worker's is another one
    assert shard.counts == {"applied": 2, "repeated": 2}


def test_a_gradient_older_than_the_bound_is_refused_and_counted():
    shard = ParameterShard(torch.zeros(16), PLAIN, bound=2)
    for sequence in range(5):
        shard.push(0, sequence, shard.version, torch.ones(16), 1.0)
    kept = shard.push(1, 0, 3, torch.ones(16), 1.0)
    refused = shard.push(2, 0, 3, torch.ones(16), 1.0)
    assert (kept.verdict, kept.age) == (Verdict.APPLIED, 2)
    assert (refused.verdict, refused.age, refused.version) == (Verdict.STALE, 3, 6)
    assert torch.equal(shard.values, torch.full((16,), -6.0))
    assert shard.push(2, 0, 3, torch.ones(16), 1.0).verdict is Verdict.STALE  # the answer is the same when asked again


def test_a_stale_gradient_costs_its_learner_nothing_but_itself():
    config = OptimizerConfig(rule="sgd", clip="none")
    begun = FlatParameters(network()).flat
    shards = [ParameterShard(begun[part], PLAIN, bound=1) for part in cut(len(begun), 2)]
    slow, fast = stores_of(shards, 2, config)
    one = torch.ones(len(begun))
    for _ in range(3):
        fast.push(gradient_of(one), 0.5)
    assert slow.push(gradient_of(one), 0.5) == 3
    assert slow.counts["stale"] == 1
    assert slow.staleness == {3: 1}
    assert torch.equal(slow.parameters.flat, fast.parameters.flat)  # it has the newest now
    assert slow.push(gradient_of(one), 0.5) == 4
    assert slow.counts == {"pushes": 2, "stale": 1, "late": 0}


def test_a_late_gradient_never_counts_for_a_later_step():
    shard = QuorumShard(torch.zeros(16), PLAIN, quorum=2)
    assert shard.push(0, 1, 0, torch.ones(16), 1.0).verdict is Verdict.WAITING
    assert shard.push(1, 1, 0, torch.full((16,), 3.0), 1.0).verdict is Verdict.APPLIED
    late = shard.push(2, 1, 0, torch.full((16,), 1e6), 1.0)
    assert (late.verdict, late.version) == (Verdict.LATE, 1)
    assert torch.equal(shard.values, torch.full((16,), -2.0))
    shard.push(0, 2, 1, torch.ones(16), 1.0)
    assert shard.push(2, 2, 0, torch.full((16,), 1e6), 1.0).verdict is Verdict.LATE
    assert shard.version == 1
    shard.push(2, 3, 1, torch.ones(16), 1.0)
    assert torch.equal(shard.values, torch.full((16,), -3.0))
    assert shard.counts == {"waiting": 2, "applied": 2, "late": 2}


def test_a_quorum_gradient_that_comes_twice_is_one_of_the_quorum():
    shard = QuorumShard(torch.zeros(16), PLAIN, quorum=2)
    for _ in range(3):
        assert shard.push(0, 1, 0, torch.ones(16), 1.0).verdict is Verdict.WAITING
    assert shard.version == 0
    shard.push(1, 1, 0, torch.full((16,), 3.0), 1.0)
    again = shard.push(0, 1, 0, torch.ones(16), 1.0)
    assert again.verdict is Verdict.APPLIED and again.repeated
    assert torch.equal(shard.values, torch.full((16,), -2.0))


def test_a_lower_quorum_ends_the_step_that_waits():
    shard = QuorumShard(torch.zeros(16), PLAIN, quorum=3)
    answers = []
    waiting = threading.Thread(target=lambda: answers.append(shard.push(0, 1, 0, torch.ones(16), 1.0, 30.0)))
    waiting.start()
    shard.push(1, 1, 0, torch.full((16,), 3.0), 1.0)
    assert shard.version == 0
    shard.set_quorum(2)
    waiting.join(10)
    assert answers and answers[0].version == 1
    assert torch.equal(shard.values, torch.full((16,), -2.0))


def test_pulls_of_quorum_shards_are_one_step_of_all():
    """Each step adds 1 to every number, so that a torn pull would show."""
    config = OptimizerConfig(rule="sgd", clip="none")

    def zeros():
        model = network()
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        return model

    size, workers = FlatParameters(zeros()).flat.numel(), 3
    shards = [QuorumShard(torch.zeros(part.stop - part.start), PLAIN, quorum=2) for part in cut(size, 5)]
    stores = stores_of(shards, workers, config, zeros, consistent=True)
    stop = threading.Event()

    def push(worker, results):
        while not stop.is_set():
            time.sleep(0.002)  # a step takes longer than a pull
            version = stores[worker].push(gradient_of(-torch.ones(size)), 1.0)
            assert stores[worker].parameters.flat.unique().tolist() == [float(version)]
        results[worker] = stores[worker].counts

    def watch():
        watcher = stores_of(shards, 1, config, zeros, consistent=True)[0]
        own = FlatParameters(zeros())
        while shards[0].version < 100:
            watcher.pull(own)
            assert len(own.flat.unique()) == 1
        assert watcher.counts["torn"] == 0

    def look_and_stop(worker, results):
        if worker < workers - 1:  # with a quorum of two these two make every step
            return push(worker, results)
        try:
            watch()
            results[worker] = True
        finally:
            stop.set()
            for shard in shards:
                shard.set_quorum(1)
        return None

    in_threads(look_and_stop, workers)


def test_a_shard_that_comes_back_from_an_older_copy_goes_on():
    """Its updates since the copy are lost, those of the other shards are not; learners need not restart."""
    config = OptimizerConfig(rule="adagrad", clip="none")
    begun = FlatParameters(network()).flat
    shards = [ParameterShard(begun[part], AdaGrad(1e-3, 0.0)) for part in cut(len(begun), 2)]
    store = stores_of(shards, 1, config)[0]
    copy = None
    for number in range(6):
        if number == 4:
            copy = shards[1].state()
        store.push(gradient_of(torch.ones(len(begun))), 0.1)
    successor = ParameterShard(torch.zeros_like(shards[1].values), AdaGrad(1e-3, 0.0))
    successor.restore(copy)
    store.shards.shards[1] = successor
    assert store.push(gradient_of(torch.ones(len(begun))), 0.1) == 6  # never counts back
    assert (shards[0].version, successor.version) == (7, 5)
    assert torch.equal(store.parameters.flat[store.shards.parts[1]], successor.values)


def test_a_shard_that_falls_far_back_does_not_stop_the_count():
    """It came back from a checkpoint, without its standby: schedules go on, and so do those who look for newer ones."""
    config = OptimizerConfig(rule="sgd", clip="none")
    begun = FlatParameters(network()).flat
    shards = [ParameterShard(begun[part], PLAIN) for part in cut(len(begun), 2)]
    beginning = shards[1].state()
    ours, theirs = stores_of(shards, 2, config)
    for _ in range(50):
        ours.push(gradient_of(torch.ones(len(begun))), 0.1)
    theirs.pull(theirs.parameters)
    shards[1].restore(beginning)
    assert ours.pull(ours.parameters) == 50
    assert [ours.push(gradient_of(torch.ones(len(begun))), 0.1) for _ in range(3)] == [51, 52, 53]
    assert [shard.version for shard in shards] == [53, 3]
    assert theirs.pull(theirs.parameters) == 50  # it has not seen when the other fell, and counts from what it knew
    assert theirs.push(gradient_of(torch.ones(len(begun))), 0.1) == 51


def test_a_quorum_shard_that_comes_back_numbers_its_steps_like_the_others():
    shards = [QuorumShard(torch.zeros(16), PLAIN, quorum=1) for _ in range(2)]
    copy = shards[1].state()
    model = nn.Linear(32, 1, bias=False)
    parameters = FlatParameters(model)
    store = ShardedStore(ShardsHere(shards), parameters, PLAIN, lambda flat: flat.norm(), consistent=True)
    for _ in range(3):
        store.push(gradient_of(torch.ones(32)), 1.0)
    shards[1].restore(copy)
    assert store.push(gradient_of(torch.ones(32)), 1.0) == 4
    assert [shard.version for shard in shards] == [4, 4]
    assert parameters.flat.tolist() == [-4.0] * 16 + [-1.0] * 16  # three steps of the second shard are lost


def test_a_shard_that_comes_back_while_nobody_pushes_is_told_where_the_others_are():
    """A worker that pulls before it pushes sees steps that can no longer be brought together; its next push does so."""
    shards = [QuorumShard(torch.zeros(16), PLAIN, quorum=1) for _ in range(2)]
    parameters = FlatParameters(nn.Linear(32, 1, bias=False))
    store = ShardedStore(ShardsHere(shards), parameters, PLAIN, lambda flat: flat.norm(), consistent=True)
    store.push(gradient_of(torch.ones(32)), 1.0)
    copy = shards[1].state()
    for _ in range(3):
        store.push(gradient_of(torch.ones(32)), 1.0)
    shards[1].restore(copy)
    assert store.pull(parameters) == 4
    assert parameters.flat.tolist() == [-4.0] * 16 + [-1.0] * 16
    assert store.whole().apart == 3
    assert store.push(gradient_of(torch.ones(32)), 1.0) == 5
    assert store.whole().apart == 0
    assert [shard.version for shard in shards] == [5, 5]
    store.push(gradient_of(torch.ones(32)), 1.0)
    assert store.counts["torn"] == 1


@pytest.mark.parametrize("ends", [True, False], ids=["it goes on", "nobody comes"])
def test_a_step_that_has_begun_is_not_passed_over_at_once(monkeypatch, ends):
    """A worker that is further may have seen another shard that came back."""
    monkeypatch.setattr(shard_module, "PASSED_OVER", 60.0)
    shard = QuorumShard(torch.zeros(16), PLAIN, quorum=2)
    assert shard.push(0, 1, 0, torch.ones(16), 1.0).verdict is Verdict.WAITING
    assert shard.push(5, 1, 1, torch.ones(16), 1.0, 0.001).verdict is Verdict.WAITING
    assert shard.version == 0
    if ends:
        assert shard.push(1, 1, 0, torch.ones(16), 1.0).verdict is Verdict.APPLIED
    monkeypatch.setattr(shard_module, "PASSED_OVER", 0.0)
    last = shard.push(5, 1, 1, torch.ones(16), 1.0)
    assert last.verdict is Verdict.WAITING and shard.version == 1 and list(shard.pending) == [5]
    assert shard.push(0, 1, 0, torch.ones(16), 1.0).verdict is (Verdict.APPLIED if ends else Verdict.LATE)
    assert shard.counts["skipped"] == (not ends)


class Racing(ShardsHere):
    """Shards that make two steps between any two reads, the first of them a step ahead."""

    def read(self, into, steps):
        for number, shard in enumerate(self.shards):
            shard._begin_at(shard.version + 2 + (number == 0 and shard.version == 0), shard.values.clone())
        return super().read(into, steps)


def test_who_reads_too_slowly_claims_no_step_that_others_are_making(monkeypatch):
    monkeypatch.setattr(client_module, "READ_TIMEOUT", 0.05)
    shards = [QuorumShard(torch.zeros(16), PLAIN, quorum=2) for _ in range(2)]
    parameters = FlatParameters(nn.Linear(32, 1, bias=False))
    store = ShardedStore(Racing(shards), parameters, PLAIN, lambda flat: flat.norm(), consistent=True)
    assert store.counts["torn"] == 1
    assert store.seen == [shard.version for shard in shards]
    assert store.seen[0] == store.seen[1] + 1


def test_bfloat16_rounds_what_travels_and_nothing_else():
    config = OptimizerConfig(rule="sgd", clip="none")
    begun = FlatParameters(network()).flat
    shards = [ParameterShard(begun[part], PLAIN) for part in cut(len(begun), 2)]
    store = stores_of(shards, 1, config, bfloat16=True)[0]
    gradient = torch.randn(len(begun))
    store.push(gradient_of(gradient), 0.125)
    held = torch.cat([shard.values for shard in shards])
    assert torch.equal(held, begun - 0.125 * gradient.bfloat16().float())
    assert torch.equal(store.parameters.flat, held.bfloat16().float())


def test_outliers_are_refused_after_a_warm_up_and_accepted_if_they_last():
    guard = LossGuard(multiple=4.0, warm_up=50)
    generator = torch.Generator().manual_seed(0)
    usual = (1 + 0.1 * torch.randn(200, generator=generator)).tolist()
    assert not any(guard.refuses(value) for value in [100.0, *usual[:10]])  # the first ones may be anything
    guard = LossGuard(multiple=4.0, warm_up=50)
    assert sum(guard.refuses(value) for value in usual) <= 1
    assert guard.refuses(3.0) and guard.refuses(-3.0)
    assert not all(guard.refuses(3.0) for _ in range(100))
    at_once = LossGuard(multiple=4.0, warm_up=0)
    assert not at_once.refuses(1.0) and not at_once.refuses(1.1)  # one loss has no deviation
    assert at_once.refuses(9.0)


def test_the_gradient_of_an_outlier_is_not_sent():
    config = OptimizerConfig(rule="sgd", clip="none")
    begun = FlatParameters(network()).flat
    shards = [ParameterShard(begun, PLAIN)]
    store = stores_of(shards, 1, config, guard=LossGuard(3.0, 5))[0]
    for value in (1.0, 1.1, 0.9, 1.0, 1.1, 50.0):
        store.push(gradient_of(torch.ones(len(begun)), loss=value), 0.1)
    assert shards[0].version == 5
    assert store.counts["outliers"] == 1


def test_a_straggler_does_not_hold_up_a_quorum():
    config = OptimizerConfig(rule="sgd", clip="none")
    begun = FlatParameters(network()).flat
    shards = [QuorumShard(begun[part], PLAIN, quorum=3) for part in cut(len(begun), 2)]
    stores = stores_of(shards, 4, config, consistent=True)
    done = threading.Event()

    def learn(worker, results):
        if worker == 3:
            done.wait(30)  # asleep while the others make their steps
            stores[3].push(gradient_of(torch.ones(len(begun))), 0.1)
        else:
            for _ in range(20):
                stores[worker].push(gradient_of(torch.ones(len(begun))), 0.1)
            done.set()
        results[worker] = time.monotonic()

    in_threads(learn, 4)
    assert shards[0].version == 20
    assert stores[3].counts["late"] == 1
