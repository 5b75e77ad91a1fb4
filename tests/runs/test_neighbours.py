"""Other processes on the run's cores: when they are noticed, what is said, and that it is said once."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.runs.neighbours import Neighbours
from phalanx.runtime.cores import CoreTimes


class Cores:
    """Readings of a machine on which a run wants two cores: others use `others` of them, and it waits for a part."""

    def __init__(self) -> None:
        self.clock = self.busy = self.own = self.ran = self.waited = 0.0

    def pass_by(self, seconds: float, others: float, waiting: float, wanted: float = 2.0) -> None:
        ran, waited = (1 - waiting) * wanted * seconds, waiting * wanted * seconds
        self.clock += seconds
        self.busy += ran + others * seconds
        self.own, self.ran, self.waited = self.own + ran, self.ran + ran, self.waited + waited

    def __call__(self) -> CoreTimes:
        return CoreTimes(self.clock, self.busy, {1: self.own}, {1: (self.ran, self.waited)})


class Told:
    def __init__(self, cores: int = 2, threads: int = 2) -> None:
        self.machine, self.sentences, self.switched = Cores(), [], []
        self.neighbours = Neighbours(self.sentences.append, cores, self.machine, self.switched.append)
        self.neighbours.begin(threads)

    def looks(self, count: int, **shares: float) -> None:
        for _ in range(count):
            self.machine.pass_by(5.0, **shares)
            self.neighbours.look()


CROWDED: dict[str, Any] = {"others": 1.0, "waiting": 0.3}
FREE: dict[str, Any] = {"others": 0.02, "waiting": 0.05}


def test_a_busy_neighbour_is_told_once_and_spinning_ends_while_it_is_there() -> None:
    told = Told()
    told.looks(3, **FREE)
    told.looks(1, **CROWDED)
    assert not told.sentences and not told.switched  # it may be a moment only
    told.looks(1, **CROWDED)
    assert told.sentences == [
        "other processes use 1.0 of the 2 cores, and this run waits for cores 30% of its time; torch's 2 threads sleep "
        "at once now where they wait for each other, and --run.threads 1 may help more (it changes rounding, so it is "
        "not done by itself)"
    ]
    assert told.switched == [True]
    told.looks(3, **CROWDED)
    told.looks(1, **FREE)
    assert told.switched == [True]
    told.looks(1, **FREE)
    assert told.switched == [True, False]
    told.looks(2, **CROWDED)
    assert told.switched == [True, False, True] and len(told.sentences) == 1
    told.neighbours.close()
    assert told.switched[-1] is False


def test_moments_between_free_ones_are_no_neighbour() -> None:
    told = Told()
    for _ in range(4):
        told.looks(1, **CROWDED)
        told.looks(1, **FREE)
    assert not told.sentences and not told.switched


@pytest.mark.parametrize(
    ("cores", "shares"),
    [
        (2, {"others": 0.1, "waiting": 0.5}),  # it waits for its own processes
        (2, {"others": 1.0, "waiting": 0.02}),  # it gets all the cores it wants
        (2, {"others": 1.0, "waiting": 0.5, "wanted": 0.1}),  # it works elsewhere
        (64, {"others": 2.0, "waiting": 0.3}),  # of so many
    ],
)
def test_what_is_no_neighbours_doing_is_not_told(cores: int, shares: dict[str, float]) -> None:
    told = Told(cores)
    told.looks(5, **shares)
    assert not told.sentences and not told.switched


def test_one_thread_has_nobody_to_wait_for() -> None:
    told = Told(threads=1)
    told.looks(2, **CROWDED)
    assert told.switched == [] and told.sentences[0].endswith(
        "30% of its time; end them, or give the run cores of its own, e.g. with taskset"
    )


def test_looks_are_seconds_apart_and_recorded() -> None:
    told = Told()
    assert told.neighbours.numbers == {}
    for _ in range(49):
        told.machine.pass_by(0.1, **CROWDED)
        told.neighbours.look()
    assert told.neighbours.numbers == {}
    told.machine.pass_by(0.2, **CROWDED)
    told.neighbours.look()
    assert told.neighbours.numbers == {
        "others_share": pytest.approx(0.5),
        "core_wait_share": pytest.approx(0.3),
    }


def test_where_nothing_is_known_nothing_happens() -> None:
    neighbours = Neighbours(pytest.fail, 2, lambda: None, pytest.fail)
    neighbours.begin(threads=2)
    neighbours.look()
    neighbours.close()
    assert neighbours.numbers == {}
