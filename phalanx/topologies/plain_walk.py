"""The random walk of GA3C's paper over the numbers of agents, predictors and trainers; `Tuner` is compared with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from phalanx.topologies.tuner import Knob, Record, Setting
from phalanx.topologies.window import Reading, Window


class PlainWalk:
    """The paper's random walk, for comparison: every minute one of the numbers, drawn at random, changes by 1, and the
    change is kept if the rate rose.

    What it rose beside is the window of the setting that would be kept otherwise; the paper does not say. (Its public
    code moves each of the numbers by -1, 0 or 1 every 20 s, and compares with the window before, be that of a setting
    it rejected.) Nothing settles, and nothing is measured twice.
    """

    def __init__(
        self,
        knobs: Sequence[Knob],
        start: Setting,
        clock: Callable[[], float],
        generator: np.random.Generator,
        window: float = 60.0,
    ) -> None:
        self.knobs = list(knobs)
        self.clock = clock
        self.generator = generator
        self.window = Window(clock, window, settle=0.0)
        self.began = clock()
        self.incumbent = dict(start)
        self.setting = dict(start)
        self.history: list[Record] = []
        self.rate: float | None = None  # of the incumbent's window

    def observe(self, reading: Reading) -> Setting | None:
        measured = self.window.take(reading)
        if measured is None:
            return None
        rose = self.rate is None or measured.rate > self.rate
        if rose:
            self.incumbent, self.rate = dict(self.setting), measured.rate
        verdict, now = "accepted" if rose else "rejected", self.clock() - self.began
        self.history.append(
            Record(now, self.setting, measured.rate, measured.lag, verdict, self.incumbent, self.rate or 0.0)
        )
        ways = [(k.name, by) for k in self.knobs for by in (1, -1) if k.least <= self.incumbent[k.name] + by <= k.most]
        following = dict(self.incumbent)
        if ways:
            name, by = ways[int(self.generator.integers(len(ways)))]
            following[name] += by
        changed, self.setting = following != self.setting, following
        self.window.begin(changed)
        return dict(following) if changed else None

    def refuse(self, name: str, most: int) -> Setting:
        """The setting could not be applied, as there can be no more than so many of a knob; what to apply instead."""
        self.knobs = [Knob(name, min(k.least, most), most) if k.name == name else k for k in self.knobs]
        if self.incumbent[name] > most:
            self.incumbent[name], self.rate = most, None
        self.setting = dict(self.incumbent)
        self.window.begin(changed=True)
        return dict(self.setting)

    def state(self) -> dict[str, Any]:
        """Plain values that a checkpoint holds."""
        return {
            "incumbent": dict(self.incumbent),
            "rate": self.rate,
            "seconds": self.clock() - self.began,
            "generator": self.generator.bit_generator.state,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with the incumbent of a state; `setting` is what must be applied now."""
        self.incumbent = {k.name: min(max(state["incumbent"][k.name], k.least), k.most) for k in self.knobs}
        self.setting, self.rate = dict(self.incumbent), state["rate"]
        self.began = self.clock() - state["seconds"]
        self.generator.bit_generator.state = state["generator"]
        self.window.begin(changed=True)
