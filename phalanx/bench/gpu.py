"""`phalanx bench gpu`: everything this machine reaches with its GPU, beside the emulator's limit, in one command.

For each game sampling with the Nature network; on the first game training with each algorithm, with the share of time
of each stage and of the GPU's busy time. Before and after each measurement comes one of the emulator alone, while the
workers sleep: a machine that others use too is not always equally fast. It is to end within six minutes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

from phalanx.bench.emulators import BareEmulators
from phalanx.bench.machine import check_lengths, learn_first, running_replica, sample_only, show, speed, warm_up_until
from phalanx.config import A2CConfig, AtariConfig, Experiment, SamplerConfig, SynchronousConfig
from phalanx.config.flags import parse_flags, parse_known
from phalanx.config.presets import preset
from phalanx.errors import UserError, unknown
from phalanx.runtime.affinity import on_any_core, usable_cores
from phalanx.runtime.timing import Timing
from phalanx.sampling.placement import place

GAMES = ("breakout", "pong")
SETTLING = 2.0  # seconds in which graphs are captured and caches filled
SILENCE = 0.1  # seconds in which workers finish what they were asked for


class Shape(NamedTuple):
    """How an algorithm runs here, with overlap: two workers for each core, which the system moves about, in small
    squads, so that few wait for each other. A busy learner has a core of its own."""

    preset: str
    horizon: int
    busy: bool = False
    envs_per_worker: int = 24  # each takes a fifth of a second to make; with more the owner is called less often
    squad: int = 2  # workers that wait for each other

    def cores(self, cores: int) -> int:
        """How many of this machine's cores the workers have."""
        return max(1, cores - 1) if self.busy else cores


SAMPLING = Shape("ppo", 16, envs_per_worker=48, squad=1)
ALGORITHMS = {
    "a2c": Shape("a2c", 5, envs_per_worker=48),
    "ppo": Shape("ppo", 32),
    "dqn_512": Shape("dqn-512", 32, busy=True),
    "c51_2048": Shape("c51-2048", 32, busy=True),
    "eps_rainbow_512": Shape("eps-rainbow-512", 32, busy=True),
}


@dataclass(frozen=True)
class GpuOptions:
    """Measure what this machine reaches with its GPU, beside the emulator's limit.
    Flags of an experiment follow and change every measurement alike."""

    seconds: float = 0.6
    """Length of each measurement, at least."""
    repeats: int = 4
    """Measurements of each algorithm, and twice as many of sampling; the median counts."""
    only: tuple[str, ...] = ()
    """Names of games, for sampling, or of algorithms: a part of the measurements."""
    json: bool = False
    """One JSON object instead of a table."""


def command(arguments: list[str]) -> int:
    """Parse the arguments of `phalanx bench gpu` and print the results."""
    options, flags = parse_known(GpuOptions, "bench gpu", arguments[1:])
    check_lengths(options.seconds, options.repeats)
    show(measure(options.seconds, options.repeats, flags, plan(list(options.only))), options.json)
    return 0


class Task(NamedTuple):
    """One measurement."""

    name: str
    shape: Shape
    game: str
    learn: bool


def plan(only: list[str] | None = None) -> list[Task]:
    """Everything there is to measure, or what was asked for."""
    tasks = [Task(game, SAMPLING, game, False) for game in GAMES]
    tasks += [Task(name, shape, GAMES[0], True) for name, shape in ALGORITHMS.items()]
    names = [task.name for task in tasks]
    for name in only or ():
        if name not in names:
            raise unknown("measurement", name, names)
    return [task for task in tasks if not only or task.name in only]


def measure(seconds: float, repeats: int, flags: list[str], tasks: list[Task]) -> dict[str, Any]:
    """One object with everything; flags change every experiment alike."""
    import torch

    if not torch.cuda.is_available():
        raise UserError("phalanx bench gpu needs a GPU, but torch sees none; use phalanx bench sampling or training")
    cores = usable_cores()
    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "cores": cores}
    emulators: dict[tuple[str, int, int], BareEmulators] = {}  # by game, processes and emulators to a process
    with contextlib.ExitStack() as stack:
        for name, shape, game, learn in tasks:
            experiment = sized_for_machine(shape, game, cores, flags)
            placement = place(experiment, "cuda")
            kind = experiment.env.name, max(placement.workers, 2 * cores), placement.envs_per_worker
            if kind not in emulators:
                emulators[kind] = stack.enter_context(BareEmulators(*kind))
            results[name] = beside_emulator(experiment, emulators[kind], seconds, repeats, learn)
            print(f"{name}: {results[name]}", file=sys.stderr, flush=True)
    return results


def sized_for_machine(shape: Shape, game: str, cores: int, flags: list[str]) -> Experiment:
    """A preset on so many cores with the Nature network, every learner's batch as the preset has it."""
    from phalanx.probe import resolve_precision

    base = preset(shape.preset)
    assert isinstance(base.env, AtariConfig)
    workers = 2 * shape.cores(cores)
    sampler = SamplerConfig(
        environments=workers * shape.envs_per_worker,
        horizon=shape.horizon,
        groups=2,
        squads=workers // shape.squad,
        workers=workers,
        pin=shape.busy,
        decorrelation=100,
        overlap=True,
    )
    experiment = dataclasses.replace(
        base,
        env=dataclasses.replace(base.env, game=game),
        model=dataclasses.replace(base.model, torso="nature"),
        sampler=sampler,
        topology=SynchronousConfig(),
    )
    if isinstance(base.algorithm, A2CConfig):
        experiment = dataclasses.replace(experiment, algorithm=dataclasses.replace(base.algorithm, importance=True))
    return resolve_precision(parse_flags("phalanx bench gpu", experiment, flags).validate())


def beside_emulator(
    experiment: Experiment, emulators: BareEmulators, seconds: float, repeats: int, learn: bool
) -> dict[str, Any]:
    """Steps per second, sampling only or once learning has begun, each beside the emulator's; the shares of time, and
    how much of it the GPU was busy."""
    samples, limits, shares = [], [], []

    def look_at_emulators() -> None:
        time.sleep(SILENCE)
        limits.append(emulators.speed(seconds))

    with running_replica(experiment) as replica:
        sample = sample_only(replica)

        def action() -> dict[str, float]:
            """One iteration; the seconds it took by stage."""
            if learn:
                return replica.iterate().seconds
            sample()
            return replica.timing.take()

        if learn:
            learn_first(replica, experiment.preset)
        warm_up_until(action, SETTLING)
        look_at_emulators()
        for _ in range(repeats if learn else 2 * repeats):  # sampling is so near the limit that noise matters most
            action()  # everyone is at work again, and has moved where environments may move after a pause
            timing = Timing()
            samples.append(speed(replica, lambda: timing.add_all(action()), seconds))  # noqa: B023
            shares.append(timing.shares())
            look_at_emulators()
        with BusyShare() as busy:  # in a window of its own: the driver's tool takes time from a core and the GPU
            warm_up_until(action, seconds)
    beside = [statistics.mean(around) for around in itertools.pairwise(limits)]
    return {
        "emulator_sps": round(statistics.median(limits)),
        "training_sps" if learn else "inference_sps": round(statistics.median(samples)),
        "ratio": round(statistics.median(s / limit for s, limit in zip(samples, beside, strict=True)), 3),
        "precision": experiment.run.precision,
        **{f"{stage}_share": round(statistics.median(s[stage] for s in shares), 3) for stage in shares[0]},
        "gpu_busy_share": None if busy.value is None else round(busy.value, 3),
        "samples": [[round(limit), round(sample)] for limit, sample in zip(beside, samples, strict=True)],
    }


class BusyShare:
    """Share of the time in which the GPU ran any kernel, as the driver's own tool samples it; None without it."""

    value: float | None = None

    def __enter__(self) -> BusyShare:
        command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "200"]
        try:
            with on_any_core():
                self.sampler: subprocess.Popen[str] | None = subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
                )
        except OSError:
            self.sampler = None
        return self

    def __exit__(self, *exception: object) -> None:
        if self.sampler is None:
            return
        self.sampler.terminate()
        try:
            printed = self.sampler.communicate(timeout=10)[0]
        except subprocess.TimeoutExpired:
            self.sampler.kill()
            return
        self.value = mean_percent(printed)


def mean_percent(printed: str) -> float | None:
    """The mean of lines with one percentage each, as a share; lines that are no number do not count."""
    numbers = [float(line) for line in printed.split() if line.replace(".", "", 1).isdigit()]
    return statistics.mean(numbers) / 100 if numbers else None
