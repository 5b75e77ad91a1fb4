"""`phalanx bench`: what this machine gives, beside its own limit, measured in one run.

emulator_sps    as many processes as workers, each cycling over as many emulators as a worker holds: random
                actions, no pixels read, resets by restoring a state. The limit of everything else.
sampling_sps    env workers that write frames, without a network
inference_sps   the same with the network choosing actions
training_sps    the same with learning
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from phalanx.bench.emulators import BareEmulators
from phalanx.config import AtariConfig, Experiment
from phalanx.config.flags import parse_flags
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


def command(arguments: list[str]) -> int:
    """Parse the arguments of `phalanx bench` and print a table, or one JSON object."""
    parser = argparse.ArgumentParser(
        prog="phalanx bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=["sampling", "training"], help="what to measure; also: phalanx bench gpu")
    parser.add_argument("preset", nargs="?", default="a2c", help="preset, for its network and batch sizes")
    parser.add_argument("--game", help="Atari game (breakout); --env.game is the same")
    parser.add_argument("--seconds", type=float, default=8.0, help="length of each measurement")
    parser.add_argument("--repeats", type=int, default=3, help="measurements; the median counts")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options, flags = parser.parse_known_args(arguments)
    check_lengths(options)
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


def check_lengths(options: argparse.Namespace) -> None:
    right = 0 < options.seconds < math.inf
    require(right, f"--seconds is {options.seconds:g}, but must be greater than 0, and finite")
    require(options.repeats > 0, f"--repeats is {options.repeats}, but must be greater than 0")


def show(results: dict[str, Any], as_json: bool) -> None:
    """One JSON object, or a line each."""
    if as_json:
        print(json.dumps(results))
        return
    for name, value in results.items():
        print(f"{name:<22} {value:,.0f}" if isinstance(value, float) and value > 10 else f"{name:<22} {value}")


def sampling(experiment: Experiment, seconds: float, repeats: int) -> dict[str, Any]:
    """Emulator alone, workers alone, workers with inference; measured in turn so that noise hits all alike."""
    from phalanx.runtime.device import choose_compute
    from phalanx.sampling.placement import place

    if not isinstance(experiment.env, AtariConfig):
        raise UserError("phalanx bench sampling compares with the Atari emulator; choose an Atari preset")
    compute = choose_compute(experiment.run)
    placement = place(experiment, compute.device.type)
    workers, per_worker = max(1, placement.workers), placement.envs_per_worker
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
