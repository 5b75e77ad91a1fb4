"""`phalanx bench`: what this machine gives, beside its own limit, measured in one run.

emulator_sps    as many processes as workers, each cycling over as many emulators as a worker holds: random
                actions, no pixels read, resets by restoring a state. The limit of everything else.
sampling_sps    env workers that write frames, without a network
inference_sps   the same with the network choosing actions
training_sps    the same with learning
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from phalanx.bench.emulators import BareEmulators
from phalanx.config import AtariConfig, Experiment
from phalanx.config.flags import parse_flags, parse_known
from phalanx.config.presets import default_preset, preset
from phalanx.errors import RunError, UserError, require, tell
from phalanx.runtime.timing import Timing

if TYPE_CHECKING:
    from phalanx.replica.build import MakeStore
    from phalanx.replica.replica import Replica
    from phalanx.sampling.collector import HandOver
    from phalanx.seams import VectorEnvs

LEARNING_LIMIT = 60.0  # seconds within which learning must have begun
GAME = "breakout"  # what is measured unless told otherwise


@dataclass(frozen=True)
class BenchOptions:
    """Measure this machine beside its own limit.
    Flags of the preset follow: --sampler.environments 64."""

    what: Literal["sampling", "training", "gpu"]
    """sampling: the emulator alone, workers alone, workers with a network. training: whole training. gpu: all of it,
    with a GPU; `phalanx bench gpu --help` has its options."""
    preset: str = "a2c"
    """For its network and batch sizes; `bench training ppo` is the same as --preset ppo."""
    game: str | None = None
    """Atari game, breakout unless named; --env.game is the same."""
    seconds: float = 8.0
    """Length of each measurement."""
    repeats: int = 3
    """Measurements; the median counts."""
    json: bool = False
    """One JSON object instead of a table."""


def command(arguments: list[str]) -> int:
    """Parse the arguments of `phalanx bench` and print a table, or one JSON object."""
    if len(arguments) > 1 and not arguments[1].startswith("-"):
        arguments = [arguments[0], "--preset", *arguments[1:]]
    options, flags = parse_known(BenchOptions, "bench", arguments)
    check_lengths(options.seconds, options.repeats)
    from phalanx.probe import check_pieces, resolve_precision

    name = default_preset() if options.preset == "default" else options.preset
    base = preset(name)
    if isinstance(base.env, AtariConfig):
        base = dataclasses.replace(base, env=dataclasses.replace(base.env, game=options.game or GAME))
    require(not options.game or isinstance(base.env, AtariConfig), f"--game needs an Atari preset, not {name}")
    experiment = parse_flags("phalanx bench", base, flags)
    check_pieces(experiment.validate())
    measure = sampling if options.what == "sampling" else training
    results = measure(resolve_precision(experiment.validate()), options.seconds, options.repeats)
    show(results, options.json)
    return 0


def check_lengths(seconds: float, repeats: int) -> None:
    require(0 < seconds < math.inf, f"--seconds is {seconds:g}, but must be greater than 0, and finite")
    require(repeats > 0, f"--repeats is {repeats}, but must be greater than 0")


def show(results: dict[str, Any], as_json: bool) -> None:
    """One JSON object, or a table: a line for each number, and for measurements of several things a line for each."""
    if as_json:
        print(json.dumps(results))
        return
    several = {name: value for name, value in results.items() if isinstance(value, dict) and name != "samples"}
    for name, value in results.items():
        if name not in several and name != "samples":
            print(f"{in_words(name):<28} {readable(name, value)}")
    columns = list(dict.fromkeys(name for row in several.values() for name in row if name != "samples"))
    if several:
        print(f"{'':<18}" + "".join(f"{in_words(name):>22}" for name in columns))
    for name, row in several.items():
        print(f"{name:<18}" + "".join(f"{readable(each, row.get(each, '-')):>22}" for each in columns))


def in_words(name: str) -> str:
    """The name of a number for people, with its unit."""
    return name.replace("_sps", ", steps/s").replace("envs", "environments").replace("_", " ")


def readable(name: str, value: Any) -> str:
    """A number for people."""
    if value is None or isinstance(value, str):
        return value or "-"
    if name.endswith("_share"):
        return f"{value:.0%}"
    return f"{value:.3f}" if isinstance(value, float) and value < 10 else f"{value:,.0f}"


def sampling(experiment: Experiment, seconds: float, repeats: int) -> dict[str, Any]:
    """Emulator alone, workers alone, workers with inference; measured in turn so that noise hits all alike."""
    from phalanx.runtime.device import choose_compute
    from phalanx.sampling.placement import place

    if not isinstance(experiment.env, AtariConfig):
        raise UserError("phalanx bench sampling compares with the Atari emulator; choose an Atari preset")
    compute = choose_compute(experiment.run)
    placement = place(experiment, compute.device.type)
    workers, per_worker = placement.workers, placement.envs_per_worker
    require(
        workers > 0,
        f"phalanx bench sampling measures worker processes, and {experiment.topology.name} has none; add --topology "
        "synchronous",
    )
    samples: dict[str, list[float]] = {"emulator_sps": [], "sampling_sps": [], "inference_sps": []}
    with BareEmulators(experiment.env.name, workers, per_worker) as emulators:
        for _ in range(repeats):
            samples["emulator_sps"].append(emulators.speed(seconds))
            samples["sampling_sps"].append(sampling_speed(experiment, seconds))
            samples["inference_sps"].append(inference_speed(experiment, seconds))
    results: dict[str, Any] = {name: statistics.median(values) for name, values in samples.items()}
    limit = results["emulator_sps"]
    return {
        "game": experiment.env.name,
        "frame": experiment.env.frame,
        "workers": workers,
        "envs_per_worker": per_worker,
        "groups": experiment.sampler.groups,
        "squads": placement.squads,
        "device": str(compute.device),
        **results,
        "sampling_ratio": round(results["sampling_sps"] / limit, 4),
        "inference_ratio": round(results["inference_sps"] / limit, 4),
        "samples": {name: [round(value) for value in values] for name, values in samples.items()},
    }


def training(experiment: Experiment, seconds: float, repeats: int) -> dict[str, Any]:
    """Whole training, after a warm-up, with the share of time of each stage."""
    from phalanx.replica.replica import Replica

    with running_replica(experiment) as replica:
        assert isinstance(replica, Replica)
        learn_first(replica, experiment.preset)
        warm_up_until(replica.iterate, min(3.0, seconds))
        samples, shares = [], []
        for _ in range(repeats):
            timing = Timing()
            samples.append(speed(replica, lambda: timing.add_all(replica.iterate().seconds), seconds))  # noqa: B023
            shares.append(timing.shares())
    return {
        "preset": experiment.preset,
        "env": experiment.env.name,
        "precision": experiment.run.precision,
        "training_sps": statistics.median(samples),
        **{f"{stage}_share": round(statistics.median(s[stage] for s in shares), 4) for stage in shares[0]},
        "samples": [round(sample) for sample in samples],
    }


def learn_first(replica: Replica, preset: str) -> None:
    """Until learning has begun: a replay memory must be filled before."""
    limit = time.monotonic() + LEARNING_LIMIT
    while replica.progress.updates == 0:
        replica.iterate()
        if time.monotonic() > limit:
            raise RunError(
                f"{preset} did not begin to learn within {LEARNING_LIMIT:g} s; lower --algorithm.learning-starts"
            )


def warm_up_until(action: Callable[[], Any], seconds: float) -> None:
    """Repeat an action for so long, at least once."""
    end = time.perf_counter() + seconds
    action()
    while time.perf_counter() < end:
        action()


def speed(replica: Replica, action: Callable[[], Any], seconds: float) -> float:
    """Steps per second while an action is repeated. Those of rollouts under way count too: where environments run
    ahead, a short window has few whole rollouts, and how far ahead they are differs from one end to the next."""

    def taken() -> int:
        return replica.progress.steps + replica.collector.course.steps_under_way

    before, start = taken(), time.perf_counter()
    warm_up_until(action, seconds)
    return (taken() - before) / (time.perf_counter() - start)


class running_replica:  # noqa: N801  (used like a function)
    """The replica of an experiment with its environments, outside of a run directory."""

    def __init__(self, experiment: Experiment, make_store: MakeStore | None = None) -> None:
        self.experiment = experiment
        self.make_store = make_store

    def __enter__(self) -> Any:
        from phalanx.replay.memory import FRAMES_ON_HOST, Replay
        from phalanx.replica.build import local_store, make_replica
        from phalanx.runtime.device import choose_compute
        from phalanx.topologies.serial import make_envs as serial_envs
        from phalanx.topologies.synchronous import make_envs as process_envs

        experiment = self.experiment
        compute = choose_compute(experiment.run).install()
        make = serial_envs if experiment.topology.name == "serial" else process_envs
        self.envs = make(experiment, compute, tell)
        try:
            self.replica = make_replica(experiment, self.envs, compute, tell, self.make_store or local_store)
        except BaseException:
            self.envs.close()
            raise
        if isinstance(self.replica.experience, Replay) and self.replica.experience.storage.frames_on_host:
            tell(f"the replay memory's {FRAMES_ON_HOST}")
        return self.replica

    def __exit__(self, *exception: object) -> None:
        try:
            self.replica.close()
        finally:
            self.envs.close()


def sampling_speed(experiment: Experiment, seconds: float) -> float:
    """Steps per second of the workers alone, under random actions drawn ahead of time."""
    from phalanx.runtime.device import choose_compute
    from phalanx.topologies.synchronous import make_envs

    envs, count = make_envs(experiment, choose_compute(experiment.run), tell), 0
    try:
        step = random_steps(envs)
        begin = start = time.perf_counter()
        while start - begin < 1 + seconds:
            step(count)
            count += 1
            now = time.perf_counter()
            if now - begin < 1:  # a second of warm-up
                counted_from, clock_from = count, now
            start = now
    finally:
        envs.close()
    return (count - counted_from) * experiment.sampler.environments / len(envs.groups) / (start - clock_from)


def random_steps(envs: VectorEnvs) -> Callable[[int], None]:
    """A call that lets whichever group is ready step again, under actions drawn ahead of time."""
    actions = np.random.default_rng(0).integers(envs.spec.actions, size=(4096, envs.groups[-1].stop))
    away = list(range(len(envs.groups)))
    for group in away:
        envs.recv(group)
    for group, rows in enumerate(envs.groups):
        envs.send(group, actions[0, rows])

    def step(count: int) -> None:
        back = envs.ready(away)
        assert back is not None
        envs.send(back, actions[count % 4096, envs.groups[back]])
        away.remove(back)
        away.append(back)

    return step


class AlwaysOn:
    """A companion of the collector where nothing is learnt: environments that are done early go on at once."""

    def work_in_gap(self) -> None: ...

    def hand_over(self) -> HandOver:
        from phalanx.sampling.collector import HandOver

        return HandOver.BEGIN


def sample_only(replica: Replica) -> Callable[[], Any]:
    """A call that collects one more rollout, with the network choosing the actions and nothing learnt."""
    return lambda: replica.collector.collect(AlwaysOn())


def inference_speed(experiment: Experiment, seconds: float) -> float:
    """Steps per second with the network choosing the actions and nothing learnt."""
    with running_replica(experiment) as replica:
        collect = sample_only(replica)
        warm_up_until(collect, 1.0)
        return speed(replica, collect, seconds)
