"""phalanx and its fastest peers in short windows in turn, for ratios that are smaller than a noisy machine's swings.

    python benchmarks/side_by_side.py [game] [rounds]

Sampling without a network, as in `peers.py`, with settings that were the best in runs of it or of this. All contenders
are started once and wait; a window of one follows a window of another. The ratio of two is the median over the rounds
of their ratios within a round. Takes about five minutes with 12 rounds.
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import contenders

WINDOW = 1.5  # seconds
SETTLING = 0.3  # seconds at a window's start: what the last window left undone, and steps that are ready already
WARM_UP = 2.0
PATIENCE = 120  # seconds for an answer; then the alarm ends this process, and its children at the end of their input
ENVIRONMENTS = 256  # of phalanx
PLAN: list[tuple[str, str, dict[str, Any]]] = [  # name, function, settings
    ("emulator", "emulator", {}),
    ("phalanx 84x84", "phalanx", {"frame": "84x84", "envs": ENVIRONMENTS}),
    ("EnvPool 84x84", "sample_envpool", {"frame": "84x84", "envs": 128, "batch": 64}),
    ("AtariVectorEnv 84x84", "sample_ale_vector", {"frame": "84x84", "envs": 128, "batch": 128}),
    ("AtariVectorEnv 84x84, 96 by 48", "sample_ale_vector", {"frame": "84x84", "envs": 96, "batch": 48}),
    ("phalanx 104x80", "phalanx", {"frame": "104x80", "envs": ENVIRONMENTS}),
    (
        "EnvPool 104x80",
        "sample_envpool",
        {"frame": "104x80", "envs": 128, "batch": 64, "use_inter_area_resize": False},
    ),
    (
        "EnvPool 104x80, 256 by 128",
        "sample_envpool",
        {"frame": "104x80", "envs": 256, "batch": 128, "use_inter_area_resize": False},
    ),
]
RATIOS = [
    ("phalanx 84x84", "EnvPool 84x84"),
    ("phalanx 84x84", "AtariVectorEnv 84x84"),
    ("phalanx 84x84", "AtariVectorEnv 84x84, 96 by 48"),
    ("phalanx 104x80", "EnvPool 104x80"),
    ("phalanx 104x80", "EnvPool 104x80, 256 by 128"),
    ("phalanx 104x80", "emulator"),
    ("phalanx 84x84", "emulator"),
    ("EnvPool 104x80", "emulator"),
]


def on_demand(step: Callable[[int], Any], warmup: float, seconds: float, size: float = 1.0) -> float:
    """Instead of one measurement: calls of `size` steps per second in a window for each line of the input."""
    count = 0

    def go_on(seconds: float) -> float:
        nonlocal count
        first, start = count, time.perf_counter()
        while (passed := time.perf_counter() - start) < seconds:
            step(count)
            count += 1
        return (count - first) / passed

    go_on(warmup)
    print("ready", flush=True)
    for _ in sys.stdin:
        go_on(SETTLING)
        print(go_on(seconds) * size, flush=True)
    return 0.0


def phalanx(game: str, frame: str, envs: int, warmup: float, seconds: float) -> None:
    """Env workers of phalanx, one group for each: without a network nothing is to be hidden behind another."""
    from ourselves import sampling_experiment
    from phalanx.bench.machine import random_steps
    from phalanx.sampling.placement import start_workers

    workers = start_workers(sampling_experiment(game, frame, envs, groups=1), "cpu", print)
    try:
        on_demand(random_steps(workers), warmup, seconds, envs / len(workers.groups))
    finally:
        workers.close()


def emulator(game: str, warmup: float, seconds: float) -> None:
    """Bare emulators on every core."""
    from phalanx.bench.emulators import BareEmulators
    from phalanx.runtime.affinity import usable_cores

    with BareEmulators(game, usable_cores(), ENVIRONMENTS // usable_cores()) as emulators:
        print("ready", flush=True)
        for _ in sys.stdin:
            print(emulators.speed(seconds), flush=True)


def child(name: str, settings: dict[str, Any]) -> None:
    contenders.calls_per_second = on_demand
    known: dict[str, Callable[..., Any]] = {"phalanx": phalanx, "emulator": emulator}
    function = known.get(name) or getattr(contenders, name)
    function(**settings, warmup=WARM_UP, seconds=WINDOW)


def main() -> None:
    game, rounds = [*sys.argv[1:], *["breakout", "12"][len(sys.argv) - 1 :]]
    running: dict[str, tuple[subprocess.Popen[str], int]] = {}
    for name, function, settings in PLAN:
        arguments = [sys.executable, __file__, "child", function, json.dumps({"game": game, **settings})]
        process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        answer(process)
        running[name] = process, settings.get("batch", 1)
    speeds: dict[str, list[float]] = {name: [] for name in running}
    for _ in range(int(rounds)):
        for name, (process, batch) in running.items():
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
            speeds[name].append(float(answer(process)) * batch)
    for process, _ in running.values():
        process.communicate(timeout=60)
    for name, values in speeds.items():
        print(f"{name}: {statistics.median(values):,.0f} steps/s ({min(values):,.0f} to {max(values):,.0f})")
    for ours, theirs in RATIOS:
        ratios = [a / b for a, b in zip(speeds[ours], speeds[theirs], strict=True)]
        print(f"{ours} / {theirs}: {statistics.median(ratios):.3f} (quartiles {quartiles(ratios)})")


def quartiles(values: list[float]) -> str:
    low, _, high = statistics.quantiles(values, n=4)
    return f"{low:.3f} to {high:.3f}"


def answer(process: subprocess.Popen[str]) -> str:
    """The next line of a child; an error if it has ended, or takes too long."""
    assert process.stdout is not None
    signal.alarm(PATIENCE)
    while line := process.stdout.readline():
        if line.strip() == "ready" or line.strip().replace(".", "", 1).isdigit():
            signal.alarm(0)
            return line
    raise SystemExit("a contender ended early")


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(sys.argv[2], json.loads(sys.argv[3]))
    else:
        main()
