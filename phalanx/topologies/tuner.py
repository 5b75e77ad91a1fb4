"""Which setting is fastest? Found while it runs: the counts of agents, predictors and trainers of GA3C (section 4.3 of
its paper), and, for `phalanx tune`, the sampler of `synchronous`.

Decisions only: no process, queue or model, a clock that is handed in, and a seeded generator. Whoever runs something
calls `observe` every few hundred milliseconds and applies the setting that it returns now and then.

    reading -> Window: a rate over `window` seconds -> Tuner: is it better than the incumbent? -> the next setting

The paper's own random walk is in `plain_walk.py`, for comparison.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from phalanx.topologies.window import Measurement, Reading, Window

Setting = dict[str, int]
"""A value for each knob."""

SURE = 1.5  # a candidate that is better by so many standard errors becomes the incumbent,
LIKELY = 1.0  # or by so many after the longest trial;
DOUBT = 0.5  # and one that is worse by so many is left;
LONGEST = 5  # between the two it is measured for up to so many windows
LEAST_GAIN = 0.01  # less than this is no reason to change anything
MEMORY = 0.97  # what a measurement is worth one window later
FORGOTTEN = 0.02  # a measurement that is worth less is dropped
USUAL_NOISE = 0.05  # of one window, relative, before there are repeated ones to know it from
LEAST_NOISE = 0.005
CLIP = 4.0  # a window this many deviations off is odd; two odd ones of the incumbent mean that the machine has changed
FINEST, COARSEST = 1 / 16, 1 / 2  # limits of the least step of a knob beside its value:
STEP_NOISE = 3.0  # so many times the noise, as what a finer step gains cannot be seen
LEAST_TRUST, MOST_TRUST = 0.1, 0.7  # how often a move follows the hints: the more often, the more they were right
TRUST_RATE = 0.2
RETRY = 0.3  # how often it goes back to a setting that may be better than it seemed
JOINT = 0.45  # how often chance moves more than one knob
FURTHER = 0.15  # a greater loss is no sign that the bottleneck has only moved
KNOWN = 2.0  # windows of the incumbent that are enough for a while
STRIDES = (1, 2)  # of a move by chance, in steps
TRIES = 24  # draws of a move that leads to something new
LONGEST_REST = 8  # windows of the incumbent between two candidates, once nothing better is found any more


@dataclass(frozen=True)
class Knob:
    """A whole number that may be turned while the run goes on."""

    name: str
    least: int
    most: int


class Record(NamedTuple):
    """A window in the history."""

    time: float  # seconds since the tuner began
    setting: Setting
    rate: float
    lag: float | None
    verdict: str  # again, odd: of the incumbent. accepted, rejected, late, longer: of a candidate
    incumbent: Setting  # after the verdict
    expected: float  # the incumbent's rate over all its windows


@dataclass
class Estimate:
    """What is known of a setting: a mean in which a window counts the less, the longer ago it was."""

    weight: float = 0.0  # in windows
    rate: float = 0.0
    lag: float | None = None

    def add(self, measured: Measurement) -> None:
        self.weight += 1
        self.rate += (measured.rate - self.rate) / self.weight
        if measured.lag is not None:
            self.lag = measured.lag if self.lag is None else self.lag + (measured.lag - self.lag) / self.weight


@dataclass
class Trial:
    """A candidate while it is measured: which way each knob went, and for how many windows it was looked at."""

    direction: dict[str, int] = field(default_factory=dict)
    windows: int = 0
    hinted: bool = False  # did the bottleneck ask for it?
    hints: dict[str, float] = field(default_factory=dict)


class Tuner:
    """A search around the incumbent, the best setting known, with a memory of what was measured.

    A candidate is compared with the incumbent beside the noise of both. A move that succeeded is repeated, twice as
    far; one that failed is halved. When nothing better is found, candidates become rare. With `max_lag`, a setting
    whose policy lag is greater loses against every other. `fit` turns a setting into one that is possible.
    """

    def __init__(
        self,
        knobs: Sequence[Knob],
        start: Setting,
        clock: Callable[[], float],
        generator: np.random.Generator,
        window: float = 20.0,
        settle: float = 5.0,
        max_lag: float | None = None,
        fit: Callable[[Setting], Setting] = dict,
    ) -> None:
        self.knobs = {knob.name: knob for knob in knobs}
        self.clock = clock
        self.generator = generator
        self.max_lag = max_lag
        self.fit = fit
        self.incumbent = self._within(start)
        self.setting = dict(self.incumbent)
        self.history: list[Record] = []
        self.noise = USUAL_NOISE
        self.window = Window(clock, window, settle)
        self.began = clock()
        self._memory: dict[tuple[int, ...], Estimate] = {}
        self._steps = dict.fromkeys(self.knobs, 1.0)
        self._hints: dict[str, float] = {}
        self._trial = Trial()
        self._trust = MOST_TRUST
        self._momentum: dict[str, int] = {}
        self._rejections = 0  # in a row
        self._rest = 1  # windows that the incumbent is still to be measured for
        self._odd = 0  # in a row

    def observe(self, reading: Reading) -> Setting | None:
        """The setting to apply from now on, if it is another one."""
        measured = self.window.take(reading)
        if measured is None:
            return None
        verdict = self._judge_incumbent(measured) if self.setting == self.incumbent else self._judge(measured)
        now, expected = self.clock() - self.began, self._estimate(self.incumbent).rate
        self.history.append(Record(now, self.setting, measured.rate, measured.lag, verdict, self.incumbent, expected))
        following = self._next(verdict)
        changed = following != self.setting
        self.setting = following
        self.window.begin(changed)
        return dict(following) if changed else None

    def refuse(self, name: str, most: int) -> Setting:
        """The setting could not be applied, as there can be no more than so many of a knob. It is rejected, and so many
        are the most from now on. Returns the setting to apply instead."""
        self.knobs[name] = Knob(name, min(self.knobs[name].least, most), most)
        self._memory = {key: one for key, one in self._memory.items() if self._possible(key)}
        self._reject()
        self.incumbent = self._within(self.incumbent)
        self.setting = dict(self.incumbent)
        self.window.begin(changed=True)
        return dict(self.setting)

    def state(self) -> dict[str, Any]:
        """Plain values that a checkpoint holds."""
        memory = [[list(key), one.weight, one.rate, one.lag] for key, one in self._memory.items()]
        return {
            "incumbent": dict(self.incumbent),
            "memory": memory,
            "noise": self.noise,
            "steps": dict(self._steps),
            "rejections": self._rejections,
            "trust": self._trust,
            "seconds": self.clock() - self.began,
            "generator": self.generator.bit_generator.state,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with the incumbent of a state; `setting` is what must be applied now."""
        self.incumbent = self._within(state["incumbent"])
        self.setting = dict(self.incumbent)
        self._memory = {tuple(key): Estimate(*values) for key, *values in state["memory"] if self._possible(key)}
        self.noise = state["noise"]
        self._steps = {name: state["steps"].get(name, 1.0) for name in self.knobs}
        self._rejections, self._trust = state["rejections"], state["trust"]
        self.began = self.clock() - state["seconds"]
        self.generator.bit_generator.state = state["generator"]
        self._trial, self._momentum, self._rest, self._odd = Trial(), {}, 1, 0
        self.window.begin(changed=True)

    def _judge_incumbent(self, measured: Measurement) -> str:
        """Measure the incumbent again."""
        self._hints = measured.hints
        known = self._estimate(self.incumbent)
        if known.rate and not measured.rate:  # everything stands still, which says nothing of settings
            return "odd"
        off = abs(measured.rate - known.rate) > CLIP * self._doubt(known) * known.rate
        self._odd = self._odd + 1 if known.weight and off else 0
        if self._odd == 1:  # a hiccup counts little
            self._note_noise(known, measured.rate)
            return "odd"
        if self._odd == 2:  # everything has become faster or slower
            factor = min(max(measured.rate / known.rate, 1e-3), 1e3) if known.rate else 1.0
            for one in self._memory.values():
                one.rate *= factor
                one.weight /= 2
            self._odd = 0
        self._learn(self.incumbent, measured)
        return "again"

    def _judge(self, measured: Measurement) -> str:
        """Compare a candidate with the incumbent."""
        self._trial.windows += 1
        self._trial.hints = measured.hints
        self._learn(self.setting, measured)
        new, old = self._estimate(self.setting), self._estimate(self.incumbent)
        verdict = self._compare(new, old)
        if verdict == "accepted":
            self._accept()
        elif verdict != "longer":
            self._reject()
        if self._trial.hinted and verdict != "longer":
            self._trust += TRUST_RATE * ((MOST_TRUST if verdict == "accepted" else LEAST_TRUST) - self._trust)
        return verdict

    def _compare(self, new: Estimate, old: Estimate) -> str:
        if self._late(new):
            lower = self._late(old) and (new.lag or 0) < (1 - LEAST_GAIN) * (old.lag or 0)
            return "accepted" if lower else "late"
        if self._late(old):
            return "accepted"
        gain, doubt = self._gain(new, old)
        last = self._trial.windows >= LONGEST
        if gain > max((LIKELY if last else SURE) * doubt, LEAST_GAIN):
            return "accepted"
        poor = gain < -DOUBT * doubt or (gain < 0 and self._trial.windows > 1)
        elsewhere = self._asked(self._trial.hints).keys() - self._trial.direction.keys()
        if not last and elsewhere and gain > -FURTHER and self._trusts():
            return "longer"
        return "rejected" if last or poor else "longer"

    def _accept(self) -> None:
        self._momentum = self._trial.direction
        for name in self._momentum:
            self._steps[name] = min(2 * self._steps[name], self.knobs[name].most)
        self.incumbent, self._hints = dict(self.setting), self._trial.hints
        self._rejections, self._rest, self._odd = 0, 0, 0

    def _reject(self) -> None:
        for name in self._trial.direction:
            self._steps[name] = max(1.0, self._steps[name] / 2)
        self._momentum = {}
        self._rejections += 1
        self._rest = min(1 + self._rejections // 4, LONGEST_REST)

    def _next(self, verdict: str) -> Setting:
        """What to measure now."""
        if verdict == "longer":
            return self._further() or self.setting
        known_well = self._estimate(self.incumbent).weight >= KNOWN and self._rest <= 1
        if verdict == "odd" or (verdict in ("rejected", "late") and not known_well):  # a rejected one is left at once
            return dict(self.incumbent)
        self._rest -= verdict == "again"
        if self._rest > 0 and verdict == "again":
            return dict(self.incumbent)
        self._trial = Trial()
        candidate = self._onward() or self._chosen()
        self._rest = max(self._rest, 1)
        return candidate or dict(self.incumbent)

    def _onward(self) -> Setting | None:
        """Once more in the direction that succeeded, unless the bottleneck is elsewhere now."""
        direction, self._momentum = self._momentum, {}
        asked = self._asked(self._hints)
        if direction and asked and self._trusts():
            direction = {name: way for name, way in direction.items() if asked.get(name) == way} or asked
        return self._moved(direction) if direction else None

    def _further(self) -> Setting | None:
        """Where the bottleneck has moved to another knob without a gain yet, that knob is turned as well."""
        asked = {name: way for name, way in self._asked(self._trial.hints).items() if name not in self._trial.direction}
        if not asked:
            return None
        trial = Trial(self._trial.direction | asked, self._trial.windows, hinted=True)
        candidate = self._moved(asked, self.setting)
        if candidate is not None:
            self._trial = trial
        return candidate

    def _chosen(self) -> Setting | None:
        """A candidate by memory, hints or chance; None if none is new."""
        must = self._late(self._estimate(self.incumbent))
        if (must or self.generator.random() < RETRY) and (again := self._worth_a_retry()) is not None:
            return again
        for _ in range(TRIES):
            candidate = self._moved(self._direction(), times=self._any(STRIDES))
            if candidate is not None:
                return candidate
        return self._worth_a_retry()

    def _trusts(self) -> bool:
        """By chance: always, unless hints were wrong lately."""
        return bool(self.generator.random() < self._trust / MOST_TRUST)

    def _asked(self, hints: Mapping[str, float]) -> dict[str, int]:
        """What the bottleneck asks for."""
        return {name: 1 if hint > 0 else -1 for name, hint in hints.items() if abs(hint) > 1 / 3 and name in self.knobs}

    def _direction(self) -> dict[str, int]:
        """Which knobs to turn, and which way: as the bottleneck asks, or any."""
        random, names = self.generator.random, list(self.knobs)
        asked = self._asked(self._hints)
        if asked and random() < self._trust:
            if random() < JOINT:
                return asked
            name = self._any(list(asked))
            return {name: asked[name]}
        if len(names) == 1 or random() >= JOINT:
            return {self._any(names): self._any((1, -1))}
        count = int(self.generator.integers(2, len(names) + 1))
        chosen = [names[i] for i in self.generator.permutation(len(names))[:count]]
        together = self._any((1, -1, 0))  # or each for itself
        return {name: together or self._any((1, -1)) for name in chosen}

    def _any(self, choices: Sequence[Any]) -> Any:
        return choices[int(self.generator.integers(len(choices)))]

    def _moved(self, direction: dict[str, int], base: Setting | None = None, times: int = 1) -> Setting | None:
        """A setting moved by a step of each knob, unless that leads nowhere, or to what is known to be worse."""
        candidate = dict(base or self.incumbent)
        finest = min(max(STEP_NOISE * self.noise, FINEST), COARSEST)
        for name, way in direction.items():
            value, step = candidate[name], max(self._steps[name], finest * candidate[name], 1) * times
            candidate[name] = round(value + step if way > 0 else max(value - step, value / (1 + times)))
        candidate = self._within(candidate)
        if candidate in (self.incumbent, self.setting):  # what was just measured is not measured at once again
            return None
        known, old = self._memory.get(self._key(candidate)), self._estimate(self.incumbent)
        if known is not None:
            gain, doubt = self._gain(known, old)
            if gain + doubt < LEAST_GAIN or (self._late(known) and not self._late(old)):
                return None
        self._trial = Trial(direction, hinted=direction.items() <= self._asked(self._hints).items())
        return candidate

    def _worth_a_retry(self) -> Setting | None:
        """The setting that may well be better than the incumbent, for all that is known."""
        old, here = self._estimate(self.incumbent), (self._key(self.incumbent), self._key(self.setting))
        best, most = None, LEAST_GAIN
        for key, one in self._memory.items():
            gain, doubt = self._gain(one, old)
            hope = gain + doubt + self._late(old)
            if key not in here and hope > most and not self._late(one):
                best, most = key, hope
        return None if best is None else dict(zip(self.knobs, best, strict=True))

    def _learn(self, setting: Setting, measured: Measurement) -> None:
        for key, one in list(self._memory.items()):
            one.weight *= MEMORY
            if one.weight < FORGOTTEN and key != self._key(self.incumbent):
                del self._memory[key]
        estimate = self._memory.setdefault(self._key(setting), Estimate())
        self._note_noise(estimate, measured.rate)
        estimate.add(measured)

    def _note_noise(self, known: Estimate, rate: float) -> None:
        """The noise of one window, from windows of a setting that was measured before."""
        if known.weight < 0.5 or not known.rate:
            return
        off = (rate / known.rate - 1) / math.sqrt(1 + 1 / known.weight)
        off = min(abs(off), CLIP * self.noise)
        self.noise = max(LEAST_NOISE, math.sqrt(0.9 * self.noise**2 + 0.1 * off**2))

    def _gain(self, new: Estimate, old: Estimate) -> tuple[float, float]:
        """By how much one is better than the other, relative, and the standard error of that."""
        doubt = self.noise * math.sqrt(1 / max(new.weight, FORGOTTEN) + 1 / max(old.weight, FORGOTTEN))
        if not old.rate:
            return (1.0 if new.rate else 0.0), doubt
        return new.rate / old.rate - 1, doubt

    def _doubt(self, known: Estimate) -> float:
        """The standard error of one more window beside what is known."""
        return self.noise * math.sqrt(1 + 1 / max(known.weight, FORGOTTEN))

    def _late(self, known: Estimate) -> bool:
        return self.max_lag is not None and known.lag is not None and known.lag > self.max_lag

    def _estimate(self, setting: Setting) -> Estimate:
        return self._memory.get(self._key(setting), Estimate())

    def _key(self, setting: Setting) -> tuple[int, ...]:
        return tuple(setting[name] for name in self.knobs)

    def _possible(self, key: Sequence[int]) -> bool:
        knobs = self.knobs.values()
        return len(key) == len(knobs) and all(k.least <= value <= k.most for k, value in zip(knobs, key, strict=True))

    def _within(self, setting: Mapping[str, int]) -> Setting:
        """The nearest setting within all bounds, and possible."""
        return self.fit({name: min(max(setting[name], k.least), k.most) for name, k in self.knobs.items()})
