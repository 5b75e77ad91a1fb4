from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.replay.indexing import UNIT, PrioritizedIndex, UniformIndex, changes, importance_weights

CPU = torch.device("cpu")


def no_cuts(rows: int) -> torch.Tensor:
    return torch.zeros(rows, dtype=torch.bool)


def prioritized(priorities: list[float], exponent: float = 1.0) -> PrioritizedIndex:
    """An index whose row i has priority i; 0 means cut."""
    index = PrioritizedIndex(len(priorities), exponent, "one", CPU)
    values = torch.tensor(priorities, dtype=torch.float64)
    index.move(range(len(priorities)), values == 0)
    index.update(torch.arange(len(priorities)), values)
    return index


def chance(count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(count, generator=generator, dtype=torch.float64)


def chi_square_is_plausible(counts: np.ndarray, probabilities: np.ndarray) -> bool:
    expected = counts.sum() * probabilities
    freedom = len(counts) - 1
    return float(((counts - expected) ** 2 / expected).sum()) < freedom + 5 * math.sqrt(2 * freedom)


@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(3, 400),
    exponent=st.sampled_from([0.0, 0.5, 1.0]),
    new_priority=st.sampled_from(["max", "one"]),
)
@settings(max_examples=40, deadline=None)
def test_the_tree_holds_what_numpy_says(seed: int, rows: int, exponent: float, new_priority: str) -> None:
    """Random moves and updates, with equal, cut and outdated ids, against a dict from id to leaf."""
    random = np.random.default_rng(seed)
    index = PrioritizedIndex(rows, exponent, new_priority, CPU)  # type: ignore[arg-type]
    leaves: dict[int, int] = {}
    greatest, written = UNIT, 0
    for _ in range(12):
        written += int(random.integers(0, rows + 1))
        drawable = range(max(0, written - rows), max(0, written - rows, written - 2))
        cut = torch.from_numpy(random.random(rows) < 0.2)
        known = set(leaves)
        old_stop = index.drawable.stop
        index.move(drawable, cut)
        leaves = {i: leaf for i, leaf in leaves.items() if i in drawable}
        fresh = greatest if new_priority == "max" else UNIT
        leaves |= {i: fresh for i in drawable if i not in known and i >= old_stop and not bool(cut[i % rows])}
        ids = random.integers(max(0, written - 2 * rows), written + 1, size=20)
        priorities = random.random(20) * 5
        index.update(torch.from_numpy(ids), torch.from_numpy(priorities))
        touched: dict[int, int] = {}
        for i, priority in zip(ids.tolist(), priorities, strict=True):
            leaf = max(1, int(priority**exponent * UNIT))
            if i in leaves:
                touched[i] = max(touched.get(i, 0), leaf)
                greatest = max(greatest, leaf)
        leaves |= touched
        expected = np.zeros(len(index.sums) * 128, np.int64)
        for i, leaf in leaves.items():
            expected[i % rows] = leaf
        actual = index.leaves[:-1].flatten().numpy()
        # one unit of slack: torch and Python may round a power differently
        assert np.abs(actual - expected).max() <= 1
        assert np.array_equal(index.sums.numpy(), actual.reshape(-1, 128).sum(1))
        assert len(index) == len(leaves)


def test_draws_follow_the_priorities() -> None:
    priorities = [0.0, 1.0, 2.0, 0.0, *([0.25] * 200), 8.0, 4.0]
    index = prioritized(priorities, exponent=0.5)
    generator = torch.Generator().manual_seed(0)
    counts = np.zeros(len(priorities))
    for _ in range(4000):
        ids, _ = index.draw(chance(5, generator), 0.5)
        np.add.at(counts, ids.numpy(), 1)
    weights = np.sqrt(priorities)
    assert counts[weights == 0].sum() == 0
    assert chi_square_is_plausible(counts[weights > 0], weights[weights > 0] / weights.sum())


def test_draws_are_stratified() -> None:
    """Of n equal rows each is drawn exactly once in a batch of n."""
    ids, _ = prioritized([1.0] * 300).draw(chance(300, torch.Generator().manual_seed(0)), 1.0)
    assert ids.tolist() == list(range(300))


def test_uniform_draws_are_uniform_and_never_cut() -> None:
    rows = 40
    index = UniformIndex(rows, CPU)
    index.move(range(25), no_cuts(rows))
    cut = no_cuts(rows)
    cut[[3, 10, 30]] = True  # ids 43, 10 and 30: 10 is there already
    index.move(range(8, 45), cut)
    expected = [i for i in range(8, 45) if i not in (43, 30)]
    generator = torch.Generator().manual_seed(0)
    ids, weight = index.draw(chance(20_000, generator), 0.5)
    numbers, counts = np.unique(ids.numpy(), return_counts=True)
    assert numbers.tolist() == expected
    assert chi_square_is_plausible(counts, np.full(len(expected), 1 / len(expected)))
    assert torch.equal(weight, torch.ones(20_000))


@pytest.mark.parametrize("exponent", [0.0, 0.4, 1.0])
def test_importance_weights_in_closed_form(exponent: float) -> None:
    probabilities = torch.tensor([0.5, 0.125, 0.25], dtype=torch.float64)
    rows = 7
    raw = (rows * probabilities) ** -exponent
    assert torch.allclose(importance_weights(probabilities, exponent).double(), raw / raw.max(), rtol=1e-6)
    index = prioritized([1.0, 2.0, 4.0])
    ids, weight = index.draw(chance(64, torch.Generator().manual_seed(0)), exponent)
    assert torch.allclose(weight, (2.0**ids) ** -exponent, rtol=1e-6)


def test_of_equal_ids_the_greatest_priority_counts() -> None:
    index = prioritized([1.0, 1.0])
    index.update(torch.tensor([1, 1, 1]), torch.tensor([0.5, 3.0, 2.0]))
    assert index.leaves[0, :2].tolist() == [UNIT, 3 * UNIT]
    index.update(torch.tensor([1, 1]), torch.tensor([0.25, 0.5]))  # greatest of the update, not of all time
    assert index.leaves[0, 1] == UNIT // 2


def test_an_outdated_priority_touches_nothing() -> None:
    rows = 10
    index = PrioritizedIndex(rows, 1.0, "one", CPU)
    index.move(range(8), no_cuts(rows))
    cut = no_cuts(rows)
    cut[2] = True
    index.move(range(5, 15), cut)  # ids 0..4 gone, 12 is cut
    before = index.leaves[:-1].clone()
    index.update(torch.tensor([0, 4, 12, 15, 25]), torch.full((5,), 9.0))
    assert torch.equal(index.leaves[:-1], before)
    assert int(index.greatest) == UNIT
    index.update(torch.tensor([14]), torch.tensor([9.0]))  # the same place as id 4, which is gone
    assert int(index.leaves[0, 4]) == 9 * UNIT


def test_a_priority_that_is_no_number_touches_nothing() -> None:
    index = prioritized([1.0, 2.0, 4.0])
    before = index.leaves[:-1].clone()
    index.update(torch.tensor([0, 1]), torch.tensor([math.nan, math.nan]))
    assert torch.equal(index.leaves[:-1], before) and int(index.sums.sum()) == 7 * UNIT
    assert int(index.greatest) == 4 * UNIT
    index.update(torch.tensor([0, 2]), torch.tensor([math.nan, 8.0]))
    assert index.leaves[0, :3].tolist() == [UNIT, 2 * UNIT, 8 * UNIT]
    index.update(torch.tensor([1]), torch.tensor([math.inf]))  # as great as can be
    assert index.draw(chance(100, torch.Generator().manual_seed(0)), 1.0)[0].unique().tolist() == [1]


@pytest.mark.parametrize(("then", "now"), [(range(4, 10), range(4, 12)), (range(4, 12), range(6, 10))])
def test_priorities_are_restored_to_the_rows_they_belong_to(then: range, now: range) -> None:
    rows, cut = 8, no_cuts(8)
    cut[7 % rows] = True
    saved, restored = (PrioritizedIndex(rows, 1.0, "one", CPU) for _ in range(2))
    saved.move(then, no_cuts(rows))
    saved.update(torch.tensor(then), torch.tensor(then, dtype=torch.float32))
    restored.move(now, cut)
    restored.restore(saved.state())
    expected = [0 if i == 7 else i if i in then else 1 for i in now]
    assert [int(restored.leaves[0, i % rows]) for i in now] == [priority * UNIT for priority in expected]
    assert int(restored.sums[0]) == sum(expected) * UNIT
    assert len(restored) == len(now) - (7 in now)


def test_new_rows_get_the_greatest_priority_seen_or_one() -> None:
    for new_priority, expected in (("max", 6), ("one", 1)):
        index = PrioritizedIndex(8, 1.0, new_priority, CPU)  # type: ignore[arg-type]
        index.move(range(4), no_cuts(8))
        index.update(torch.tensor([1, 2]), torch.tensor([6.0, 0.5]))
        index.move(range(6), no_cuts(8))
        assert index.leaves[0, :7].tolist() == [UNIT, 6 * UNIT, UNIT // 2, UNIT, expected * UNIT, expected * UNIT, 0]


def test_a_million_leaves_are_summed_exactly() -> None:
    rows = 1_000_000
    index = PrioritizedIndex(rows, 1.0, "one", CPU)
    index.move(range(rows), no_cuts(rows))
    index.update(torch.arange(8), torch.full((8,), 1e30))  # far above what is representable
    greatest = int(index.leaves[0, 0])
    assert greatest > 2**20 * UNIT // 8 and greatest * rows < 2**63
    index.update(torch.tensor([8]), torch.tensor([1e-30]))
    assert int(index.leaves[0, 8]) == 1
    index.restore({"leaves": torch.ones(rows, dtype=torch.int64), "greatest": torch.tensor(UNIT)})
    index.update(torch.tensor([123_456]), torch.tensor([1e6]))
    assert int(index.sums.sum()) == rows - 1 + int(index.leaves.view(-1)[123_456])
    ids, _ = index.draw(chance(512, torch.Generator().manual_seed(0)), 0.4)
    assert ids.tolist().count(123_456) >= 511


def test_the_only_row_among_a_million_is_found() -> None:
    rows = 1_000_000
    index = PrioritizedIndex(rows, 0.6, "max", CPU)
    cut = torch.ones(rows, dtype=torch.bool)
    cut[777_777] = False
    index.move(range(rows), cut)
    ids, weight = index.draw(chance(512, torch.Generator().manual_seed(0)), 0.4)
    assert set(ids.tolist()) == {777_777}
    assert torch.equal(weight, torch.ones(512))


def test_changes_of_a_moving_range() -> None:
    assert changes(range(0), range(3, 7)) == (range(0), range(3, 7))
    assert changes(range(3, 7), range(5, 12)) == (range(3, 5), range(7, 12))
    assert changes(range(3, 7), range(20, 30)) == (range(3, 7), range(20, 30))
