"""GA3C beside the other topologies on one machine, in turn within one run.

    python benchmarks/ga3c.py pps [--environments 32] [--game pong]   predictions/s beside `synchronous`, no learning
    python benchmarks/ga3c.py networks   steps/s of GA3C in training beside A3C, by network (the paper's table 2)
    python benchmarks/ga3c.py tuner      TPS that the tuner reaches from 1-1-1 beside a grid of fixed settings
    python benchmarks/ga3c.py batches    score and lag by the minimum training batch, on Catch, as a figure

A line for each window goes to standard error, the table to standard output. CPU seconds of this process and its workers
for each 1,000 steps stand beside the speed: they tell what a step costs where the machine has other work, too.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from phalanx.config import Experiment, GA3CConfig, SynchronousConfig
from phalanx.config.presets import preset
from phalanx.figure import Line, Panel, chart
from phalanx.probe import resolve_precision
from phalanx.replica.build import make_replica
from phalanx.replica.crew import Crew
from phalanx.replica.node import Node
from phalanx.runtime.device import choose_compute
from phalanx.topologies import ga3c, synchronous

TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds() -> float:
    """Of this process and its children that are alive."""
    total = 0.0
    me = os.getpid()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                if int(process.name) == me or int(fields[1]) == me:
                    total += (int(fields[11]) + int(fields[12])) / TICKS
    return total


class Discarding:
    """Takes the place of a trainer: segments are thrown away."""

    def __init__(self, node: Node) -> None:
        self.node = node

    def turn(self, seconds: float) -> None:
        self.node.queue.take(seconds)

    def leave(self) -> None: ...


@contextlib.contextmanager
def running_synchronous(experiment: Experiment) -> Iterator[Callable[[float], int]]:
    """Collects for so many seconds; the steps."""
    compute = choose_compute(experiment.run).install()
    with (
        synchronous.make_envs(experiment, compute, print) as envs,
        make_replica(experiment, envs, compute, print) as replica,
    ):

        def collect(seconds: float) -> int:
            compute.install()
            steps, end = 0, time.monotonic() + seconds
            while time.monotonic() < end:
                with compute.casting_weights_once():
                    steps += replica.collector.collect().action.numel()
            return steps

        yield collect


@contextlib.contextmanager
def running_ga3c(experiment: Experiment) -> Iterator[Callable[[float], int]]:
    """Predicts for so many seconds; the predictions."""
    compute = ga3c.compute_of(experiment).install()
    topology = ga3c.settings(experiment)
    with (
        ga3c.make_agents(experiment, compute, print) as agents,
        Node(experiment, agents, compute, print) as node,
    ):
        node.trainers = Crew("discarder", lambda number: Discarding(node), node.gate, node.alarm)
        with node.gate.shut(10.0):
            node.resize(topology.agents, topology.predictors, 1)
            agents.all_arrived(60.0)

        def predict(seconds: float) -> int:
            compute.install()
            before = node.predictions()
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                agents.look_after()
                time.sleep(0.05)
            with node.gate.shut(10.0):
                agents.all_arrived(10.0)
            return node.predictions() - before

        yield predict


def pps(options: argparse.Namespace) -> None:
    base = preset("paac-nips")
    base = dataclasses.replace(
        base,
        env=dataclasses.replace(base.env, game=options.game),
        sampler=dataclasses.replace(base.sampler, environments=options.environments),
    )
    free = GA3CConfig(agents=options.agents, predictors=options.predictors)
    contenders: dict[str, Experiment] = {
        "synchronous": dataclasses.replace(base, topology=SynchronousConfig()),
        "ga3c": dataclasses.replace(base, topology=free),
    }
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    costs: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(options.rounds):
        for name in list(contenders)[:: -1 if turn % 2 else 1]:
            experiment = resolve_precision(contenders[name].validate())
            running = running_ga3c if name == "ga3c" else running_synchronous
            with running(experiment) as work:
                work(2.0)
                began, used = time.monotonic(), cpu_seconds()
                steps = work(options.seconds)
                speeds[name].append(steps / (time.monotonic() - began))
                costs[name].append((cpu_seconds() - used) / steps * 1000)
            print(f"{name} {speeds[name][-1]:.0f}/s {costs[name][-1]:.3f} CPU s/1,000", file=sys.stderr, flush=True)
    for name in contenders:
        print(f"{name:<12} {statistics.median(speeds[name]):8,.0f}/s  {statistics.median(costs[name]):.3f} CPU s/1,000")
    ratios = [free / bound for free, bound in zip(speeds["ga3c"], speeds["synchronous"], strict=True)]
    print(f"ratio of speeds {statistics.median(ratios):.3f}")


def records_of(preset_name: str, seconds: float, *flags: str) -> list[dict[str, Any]]:
    """What `phalanx train` records within so many seconds."""
    with tempfile.TemporaryDirectory() as place:
        command = [
            sys.executable,
            "-m",
            "phalanx",
            "train",
            preset_name,
            "--run.directory",
            place,
            "--run.log-every",
            "1",
        ]
        command += ["--run.seconds", str(seconds), *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=seconds + 120)
        (path,) = Path(place).glob("*/metrics.jsonl")
        return [json.loads(line) for line in path.read_text().splitlines()]


def rate(records: list[dict[str, Any]], name: str, since: float) -> float:
    """The median of a number in the records after so many seconds."""
    return statistics.median(record[name] for record in records if record["time_s"] > since and record.get(name))


def networks(options: argparse.Namespace) -> None:
    """Both learn while they are measured; A3C has a replica for each core, with the same number of environments in
    all."""
    game, environments = ["--env.game", options.game], ["--sampler.environments", str(options.environments)]
    ways = {
        "ga3c": ["--topology.tuner", "off", "--topology.predictors", "1", "--topology.trainers", "1"],
        "a3c": ["--topology", "asynchronous", "--topology.replicas", str(len(os.sched_getaffinity(0)))],
    }
    names = ["ga3c", *(f"ga3c-large-stride{stride}" for stride in (4, 3, 2, 1))]
    print(f"{'network':<20} {'GA3C':>8} {'A3C':>8} {'ratio':>7}")
    for name in names:
        speeds: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(options.rounds):
            for way in list(ways)[:: -1 if turn % 2 else 1]:
                records = records_of(name, options.seconds, *ways[way], *game, *environments)
                speeds[way].append(rate(records, "sps", since=options.seconds / 3))
                print(f"{name} {way} {speeds[way][-1]:.0f}", file=sys.stderr, flush=True)
        free, bound = (statistics.median(speeds[way]) for way in ways)
        print(f"{name:<20} {free:8,.0f} {bound:8,.0f} {free / bound:7.2f}", flush=True)


def tuner(options: argparse.Namespace) -> None:
    """The best of the grid is measured again after the tuner, and that counts: of several noisy numbers the greatest
    is too great."""

    def fixed(setting: tuple[int, int, int], seconds: float) -> float:
        flags = flags_of(setting)
        measured = rate(records_of("ga3c-static", seconds, "--env.game", options.game, *flags), "tps", seconds / 2)
        print(f"{setting} {measured:.1f} segments/s", file=sys.stderr, flush=True)
        return measured

    grid = {setting: fixed(setting, options.seconds) for setting in itertools.product((4, 16, 32), (1, 2), (1, 2))}
    best = max(grid, key=lambda setting: grid[setting])
    found = records_of(
        *("ga3c", options.tuning_seconds, "--env.game", options.game, *flags_of((1, 1, 1))),
        *("--topology.tuner-window", str(options.window)),
    )
    last = found[-1]
    setting = (int(last["agents"]), int(last["predictors"]), int(last["trainers"]))
    reached = rate(found, "tps", 0.75 * options.tuning_seconds)
    again = [fixed(best, options.seconds), fixed(setting, options.seconds)]
    print(f"the grid's best {best}: {grid[best]:.1f}, again {again[0]:.1f} segments/s")
    print(f"the tuner, last quarter: {reached:.1f}; its last setting {setting} by itself {again[1]:.1f}")
    print(f"ratio {reached / again[0]:.3f}; of the settings alone {again[1] / again[0]:.3f}")


def flags_of(setting: tuple[int, int, int]) -> list[str]:
    agents, predictors, trainers = map(str, setting)
    flags = ["--sampler.environments", agents, "--topology.agents", agents]
    return [*flags, "--topology.predictors", predictors, "--topology.trainers", trainers]


def batches(options: argparse.Namespace) -> None:
    """The learning rate is the same for all: the loss is a mean, so that a step does not grow with its batch."""
    sizes = (1, 5, 20, 40, 80)
    scores, lags = [], []
    for size in sizes:
        flags = ["--topology", "ga3c", "--topology.min-batch", str(size), "--topology.queue", "100"]
        flags += ["--sampler.environments", "16", "--sampler.horizon", "5", "--run.steps", str(options.steps)]
        runs = [records_of("a2c-catch", 600.0, *flags, "--run.seed", str(seed)) for seed in range(options.rounds)]
        lines = [[(record["steps"], record["score"]) for record in run if record["score"] is not None] for run in runs]
        scores.append(Line(f"{size} steps", max(lines, key=len)))
        late = [record["lag_mean"] for run in runs for record in run]
        lags.append((float(size), statistics.mean(late)))
        ends = [line[-1][1] for line in lines]
        print(f"{size:3} scores at the end {ends}, mean lag {lags[-1][1]:.2f}", flush=True)
    panels = [
        Panel("Catch, one run each", "steps", "score", scores),
        Panel("policy lag", "least steps of a batch", "versions", [Line("mean", lags)], x_log=True),
    ]
    options.out.write_text(chart("GA3C's minimum training batch", panels))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = {"pps": pps, "networks": networks, "tuner": tuner, "batches": batches}
    parser.add_argument("what", choices=commands)
    parser.add_argument("--game", default="pong")
    parser.add_argument("--environments", type=int, default=32)
    parser.add_argument("--agents", type=int, default=0, help="pps: 0 for one for each environment")
    parser.add_argument("--predictors", type=int, default=2, help="pps")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--tuning-seconds", type=float, default=180.0, help="tuner")
    parser.add_argument("--window", type=float, default=4.0, help="tuner")
    parser.add_argument("--steps", type=int, default=40_000, help="batches")
    parser.add_argument("--out", type=Path, default=Path("ga3c-batches.svg"), help="batches: the figure")
    options = parser.parse_args()
    commands[options.what](options)


if __name__ == "__main__":
    main()
