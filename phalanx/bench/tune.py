"""`phalanx tune PRESET`: which workers, groups and squads sample fastest on this machine?

The tuner that GA3C uses (topologies/tuner.py) turns these knobs of `synchronous`, while environments really run and the
network chooses the actions. In the end what it found and the preset's own setting are measured in turn. A file for
`phalanx train PRESET --from FILE` takes the faster one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.bench.machine import running_replica, sample_only, speed, warm_up_until
from phalanx.config import Experiment, SynchronousConfig
from phalanx.config.flags import parse_flags
from phalanx.config.overlay import REMARKS
from phalanx.config.presets import default_preset, preset
from phalanx.config.stored import difference
from phalanx.errors import UserError, require, tell
from phalanx.files import write_whole
from phalanx.runtime.affinity import usable_cores
from phalanx.sampling.placement import place
from phalanx.topologies.tuner import Knob, Setting, Tuner
from phalanx.topologies.window import Reading

LONGEST_WINDOW = 3.0  # seconds
WINDOWS = 60  # that fit the time at least, if building environments took none
ROUNDS = 3  # of the comparison in the end
WORKERS_PER_CORE = 4
MOST_GROUPS = 16
BUSY = 0.2  # a share of the time that is worth hiding behind the other
MULTIPLES = (0.25, 0.5, 1, 2, 4)  # of the preset's environments, where their number may change


def command(arguments: list[str]) -> int:
    """Parse the arguments of `phalanx tune`, search, print what was found and write it."""
    parser = argparse.ArgumentParser(
        prog="phalanx tune",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
        allow_abbrev=False,  # of --env.id, for one
    )
    parser.add_argument("preset", nargs="?", help="preset; flags of its fields may follow")
    parser.add_argument("--seconds", type=float, default=300.0, help="how long it may take, roughly")
    parser.add_argument("--out", type=Path, help="file to write (tuned-PRESET.json)")
    parser.add_argument(
        "--environments", action="store_true", help="change their number, too, which changes what is learnt"
    )
    options, flags = parser.parse_known_args(arguments)
    require(0 < options.seconds < math.inf, f"--seconds is {options.seconds:g}, but must be greater than 0, and finite")
    if not options.preset:
        raise UserError("name a preset: phalanx tune PRESET; `phalanx presets` lists them")
    name = default_preset() if options.preset == "default" else options.preset
    asked = parse_flags("phalanx tune", preset(name), flags)
    check(asked)
    out = options.out or Path(f"tuned-{name}.json")
    check_place(out)
    found = tune(Search(asked, options.environments), options.seconds)
    print(found.describe())
    write(out, found.values(preset(name)))
    print(f"{out}: phalanx train {name} --from {out}")
    return 0


def check(asked: Experiment) -> None:
    """Refuse what cannot be tuned, and what cannot run, before anything is measured."""
    from phalanx.probe import check_pieces

    asked.validate()
    one = isinstance(asked.topology, SynchronousConfig) and asked.topology.replicas == 1
    require(
        one,
        f"phalanx tune measures the sampler of one replica on synchronous, and this is {asked.topology.name}; add "
        "--topology synchronous",
    )
    check_pieces(asked.validate())


def check_place(out: Path) -> None:
    """Find out that a file cannot be written before minutes are spent on what it is to hold."""
    require(not out.is_dir(), f"{out} is a directory; choose another --out")
    require(out.parent.is_dir(), f"the directory {out.parent} does not exist; choose another --out")


class Search:
    """The settings there are. The tuner turns the numbers of values, so that its steps lead from one that divides the
    environments to the next."""

    def __init__(self, asked: Experiment, environments: bool) -> None:
        from phalanx.probe import resolve_precision
        from phalanx.runtime.device import choose_compute

        self.asked = dataclasses.replace(asked, run=resolve_precision(asked.validate()).run)
        self.device = choose_compute(asked.run).device.type
        own = asked.sampler
        placement = place(asked.validate(), self.device)
        first = (own.environments, placement.workers, own.groups, placement.squads)
        counts = [round(own.environments * times) for times in MULTIPLES] if environments else []
        counts = [count for count in counts if count > 0 and self._valid(count)]
        most = max(WORKERS_PER_CORE * usable_cores(), placement.workers)
        parts = {part for count in (*counts, own.environments) for part in divisors(count)}
        workers = {part for part in parts if part <= most}
        squads = {part for count in workers for part in divisors(count)}
        names = ("environments", "workers", "groups", "squads")
        values = (set(counts), workers, {part for part in parts if part <= MOST_GROUPS}, squads)
        self.values = {name: sorted(v | {f}) for name, v, f in zip(names, values, first, strict=True)}
        self.start = self.numbers(dict(zip(names, first, strict=True)))
        self.knobs = [Knob(name, 0, len(values) - 1) for name, values in self.values.items() if len(values) > 1]

    def numbers(self, values: Setting) -> Setting:
        return {name: self.values[name].index(value) for name, value in values.items()}

    def fields(self, numbers: Setting) -> Setting:
        """The sampler's fields that a setting of the tuner stands for."""
        return {name: values[numbers.get(name, 0)] for name, values in self.values.items()}

    def fit(self, numbers: Setting) -> Setting:
        """The nearest setting in which everything divides."""
        fields = self.fields(numbers)
        count = fields["environments"]
        for name in ("workers", "groups"):
            fields[name] = max(v for v in self.values[name] if count % v == 0 and v <= max(fields[name], 1))
        fields["squads"] = place(self.experiment(fields), self.device).squads
        return {name: number for name, number in self.numbers(fields).items() if len(self.values[name]) > 1}

    def experiment(self, fields: Setting) -> Experiment:
        changed: Any = fields
        sampler = dataclasses.replace(self.asked.sampler, **changed)
        return dataclasses.replace(self.asked, sampler=sampler).validate()

    def _valid(self, environments: int) -> bool:
        sampler = dataclasses.replace(self.asked.sampler, environments=environments, groups=1)
        try:
            dataclasses.replace(self.asked, sampler=sampler).validate()
        except UserError:
            return False
        return True


def divisors(count: int) -> list[int]:
    return [part for part in range(1, count + 1) if count % part == 0]


@dataclass(frozen=True)
class Found:
    """What a search found, beside the preset's own setting."""

    asked: Experiment
    own: Setting
    tuned: Setting  # the same, where nothing faster was found
    own_speed: float  # steps per second
    tuned_speed: float
    ratio: float  # tuned / own, measured in turn
    settings: int  # that were tried
    seconds: float

    def describe(self) -> str:
        changed = [name for name in self.own if name != "environments" or self.own[name] != self.tuned[name]]

        def flags(fields: Setting) -> str:
            return " ".join(f"--sampler.{name} {fields[name]}" for name in changed)

        lines = [
            f"{self.settings} settings tried in {self.seconds:.0f} s",
            f"own    {flags(self.own)}  {self.own_speed:,.0f} steps/s",
            f"tuned  {flags(self.tuned)}  {self.tuned_speed:,.0f} steps/s, {self.ratio:.2f} times as many",
        ]
        if self.settings < 2:
            lines[2] = "there was no time for another setting; give it more --seconds"
        elif self.tuned == self.own:
            lines[2] = "nothing faster was found"
        return "\n".join(lines)

    def values(self, base: Experiment) -> dict[str, Any]:
        """A file's content: what was tuned, and the flags of sampler and topology it was tuned with."""
        values: dict[str, Any] = {"preset": base.preset, "sampler": {}}
        for name, (_, value) in difference(self.asked, base).items():
            part, _, field = name.partition(".")
            if part in ("sampler", "topology"):
                values.setdefault(part, {})[field] = value
        same = self.tuned["environments"] == base.sampler.environments
        values["sampler"] |= {name: value for name, value in self.tuned.items() if name != "environments" or not same}
        values[REMARKS] = {
            "env": self.asked.env.name,
            "cores": usable_cores(),
            "own": self.own,
            "own_sps": round(self.own_speed),
            "tuned_sps": round(self.tuned_speed),
            "ratio": round(self.ratio, 3),
            "settings_tried": self.settings,
            "seconds": round(self.seconds),
        }
        return values


def tune(search: Search, seconds: float) -> Found:
    """Search, then measure what was found and the preset's own setting in turn."""
    begin = time.monotonic()
    window = min(LONGEST_WINDOW, seconds / WINDOWS)
    generator = np.random.default_rng(search.asked.run.seed)
    start = {knob.name: search.start[knob.name] for knob in search.knobs}
    tuner = Tuner(search.knobs, start, time.monotonic, generator, window, settle=0.0, fit=search.fit)
    builds = [0.0]  # how long it took to make environments

    def goes_on() -> bool:
        comparison = 2 * ROUNDS * (max(builds) + 2 * window)
        return time.monotonic() < begin + seconds - comparison

    try_settings(search, tuner, builds, goes_on, window)
    own, best = search.fields(search.start), search.fields(tuner.incumbent)
    speeds: dict[str, list[float]] = {"own": [], "tuned": []}
    for _ in range(ROUNDS if best != own else 1):
        speeds["own"].append(measure(search.experiment(own), window))
        speeds["tuned"].append(measure(search.experiment(best), window) if best != own else speeds["own"][-1])
    ratio = statistics.median(tuned / own for own, tuned in zip(speeds["own"], speeds["tuned"], strict=True))
    if ratio <= 1:
        best, ratio, speeds["tuned"] = own, 1.0, speeds["own"]
    own_speed, tuned_speed = (statistics.median(values) for values in speeds.values())
    tried = len({tuple(record.setting.values()) for record in tuner.history})
    return Found(search.asked, own, best, own_speed, tuned_speed, ratio, tried, time.monotonic() - begin)


def try_settings(search: Search, tuner: Tuner, builds: list[float], goes_on: Callable[[], bool], window: float) -> None:
    """Let the tuner have one setting after the other, each with environments of its own."""
    counted = 0
    while goes_on():
        began = time.monotonic()
        with running_replica(search.experiment(search.fields(tuner.setting))) as replica:
            collect, cores = sample_only(replica), usable_cores()
            builds.append(time.monotonic() - began)
            warm_up_until(collect, window)
            replica.timing.take()

            def taken() -> int:
                return replica.progress.steps + replica.collector.course.steps_under_way

            before, fields = taken(), search.fields(tuner.setting)
            while goes_on():
                hints = hints_of(replica.timing.take(), fields, cores)
                if tuner.observe(Reading(counted + taken() - before, hints=hints)) is not None:
                    break
                collect()
            counted += taken() - before


def hints_of(seconds: dict[str, float], fields: Setting, cores: int) -> dict[str, int]:
    """Where simulation and network take turns, groups hide one behind the other; where all wait for simulators, idle
    cores can have some."""
    total = sum(seconds.values())
    if not total:
        return {}
    waiting, choosing = seconds["env"] / total, seconds["infer"] / total
    return {
        "groups": int(min(waiting, choosing) > BUSY),
        "workers": int(waiting > 1 - BUSY and fields["workers"] < cores),
    }


def measure(experiment: Experiment, window: float) -> float:
    """Steps per second of one setting."""
    with running_replica(experiment) as replica:
        collect = sample_only(replica)
        warm_up_until(collect, window)
        return speed(replica, collect, window)


def write(out: Path, values: dict[str, Any]) -> None:
    try:
        write_whole(out, json.dumps(values, indent=2) + "\n")
    except OSError as error:
        tell(json.dumps(values))
        raise UserError(f"cannot write {out} ({error.strerror}); the line above is what it was to hold") from None
