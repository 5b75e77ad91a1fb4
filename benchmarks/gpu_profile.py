"""Where the time of a training on a GPU goes: steps per second, who used the cores, and the kernels of its graphs.

    python benchmarks/gpu_profile.py PRESET [flags of phalanx train]

`cpu` is what a worker's step takes of a core, `queue` how long a worker that could run waited for one, for each step;
the owner's are shares of the time. A graph is timed with nothing beside it; then its kernels are listed, the costliest
first.
"""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from phalanx.bench.machine import learn_first, running_replica, speed, warm_up_until
from phalanx.config.flags import parse_flags
from phalanx.config.presets import preset
from phalanx.probe import resolve_precision
from phalanx.runtime.timing import Timing

SETTLING, WINDOW = 2.0, 2.0  # seconds
LAUNCHES = 40
LISTED = 12  # kernels


def scheduled(processes: list[int]) -> tuple[int, int]:
    """Nanoseconds the main threads of these ran, and waited for a core, since they began."""
    numbers = [Path(f"/proc/{process}/schedstat").read_text().split() for process in processes]
    return sum(int(ran) for ran, _, _ in numbers), sum(int(waited) for _, waited, _ in numbers)


def profile_graph(name: str, launch: Callable[[], object]) -> None:
    """Time of a launch alone, and that of its kernels."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    launch()
    begin.record()
    for _ in range(LAUNCHES):
        launch()
    end.record()
    end.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        launch()
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = defaultdict(list)
    for event in seen.events():
        kernels[event.name].append(event.device_time)
    count = sum(map(len, kernels.values()))
    print(f"{name}: {1000 * begin.elapsed_time(end) / LAUNCHES:.0f} us alone, {count} kernels")
    for kernel, times in sorted(kernels.items(), key=lambda item: -sum(item[1]))[:LISTED]:
        print(f"  {sum(times):6.1f} us  {len(times):3d} x {kernel[:110]}")


def main() -> None:
    if len(sys.argv) < 2 or not torch.cuda.is_available():
        sys.exit(
            "usage: python benchmarks/gpu_profile.py PRESET [flags of phalanx train], on a machine with a CUDA GPU"
        )
    name, flags = sys.argv[1], sys.argv[2:]
    experiment = resolve_precision(parse_flags("gpu_profile.py", preset(name), flags).validate())
    if experiment.topology.name != "synchronous":
        sys.exit(f"{name} runs on {experiment.topology.name}, without workers; add --topology synchronous")
    with running_replica(experiment) as replica:
        learn_first(replica, name)
        warm_up_until(replica.iterate, SETTLING)
        workers, owner = [worker.process.pid for worker in replica.envs.workers], [os.getpid()]
        before, own_before = scheduled(workers), scheduled(owner)
        timing, start = Timing(), time.perf_counter()

        def iterate() -> None:
            for stage, seconds in replica.iterate().seconds.items():
                timing.add(stage, seconds)

        rate = speed(replica, iterate, WINDOW)
        ran, waited = (now - then for now, then in zip(scheduled(workers), before, strict=True))
        own, own_waited = (now - then for now, then in zip(scheduled(owner), own_before, strict=True))
        seconds = time.perf_counter() - start
        steps = rate * seconds
        print(
            f"{name}: {rate:.0f} steps/s, a step {ran / steps / 1e3:.0f} us cpu, {waited / steps / 1e3:.0f} us queue;"
        )
        print(f"  owner {own / seconds / 1e9:.2f} cpu, {own_waited / seconds / 1e9:.2f} queue, {timing.shares()}")
        torch.cuda.synchronize()
        step = next(launch for (kind, _), launch in replica.collector.answers.launches.items() if kind == "answer")
        profile_graph("a step", step)
        profile_graph("an update", next(iter(replica.learner.graphs.values())).launch)


if __name__ == "__main__":
    main()
