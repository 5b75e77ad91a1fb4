"""GA3C beside the other topologies on one machine, in turn within one run.

    python benchmarks/ga3c.py pps [--environments 32] [--game pong]   predictions/s beside `synchronous`, no learning
    python benchmarks/ga3c.py networks                                PPS of GA3C beside A3C, network by network
    python benchmarks/ga3c.py tuner                                   TPS of the tuner beside a grid of fixed settings

A line for each window goes to standard error, the table to standard output. CPU seconds of this process and its workers
for each 1,000 steps stand beside the speed: they tell what a step costs where the machine has other work, too.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from phalanx.config import Experiment, GA3CConfig, SynchronousConfig
from phalanx.config.presets import preset
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=["pps"])
    parser.add_argument("--game", default="pong")
    parser.add_argument("--environments", type=int, default=32)
    parser.add_argument("--agents", type=int, default=0, help="0: one for each environment")
    parser.add_argument("--predictors", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0)
    {"pps": pps}[(options := parser.parse_args()).what](options)


if __name__ == "__main__":
    main()
