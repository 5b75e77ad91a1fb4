"""`phalanx bench gpu`: everything this machine reaches with its GPU, beside the emulator's limit, in one command.

For each game the emulator alone on every core and sampling with the Nature network; on the first game training with
each algorithm, with the share of time of each stage and of the GPU's busy time. It ends within six minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import subprocess
import sys
import time
from typing import Any

from phalanx.bench import emulator_speed, inference_speed, running_replica, show, warm_up_until
from phalanx.config import AtariConfig, Experiment, SamplerConfig, SynchronousConfig
from phalanx.errors import RunError, UserError

GAMES = ("breakout", "pong")
ENVS_PER_WORKER = 32
GROUPS = 4  # workers may run ahead of the slowest by three of them
LEARNING_LIMIT = 60.0  # seconds within which learning must have begun
ALGORITHMS = {  # name in the results -> preset, steps per rollout, overlap
    "a2c": ("a2c", 5, False),
    "ppo": ("ppo", 32, True),
    "dqn_512": ("dqn-512", 32, True),
    "c51_2048": ("c51-2048", 32, True),
    "eps_rainbow_512": ("eps-rainbow-512", 32, True),
}


def command(arguments: list[str]) -> int:
    """Parse the arguments of `phalanx bench gpu` and print the results."""
    parser = argparse.ArgumentParser(
        prog="phalanx bench gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=6.0, help="length of each measurement")
    parser.add_argument("--repeats", type=int, default=3, help="measurements; the median counts")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options, flags = parser.parse_known_args(arguments[1:])
    show(measure(options.seconds, options.repeats, flags), options.json)
    return 0


def measure(seconds: float, repeats: int, flags: list[str]) -> dict[str, Any]:
    """One object with everything; flags change every experiment alike."""
    import torch

    from phalanx.runtime.affinity import usable_cores

    if not torch.cuda.is_available():
        raise UserError("phalanx bench gpu needs a GPU, but torch sees none; use phalanx bench sampling or training")
    cores = usable_cores()
    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "cores": cores}
    for game in GAMES:
        experiment = settled("ppo", game, cores, 32, True, flags)
        samples = [
            (emulator_speed(game, cores, ENVS_PER_WORKER, seconds), inference_speed(experiment, seconds))
            for _ in range(repeats)
        ]
        limit, inference = (statistics.median(column) for column in zip(*samples, strict=True))
        results[game] = {
            "emulator_sps": round(limit),
            "inference_sps": round(inference),
            "inference_ratio": round(inference / limit, 3),
            "samples": [[round(value) for value in pair] for pair in samples],
        }
        print(f"{game}: {results[game]}", file=sys.stderr, flush=True)
    limit = results[GAMES[0]]["emulator_sps"]
    for name, (preset, horizon, overlap) in ALGORITHMS.items():
        trained = training(settled(preset, GAMES[0], cores, horizon, overlap, flags), seconds, repeats)
        results[name] = {**trained, "ratio": round(trained["training_sps"] / limit, 3)}
        print(f"{name}: {results[name]}", file=sys.stderr, flush=True)
    return results


def settled(preset_name: str, game: str, cores: int, horizon: int, overlap: bool, flags: list[str]) -> Experiment:
    """A preset on so many cores with the Nature network, every learner's batch as the preset has it."""
    from phalanx.__main__ import parse_flags
    from phalanx.presets import preset
    from phalanx.probe import resolve_precision

    base = preset(preset_name)
    assert isinstance(base.env, AtariConfig)
    environments = max(1, cores - 1) * ENVS_PER_WORKER
    sampler = SamplerConfig(environments=environments, horizon=horizon, groups=GROUPS, decorrelation=100)
    experiment = dataclasses.replace(
        base,
        env=dataclasses.replace(base.env, game=game),
        model=dataclasses.replace(base.model, torso="nature"),
        sampler=sampler,
        topology=SynchronousConfig(overlap=overlap),
    )
    return resolve_precision(parse_flags("phalanx bench gpu", experiment, flags).validate())


def training(experiment: Experiment, seconds: float, repeats: int) -> dict[str, Any]:
    """Steps per second once learning has begun, the shares of time, and how much of it the GPU was busy."""
    with running_replica(experiment) as replica:
        limit = time.monotonic() + LEARNING_LIMIT
        while replica.progress.updates == 0:
            replica.iterate()
            if time.monotonic() > limit:
                raise RunError(f"{experiment.preset} did not begin to learn within {LEARNING_LIMIT:g} s")
        warm_up_until(replica.iterate, min(2.0, seconds))
        samples, shares, busy = [], [], []
        for _ in range(repeats):
            with BusyShare() as share:
                replica.timing.reset()
                steps, start = replica.progress.steps, time.perf_counter()
                warm_up_until(replica.iterate, seconds)
                samples.append((replica.progress.steps - steps) / (time.perf_counter() - start))
                shares.append(replica.timing.shares())
            busy.append(share.value)
    known = [value for value in busy if value is not None]
    return {
        "training_sps": round(statistics.median(samples)),
        "precision": experiment.run.precision,
        **{f"{stage}_share": round(statistics.median(s[stage] for s in shares), 3) for stage in shares[0]},
        "gpu_busy_share": round(statistics.median(known), 3) if known else None,
        "samples": [round(sample) for sample in samples],
    }


class BusyShare:
    """Share of the time in which the GPU ran any kernel, as the driver's own tool samples it; None without it."""

    value: float | None = None

    def __enter__(self) -> BusyShare:
        command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "200"]
        try:
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
