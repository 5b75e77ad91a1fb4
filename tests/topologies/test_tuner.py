"""The tuner on simulated systems whose best setting is known: what it finds, beside the paper's random walk."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from node_runs import experiment_of

from phalanx.errors import RunError
from phalanx.topologies import node_tuner, tuner_history
from phalanx.topologies.plain_walk import PlainWalk
from phalanx.topologies.tuner import Knob, Record, Tuner
from phalanx.topologies.window import Reading, Window

KNOBS = (Knob("agents", 1, 128), Knob("predictors", 1, 8), Knob("trainers", 1, 8))
NAMES = tuple(knob.name for knob in KNOBS)
START = dict.fromkeys(NAMES, 1)
WINDOW, SETTLE = 10.0, 2.0


def saturating(agents: int, predictors: int, trainers: int) -> float:
    """More agents help less and less; threads only cost."""
    return 100 * agents / (agents + 12) * (1 - 0.03 * (predictors + trainers - 2))


def peak_in_the_ratio(agents: int, predictors: int, trainers: int) -> float:
    """Two predictors for each trainer are best, and 40 agents."""
    load = min(agents, 40) / 40 - 0.002 * max(0, agents - 40)
    off = math.log2(predictors / trainers) - 1
    return 100 * load * math.exp(-off * off / 2) * (1 - 0.01 * (predictors + trainers - 3))


def coupled(agents: int, predictors: int, trainers: int) -> float:
    """The slowest part sets the pace, and everyone is in everyone's way a little."""
    return min(agents * 5, predictors * 80, trainers * 60) / (1 + 0.002 * agents + 0.03 * (predictors + trainers - 2))


def plateau(agents: int, predictors: int, trainers: int) -> float:
    """From 24 agents and 2 predictors on all settings are alike."""
    return min(agents, 24) * min(predictors, 2) / 2.0


def bottleneck(agents: int, predictors: int, trainers: int) -> dict[str, int]:
    """What queue depths tell of the `coupled` system."""
    paces = (agents * 5, predictors * 80, trainers * 60)
    return {name: int(pace == min(paces)) for name, pace in zip(NAMES, paces, strict=True)}


def backlog(agents: int, predictors: int, trainers: int) -> float:
    """Lag: agents wait for trainers."""
    return agents / trainers


Rate = Callable[[int, int, int], float]
SHAPES: tuple[Rate, ...] = (saturating, peak_in_the_ratio, coupled, plateau)


@cache
def best(rate: Rate) -> float:
    return max(rate(*setting) for setting in itertools.product(*(range(k.least, k.most + 1) for k in KNOBS)))


@dataclass
class System:
    """A system that runs on a clock of its own; what it did in a moment is off by some noise."""

    rate: Rate
    noise: float  # of a whole window, relative
    seed: int
    hints: Callable[[int, int, int], dict[str, int]] | None = None
    lag: Rate | None = None
    readings: int = 2  # in a window
    now: float = 0.0
    count: float = 0.0

    def __post_init__(self) -> None:
        self.generator = np.random.default_rng((1, self.seed))

    def step(self, tuner: Tuner | PlainWalk) -> dict[str, int] | None:
        """Run for a moment and take a reading."""
        setting = tuple(tuner.setting.values())
        seconds, noise = WINDOW / self.readings, self.noise * math.sqrt(self.readings)
        self.now += seconds
        self.count += seconds * self.rate(*setting) * max(0.1, 1 + noise * self.generator.standard_normal())
        lag = None if self.lag is None else self.lag(*setting) * (1 + 0.05 * self.generator.standard_normal())
        return tuner.observe(Reading(self.count, lag, self.hints(*setting) if self.hints else {}))

    def tuner(self, start: dict[str, int] = START, **options: float) -> Tuner:
        generator = np.random.default_rng((2, self.seed))
        return Tuner(KNOBS, start, lambda: self.now, generator, WINDOW, SETTLE, **options)

    def walk(self) -> PlainWalk:
        return PlainWalk(KNOBS, START, lambda: self.now, np.random.default_rng((2, self.seed)), WINDOW)

    def run(self, tuner: Tuner | PlainWalk, windows: int) -> float:
        """So many windows, and how long it takes to settle; the true rate of what was found."""
        end = self.now + windows * (WINDOW + SETTLE)
        while self.now < end:
            self.step(tuner)
        return self.rate(*tuner.incumbent.values())


def found(rate: Rate, seed: int, noise: float = 0.07, windows: int = 300) -> float:
    system = System(rate, noise, seed, hints=bottleneck if rate is coupled else None)
    return system.run(system.tuner(), windows)


@pytest.mark.parametrize("rate", SHAPES)
def test_most_runs_end_within_five_percent_of_the_best_and_none_below_the_start(rate):
    """Of 30 runs of a shape at least 18, as noise of 5 to 10 % hides the rest: 26, 19, 25 and 30 when this was written,
    and all together five in six."""
    ends = [found(rate, seed, noise=(0.05, 0.1)[seed % 2]) / best(rate) for seed in range(30)]
    assert np.mean(ends) > 0.95
    assert sum(end > 0.95 for end in ends) >= 18
    assert min(ends) > 0.8
    assert min(ends) >= rate(*START.values()) / best(rate)


def test_it_beats_the_plain_walk_over_two_hundred_simulations():
    tuned, walked = [], []
    for seed in range(200):
        rate = SHAPES[seed % len(SHAPES)]
        tuned.append(found(rate, seed, windows=100) / best(rate))
        system = System(rate, 0.07, seed)
        walked.append(system.run(system.walk(), 100) / best(rate))
    assert np.mean(tuned) > np.mean(walked) + 0.3


@pytest.mark.parametrize("rate", SHAPES)
def test_from_anywhere_it_ends_no_worse_than_it_began(rate):
    generator = np.random.default_rng(3)
    for seed in range(20):
        start = {k.name: int(generator.integers(k.least, k.most + 1)) for k in KNOBS}
        system = System(rate, 0.07, seed, hints=bottleneck if rate is coupled else None)
        assert system.run(system.tuner(start), 150) >= rate(*start.values())


def test_from_one_of_each_it_comes_to_many_in_few_windows():
    windows = []
    for seed in range(20):
        system = System(coupled, 0.05, seed, hints=bottleneck)
        tuner = system.tuner()
        while not (tuner.incumbent["agents"] >= 32 and min(tuner.incumbent.values()) >= 2):
            system.step(tuner)
            assert len(tuner.history) <= 15
        windows.append(len(tuner.history))
    assert np.median(windows) <= 10


def test_hints_that_mislead_only_slow_it_down():
    generator = np.random.default_rng(4)

    def lie(*setting: int) -> dict[str, int]:
        return {"agents": -1, "predictors": 1, "trainers": int(generator.integers(-1, 2))}

    ends = []
    for seed in range(20):
        system = System(saturating, 0.05, seed, hints=lie)
        ends.append(system.run(system.tuner(), 300) / best(saturating))
    assert np.mean(ends) > 0.75 and min(ends) > 5 * saturating(1, 1, 1) / best(saturating)


def test_steps_grow_while_a_direction_succeeds_and_shrink_when_it_fails():
    system = System(lambda agents, *_: 60.0 - abs(agents - 40), 0.0, 0, hints=lambda *_: {"agents": 1})
    tuner = system.tuner()
    system.run(tuner, 40)
    tried = [record.setting["agents"] for record in tuner.history if record.verdict == "accepted"]
    assert tried[:5] == [2, 4, 8, 16, 32]
    assert 38 <= tuner.incumbent["agents"] <= 42  # found with finer steps than the last one up


def test_a_setting_whose_lag_is_too_great_is_not_kept():
    for seed in range(20):
        system = System(coupled, 0.05, seed, hints=bottleneck, lag=backlog)
        tuner = system.tuner(max_lag=9.0)
        system.run(tuner, 150)
        assert backlog(*tuner.incumbent.values()) <= 9.0 * 1.05  # its own measurements are off by 5 %
        late = [record for record in tuner.history if record.verdict == "late"]
        assert all(record.setting != record.incumbent for record in late)


def test_a_start_whose_lag_is_too_great_is_left_though_it_is_faster():
    system = System(coupled, 0.05, 0, lag=backlog)
    tuner = system.tuner({"agents": 120, "predictors": 8, "trainers": 4}, max_lag=9.0)
    system.run(tuner, 150)
    assert backlog(*tuner.incumbent.values()) <= 9.0 * 1.05
    assert system.rate(*tuner.incumbent.values()) > coupled(8, 1, 1)


def test_a_rejected_setting_is_left_at_once_and_the_incumbent_is_measured_again():
    system = System(coupled, 0.07, 1)
    tuner = system.tuner()
    system.run(tuner, 200)
    for one, following in itertools.pairwise(tuner.history):
        assert one.verdict != "rejected" or following.setting != one.setting
    again = [record for record in tuner.history if record.verdict == "again"]
    assert len(again) > len(tuner.history) / 4
    assert all(record.setting == record.incumbent for record in again)


def test_once_nothing_better_is_found_candidates_become_rare():
    system = System(plateau, 0.05, 0)
    tuner = system.tuner()
    system.run(tuner, 300)
    tried = [record.setting != record.incumbent for record in tuner.history]
    assert sum(tried[-100:]) < 0.6 * 100


def test_a_machine_that_becomes_slower_does_not_make_it_lose_its_way():
    for seed in range(10):
        system = System(coupled, 0.05, seed, hints=bottleneck)
        tuner = system.tuner()
        system.run(tuner, 100)
        system.rate = lambda *setting: coupled(*setting) / 3
        assert system.run(tuner, 100) > 0.9 * best(coupled) / 3
        system.rate = coupled
        assert system.run(tuner, 100) > 0.9 * best(coupled)


def test_a_system_that_stands_still_changes_nothing():
    system = System(coupled, 0.0, 0, hints=bottleneck)
    tuner = system.tuner()
    system.run(tuner, 100)
    incumbent = tuner.incumbent
    system.rate = lambda *setting: 0.0
    system.run(tuner, 50)
    assert tuner.incumbent == incumbent
    system.rate = coupled
    assert system.run(tuner, 50) > 0.9 * best(coupled)


def test_a_clock_that_jumps_harms_nothing():
    """A job that is stopped for hours at a time, and a clock that is set back."""
    for seed in range(10):
        system = System(coupled, 0.05, seed, hints=bottleneck, readings=20)
        tuner, generator = system.tuner(), np.random.default_rng(seed)
        for _ in range(100 * 20):
            system.step(tuner)
            if generator.random() < 0.02:
                system.now += generator.choice([-1000.0, 60.0, 3600.0, 1e6])
        assert system.rate(*tuner.incumbent.values()) > 0.9 * best(coupled)
        assert all(record.rate < 2 * best(coupled) for record in tuner.history)
        slowest = {tuple(record.setting.values()): record.rate for record in tuner.history}
        assert all(rate > 0.6 * coupled(*setting) for setting, rate in slowest.items())


@settings(max_examples=60, deadline=None)
@given(
    data=st.lists(
        st.tuples(
            st.one_of(st.floats(0.01, 3), st.floats(-1e9, 1e9)),  # seconds
            st.one_of(st.floats(0, 100), st.floats(allow_nan=True, allow_infinity=True)),  # counted meanwhile
            st.one_of(st.none(), st.floats(0, 50), st.floats(allow_nan=True)),  # lag
            st.dictionaries(st.sampled_from((*NAMES, "other")), st.integers(-1, 1)),  # hints
        ),
        max_size=300,
    ),
    bounds=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=3),
    max_lag=st.one_of(st.none(), st.floats(0, 50)),
)
def test_whatever_is_read_it_stays_within_bounds_and_finite(data, bounds, max_lag):
    knobs = [Knob(name, min(ends), max(ends)) for name, ends in zip(NAMES, bounds, strict=False)]
    start = {knob.name: knob.least for knob in knobs}
    now, count = 0.0, 0.0
    tuner = Tuner(knobs, start, lambda: now, np.random.default_rng(0), 1.0, 0.2, max_lag)
    walk = PlainWalk(knobs, start, lambda: now, np.random.default_rng(0), 1.0)
    for seconds, counted, lag, hints in data:
        now, count = now + seconds, count + counted if math.isfinite(count + counted) else 0.0
        for one in (tuner, walk):
            changed = one.observe(Reading(count if math.isfinite(counted) else counted, lag, hints))
            assert changed is None or changed == one.setting
            for knob in knobs:
                assert knob.least <= one.setting[knob.name] <= knob.most
    for record in (*tuner.history, *walk.history):
        assert math.isfinite(record.rate) and math.isfinite(record.expected) and record.rate >= 0
    assert math.isfinite(tuner.noise)
    json.dumps(tuner.state(), allow_nan=False)


def test_a_rate_is_of_the_time_that_really_passed():
    now = 0.0
    window = Window(lambda: now, length=10.0, settle=2.0)
    rates = []
    for seconds in (1.0, 1.5, 3.0, 4.0, 2.9, 1.1, 9.0):  # 7 a second; nothing of the first 2 s
        now += seconds
        if (measured := window.take(Reading(7 * now, lag=seconds))) is not None:
            rates.append(measured)
            window.begin(changed=False)
    assert [measured.rate for measured in rates] == pytest.approx([7.0])
    assert rates[0].lag == pytest.approx((3 * 3 + 4 * 4 + 2.9 * 2.9 + 1.1 * 1.1) / 11)  # means of what was counted


def test_readings_that_have_become_rare_are_measured_in_the_end():
    now, measured = 0.0, 0
    window = Window(lambda: now, length=1.0, settle=0.1)
    for _ in range(100):
        now += 7.0
        if window.take(Reading(now)) is not None:
            window.begin(changed=False)
            measured += 1
    assert measured > 80


def test_a_tuner_goes_on_from_its_state():
    one = System(coupled, 0.05, 0, hints=bottleneck)
    first = one.tuner()
    one.run(first, 60)
    state = json.loads(json.dumps(first.state()))
    second = one.tuner()
    second.restore(state)
    assert second.setting == second.incumbent == first.incumbent
    assert second.noise == first.noise
    assert second.state() == first.state()
    assert one.run(second, 60) > 0.9 * best(coupled)
    small = Tuner([Knob(name, 1, 3) for name in NAMES], START, lambda: one.now, np.random.default_rng(0))
    small.restore(state)  # where fewer are allowed
    assert max(small.setting.values()) <= 3


def test_the_plain_walk_moves_one_number_by_one_and_keeps_what_was_faster():
    system = System(saturating, 0.0, 0)
    walk = system.walk()
    system.run(walk, 100)
    before, rate = START, saturating(1, 1, 1)
    for record in walk.history[1:]:
        assert sum(abs(record.setting[name] - before[name]) for name in NAMES) == 1
        assert (record.verdict == "accepted") == (record.rate > rate)
        if record.verdict == "accepted":
            before, rate = record.setting, record.rate
        assert record.incumbent == before
    second = system.walk()
    second.restore(json.loads(json.dumps(walk.state())))
    assert second.setting == walk.incumbent and second.state() == walk.state()


def test_the_history_is_written_read_and_drawn(tmp_path):
    system = System(coupled, 0.05, 0, hints=bottleneck, lag=backlog)
    tuner, path = system.tuner(), tmp_path / tuner_history.NAME
    system.run(tuner, 30)
    tuner_history.append(path, tuner.history[:10])
    tuner_history.append(path, tuner.history[10:])
    with path.open("a") as file:
        file.write('{"time": "late", "setting": 3}\n{"time": 3')  # killed while it wrote
    records = tuner_history.read(path)
    assert records == tuner.history and all(isinstance(record, Record) for record in records)
    picture = tuner_history.draw(records, "coupled", "segments/s")
    ElementTree.fromstring(picture)
    assert all(words in picture for words in ("agents, incumbent", "segments/s", "policy lag"))
    assert len(tuner_history.draw(records * 400, "coupled", "segments/s")) < 100 * len(picture)
    ElementTree.fromstring(tuner_history.draw([], "nothing", "steps/s"))
    assert tuner_history.read(tmp_path / "nowhere") == []


class NodeOfASystem:
    """What a tuner sees of a node: nothing of it is there but its speed."""

    def __init__(self, system: System, state: dict[str, Any] | None = None) -> None:
        self.system, self.tuner_state = system, state
        self.questions, self.queue = SimpleNamespace(held=0), Places()
        self.agents, self.is_up = SimpleNamespace(started=0), True
        self.most, self.told = 10**6, []  # agents that the system starts, and what was said of it
        self.waited = (0.5, 0.5)

    def resize(self, **setting: int) -> None:
        self.setting = setting
        if setting["agents"] > self.most:
            self.agents.started = self.most
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def tell(self, sentence: str) -> None:
        self.told.append(sentence)

    def segments_learnt(self) -> float:
        return self.system.count

    def idle_shares(self) -> tuple[float, float]:
        return self.waited


class Places(list[int]):
    bound = 10


@pytest.fixture
def simulated(monkeypatch, tmp_path):
    """Makes a tuner of a simulated node, and steps on the clock of that: a quarter of a window a call."""
    system = System(coupled, 0.05, 0)
    monkeypatch.setattr(node_tuner, "time", SimpleNamespace(monotonic=lambda: system.now))

    def make(node, kind, **start):
        experiment = experiment_of(**{"agents": 2, **start}, tuner=kind, tuner_window=WINDOW, max_agents=100)
        return node_tuner.NodeTuner(experiment, node, tmp_path)

    def step(tuner):
        system.now += WINDOW / 4
        system.count += coupled(**tuner.node.setting) * WINDOW / 4
        tuner.look(SimpleNamespace(lags=Counter({1: 2})))

    make.system, make.step = system, step
    return make


@pytest.mark.parametrize("kind", ["measured", "walk"])
def test_where_no_more_agents_can_be_started_it_goes_on_with_fewer(simulated, kind):
    node = NodeOfASystem(simulated.system)
    tuner = simulated(node, kind)
    node.most = 4
    while not node.told:
        simulated.step(tuner)
        assert len(tuner.tuner.history) < 200
    assert node.setting == tuner.tuner.setting == tuner.tuner.incumbent
    windows = len(tuner.tuner.history)
    while len(tuner.tuner.history) < windows + 50:
        simulated.step(tuner)
        assert node.setting["agents"] <= 4
    assert len(node.told) == 1 and "no more than 4 agents" in node.told[0]
    assert all(record.setting["agents"] <= 4 for record in tuner.tuner.history)
    assert len({tuple(record.setting.values()) for record in tuner.tuner.history[windows:]}) > 1


def test_what_was_asked_for_and_cannot_be_started_ends_a_run_without_a_tuner(simulated):
    node = NodeOfASystem(simulated.system)
    node.most = 1
    tuner = simulated(node, "measured")
    assert node.setting["agents"] == tuner.tuner.incumbent["agents"] == len(node.told) == 1
    with pytest.raises(RunError, match="only 1 of 2 agents"):
        simulated(node, "off")


MORE_AGENTS = {"trainers": 0, "predictors": 0, "agents": 1}
MORE_PREDICTORS = {"trainers": 0, "predictors": 1, "agents": 0}
MORE_TRAINERS = {"trainers": 1, "predictors": 0, "agents": -1}


@pytest.mark.parametrize(
    ("held", "queued", "predictors_wait", "trainers_wait", "hints"),
    [
        (1, 0, 0.5, 0.05, MORE_TRAINERS),
        (0, 6, 0.5, 0.05, MORE_TRAINERS),
        (1, 6, 0.05, 0.05, MORE_TRAINERS),
        (0, 5, 0.5, 0.05, MORE_AGENTS),  # trainers are busy, but nothing waits for them
        (0, 5, 0.05, 0.05, MORE_PREDICTORS),
        (1, 6, 0.05, 0.2, MORE_PREDICTORS),
        (0, 0, 0.05, 0.9, MORE_PREDICTORS),
        (1, 6, 0.5, 0.2, MORE_AGENTS),
        (0, 0, 0.5, 0.9, MORE_AGENTS),
    ],
)
def test_the_bottleneck_is_whoever_does_not_wait(simulated, held, queued, predictors_wait, trainers_wait, hints):
    node = NodeOfASystem(simulated.system)
    tuner = simulated(node, "measured")
    node.questions.held, node.queue[:] = held, range(queued)
    node.waited = (predictors_wait, trainers_wait)
    assert tuner._hints() == hints


@pytest.mark.parametrize("kind", ["measured", "walk"])
def test_nothing_is_measured_before_new_agents_are_up(simulated, kind):
    """A start takes many windows here, in which nothing is counted; one that never ends is waited for so long."""
    node = NodeOfASystem(simulated.system)
    tuner, starts = simulated(node, kind), 0
    for _ in range(400):
        before = dict(node.setting)
        simulated.step(tuner)
        if node.setting["agents"] > before["agents"]:
            node.is_up = False
            starts += 1
            for _ in range(12):
                count, windows = simulated.system.count, len(tuner.tuner.history)
                simulated.step(tuner)
                simulated.system.count = count
                assert len(tuner.tuner.history) == windows
            node.is_up = True
    assert starts > 3
    for record in tuner.tuner.history:
        assert record.rate == pytest.approx(coupled(**record.setting))
    node.is_up, tuner.resized = False, simulated.system.now
    windows = len(tuner.tuner.history)
    for _ in range(round((node_tuner.STARTING + 3 * WINDOW) / (WINDOW / 4))):
        simulated.step(tuner)
    assert len(tuner.tuner.history) > windows


@pytest.mark.parametrize("kind", ["measured", "walk"])
def test_a_resumed_run_goes_on_with_its_tuner_and_with_its_history(kind, monkeypatch, tmp_path):
    """From a checkpoint that is older than the last lines of the history."""
    experiment = experiment_of(agents=2, tuner=kind, tuner_window=WINDOW, max_agents=100)
    system, drawn, draw = System(coupled, 0.05, 0), [], tuner_history.draw
    monkeypatch.setattr(node_tuner, "time", SimpleNamespace(monotonic=lambda: system.now))
    monkeypatch.setattr(
        tuner_history, "draw", lambda records, *words: drawn.append(len(records)) or draw(records, *words)
    )

    def tune(state, windows):
        node = NodeOfASystem(system, state)
        tuner = node_tuner.NodeTuner(experiment, node, tmp_path)
        first, states = dict(node.setting), []
        while len(tuner.tuner.history) < windows:
            system.now += WINDOW / 4
            system.count += coupled(**node.setting) * WINDOW / 4
            before = len(tuner.tuner.history)
            tuner.look(SimpleNamespace(lags=Counter({1: 2})))
            if len(tuner.tuner.history) > before:
                assert node.tuner_state == {"kind": kind, **tuner.tuner.state()}
                states.append(json.loads(json.dumps(node.tuner_state)))
        return first, states, tuner.tuner.history

    _, states, _ = tune(None, 30)
    system.now, system.count = 5.0, 0.0  # another process
    first, _, history = tune(states[-5], 20)
    assert first == states[-5]["incumbent"]
    records = tuner_history.read(tmp_path / "tuner.jsonl")
    times = [record.time for record in records]
    assert times == sorted(times) and len(times) == 50 == drawn[-1]
    assert times[30] >= times[29] and records[30:] == history
    other = {"measured": "walk", "walk": "measured"}[kind]
    assert tune({**states[-1], "kind": other}, 0)[0] == {"agents": 2, "predictors": 2, "trainers": 2}
