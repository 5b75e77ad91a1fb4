"""GA3C beside the other topologies on one machine, in turn within one run.

    python benchmarks/ga3c.py pps        predictions/s beside `synchronous`, with as many environments, no learning
    python benchmarks/ga3c.py networks   PPS of GA3C in training beside A3C on the CPU, by network (the paper's table 2)
    python benchmarks/ga3c.py tuner      TPS that the tuner reaches from 1-1-1 beside a grid of fixed settings
    python benchmarks/ga3c.py emulator   PPS in training, with the tuner on, beside the emulator's rate on all cores
    python benchmarks/ga3c.py batches    score and lag by the minimum training batch, as a figure
    python benchmarks/ga3c.py score      one run: time, steps and lag until a score of Pong

Flags of `phalanx train` may follow after `--`; they are for every run of GA3C. A line for each window goes to standard
error, the table to standard output, and both as data into the folder --out. CPU seconds of this process and its workers
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

from phalanx.bench.emulators import BareEmulators
from phalanx.config import Experiment, GA3CConfig, SynchronousConfig
from phalanx.config.presets import preset
from phalanx.figure import Line, Panel, chart
from phalanx.probe import resolve_precision
from phalanx.replica.build import make_replica
from phalanx.replica.crew import Crew
from phalanx.replica.node import RATE_SECONDS, Node
from phalanx.runtime.affinity import usable_cores
from phalanx.runtime.device import choose_compute
from phalanx.topologies import ga3c, synchronous

TICKS = os.sysconf("SC_CLK_TCK")
START_SECONDS = 0.5  # that an agent's start may take


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
    free = GA3CConfig(agents=options.agents, predictors=options.predictors, min_batch=1)
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
    keep(options, "pps", {"speeds": speeds, "cpu_seconds_for_1000": costs})
    for name in contenders:
        print(f"{name:<12} {statistics.median(speeds[name]):8,.0f}/s  {statistics.median(costs[name]):.3f} CPU s/1,000")
    ratios = [free / bound for free, bound in zip(speeds["ga3c"], speeds["synchronous"], strict=True)]
    cheaper = statistics.median(costs["synchronous"]) / statistics.median(costs["ga3c"])
    print(f"ratio of speeds {statistics.median(ratios):.3f}, of what the CPU time of each would give {cheaper:.3f}")


def keep(options: argparse.Namespace, name: str, data: Any) -> Path:
    """Write the data of a measurement into the folder of results."""
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"ga3c-{name}.json"
    path.write_text(json.dumps({"command": sys.argv[1:], "data": data}, indent=1))
    return path


def records_of(preset_name: str, seconds: float, *flags: str, again: bool = False) -> list[dict[str, Any]]:
    """What `phalanx train` records within so many seconds of training; starting is not counted in."""
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "phalanx", "train", preset_name, "--run.directory", place]
        command += ["--run.log-every", "1", "--run.seconds", str(seconds), *flags]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=seconds + 120,
            env=environment,
        )
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed: {done.stderr[-500:]}")
        (path,) = Path(place).glob("*/metrics.jsonl")
        return [json.loads(line) for line in path.read_text().splitlines()]


def rate(records: list[dict[str, Any]], name: str, since: float) -> float:
    """The median of a number in the records after so many seconds, or of all of them if there are none so late."""
    late = [record[name] for record in records if record["time_s"] > since and record.get(name) is not None]
    return statistics.median(late or [record.get(name) or 0.0 for record in records] or [0.0])


def at_work(records: list[dict[str, Any]], agents: int) -> float:
    """Since when so many agents have been up, and rates are of a time in which they all were."""
    return min((record["time_s"] for record in records if record["agents"] >= agents), default=0.0) + RATE_SECONDS


def lags_of(records: list[dict[str, Any]]) -> list[float]:
    """Mean lags of the records in which something was learnt."""
    updates = [0, *(record["updates"] for record in records)]
    return [record["lag_mean"] for record, before in zip(records, updates, strict=False) if record["updates"] > before]


def networks(options: argparse.Namespace) -> None:
    """Both learn while they are measured, with the same number of environments in all. A3C has a replica for each core
    and computes on the CPU, as in the paper; GA3C has the GPU if there is one."""
    game, environments = ["--env.game", options.game], ["--sampler.environments", str(options.environments)]
    free = ["--topology.predictors", str(options.predictors), "--topology.trainers", str(options.trainers)]
    if not options.tune:
        free += ["--topology.tuner", "off"]
    cores = str(usable_cores())
    ways = {
        "ga3c": [*free, *options.flags],
        "a3c": ["--topology", "asynchronous", "--topology.replicas", cores, "--run.device", "cpu"],
    }
    names = options.networks or ["ga3c", *(f"ga3c-large-stride{stride}" for stride in (4, 3, 2, 1))]
    print(f"{'network':<20} {'GA3C':>8} {'A3C':>8} {'ratio':>7}")
    table: dict[str, dict[str, list[float]]] = {}
    for name in names:
        speeds: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(options.rounds):
            for way in list(ways)[:: -1 if turn % 2 else 1]:
                records = records_of(name, options.seconds, *ways[way], *game, *environments)
                speeds[way].append(rate(records, "pps" if way == "ga3c" else "sps", since=options.seconds / 2))
                print(f"{name} {way} {speeds[way][-1]:.0f}", file=sys.stderr, flush=True)
        ours, theirs = (statistics.median(speeds[way]) for way in ways)
        table[name] = speeds
        keep(options, "networks", table)
        print(f"{name:<20} {ours:8,.0f} {theirs:8,.0f} {ours / max(theirs, 1e-9):7.2f}", flush=True)


def tuner(options: argparse.Namespace) -> None:
    """The best of the grid is measured again after the tuner, and that counts: of several noisy numbers the greatest
    is too great."""

    def fixed(setting: tuple[int, int, int]) -> float:
        flags = ["--env.game", options.game, *flags_of(setting), *options.flags]
        seconds = options.grid_seconds + RATE_SECONDS + START_SECONDS * setting[0]
        records = records_of("ga3c-static", seconds, *flags)
        measured = rate(records, "tps", at_work(records, setting[0]))
        print(f"{setting} {measured:.1f} segments/s", file=sys.stderr, flush=True)
        return measured

    grid = {setting: fixed(setting) for setting in itertools.product(options.grid, (1, 2), (1, 2))}
    best = max(grid, key=lambda setting: grid[setting])
    found = records_of(
        *("ga3c", options.tuning_seconds, "--env.game", options.game, *flags_of((1, 1, 1))),
        *("--topology.tuner-window", str(options.window), *options.flags),
    )
    last = found[-1]
    setting = (int(last["agents"]), int(last["predictors"]), int(last["trainers"]))
    reached = rate(found, "tps", 0.75 * options.tuning_seconds)
    again = [fixed(best), fixed(setting)]
    keep(options, "tuner", {"grid": [[*key, tps] for key, tps in grid.items()], "again": again, "tuned": found})
    print(f"the grid's best {best}: {grid[best]:.1f}, again {again[0]:.1f} segments/s")
    print(f"the tuner, last quarter: {reached:.1f}; its last setting {setting} by itself {again[1]:.1f}")
    print(f"ratio {reached / again[0]:.3f}; of the settings alone {again[1] / again[0]:.3f}")


def flags_of(setting: tuple[int, int, int]) -> list[str]:
    agents, predictors, trainers = map(str, setting)
    flags = ["--sampler.environments", agents, "--topology.agents", agents]
    return [*flags, "--topology.predictors", predictors, "--topology.trainers", trainers]


def emulator(options: argparse.Namespace) -> None:
    """The emulator is measured before and after; between, its processes sleep."""
    flags = ["--env.game", options.game, "--sampler.environments", str(options.environments)]
    flags += ["--topology.predictors", str(options.predictors), "--topology.trainers", str(options.trainers)]
    flags += ["--topology.tuner-window", str(options.window), *options.flags]
    with BareEmulators(options.game, 2 * usable_cores(), 4) as emulators:
        limits = [emulators.speed(2.0)]
        records = records_of("ga3c", options.tuning_seconds, *flags)
        limits.append(emulators.speed(2.0))
    last, limit = records[-1], statistics.mean(limits)
    reached = rate(records, "pps", 0.75 * options.tuning_seconds)
    keep(options, options.name or "emulator", {"emulator": limits, "records": records})
    setting = " ".join(f"{last[name]:.0f} {name}" for name in ("agents", "predictors", "trainers"))
    print(f"{reached:,.0f} predictions/s beside {limit:,.0f} steps/s of the emulator: ratio {reached / limit:.3f}")
    print(
        f"{setting}; {last['tps']:,.0f} segments/s, lag {last['lag_mean']:.2f}, {last['batch_fill']:.1f} rows at once"
    )


def batches(options: argparse.Namespace) -> None:
    """The learning rate is the same for all: the loss is a mean, so that a step does not grow with its batch."""
    sizes = (1, 5, 20, 40, 80)
    name = "a2c-catch" if options.game == "catch" else "a2c-pong"
    if name == "a2c-pong":
        options.flags = ["--env.game", options.game, *options.flags]
    scores, lags, data = [], [], {}
    for size in sizes:
        flags = ["--topology", "ga3c", "--topology.min-batch", str(size), "--topology.queue", "100"]
        flags += ["--sampler.environments", "16", "--sampler.horizon", "5", "--run.steps", str(options.steps)]
        limit = options.seconds if options.seconds > 60 else 600.0
        runs = [
            records_of(name, limit, *flags, "--run.seed", str(seed), *options.flags) for seed in range(options.rounds)
        ]
        data[size] = runs
        lines = [[(record["steps"], record["score"]) for record in run if record["score"] is not None] for run in runs]
        scores.append(Line(f"{size} steps", max(lines, key=len)))
        lags.append((float(size), statistics.mean(lag for run in runs for lag in lags_of(run))))
        ends = [line[-1][1] for line in lines if line]
        print(f"{size:3} scores at the end {ends}, mean lag {lags[-1][1]:.2f}", flush=True)
    panels = [
        Panel(f"{options.game}, one run each", "steps", "score", scores),
        Panel("policy lag", "least steps of a batch", "versions", [Line("mean", lags)], x_log=True),
    ]
    path = keep(options, f"batches-{options.game}", data)
    path.with_suffix(".svg").write_text(chart("GA3C's minimum training batch", panels))


def score(options: argparse.Namespace) -> None:
    """Of a run that ends with its target score, or with its time."""
    started = time.monotonic()
    records = records_of(
        options.preset,
        options.seconds,
        *([] if options.preset.startswith("ga3c") else ["--topology", "ga3c"]),  # which would set all its numbers back
        *("--env.game", options.game, "--run.target-score", str(options.target)),
        *options.flags,
    )
    last, lags = records[-1], lags_of(records) or [0.0]
    keep(options, options.name or f"score-{options.preset}", records)
    curve = [(round(record["time_s"]), record["score"]) for record in records][:: max(1, len(records) // 10)]
    print(f"score {last['score']} after {last['time_s']:.0f} s of training and {last['steps']:,} steps; with its start "
          f"and end {time.monotonic() - started:.0f} s")  # fmt: skip
    print(
        f"lag {statistics.mean(lags):.2f} on average, {max(record['lag_max'] for record in records)} at most; {curve}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = {
        "pps": pps,
        "networks": networks,
        "tuner": tuner,
        "emulator": emulator,
        "batches": batches,
        "score": score,
    }
    parser.add_argument("what", choices=commands)
    parser.add_argument("--game", default="pong", help="batches: or catch, a toy")
    parser.add_argument("--environments", type=int, default=32)
    parser.add_argument("--agents", type=int, default=0, help="pps: 0 for one for each environment")
    parser.add_argument("--predictors", type=int, default=1)
    parser.add_argument("--trainers", type=int, default=1, help="networks, emulator")
    parser.add_argument("--tune", action="store_true", help="networks: with the tuner on")
    parser.add_argument("--networks", nargs="+", default=[], help="networks: names of presets, a part of the table")
    parser.add_argument("--grid", type=int, nargs="+", default=[4, 16, 32], help="tuner: numbers of agents")
    parser.add_argument("--grid-seconds", type=float, default=20.0, help="tuner: of each setting, once agents are up")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--tuning-seconds", type=float, default=180.0, help="tuner, emulator")
    parser.add_argument("--window", type=float, default=4.0, help="tuner, emulator")
    parser.add_argument("--steps", type=int, default=40_000, help="batches")
    parser.add_argument("--preset", default="a2c-pong", help="score")
    parser.add_argument("--target", type=float, default=18.0, help="score")
    parser.add_argument("--name", default="", help="emulator, score: of the file with the results")
    parser.add_argument("--out", type=Path, default=Path("build/ga3c"), help="folder of results")
    own, flags = sys.argv[1:], []
    if "--" in own:
        at = own.index("--")
        own, flags = own[:at], own[at + 1 :]
    options = parser.parse_args(own)
    options.flags = flags
    commands[options.what](options)


if __name__ == "__main__":
    main()
