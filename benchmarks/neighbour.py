"""What a busy neighbour costs: a network learns with torch's threads spinning, sleeping at once, or with one thread.

    .venv/bin/python benchmarks/neighbour.py --rounds 8 --seconds 1 --neighbours 1

One process for each way; they take turns in windows of `--seconds`, each stopped while another has its window, and each
round has windows without and with so many busy loops beside them. Batches per second, medians of all windows.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WAYS = ("spin", "sleep at once", "one thread")
START = 120.0  # seconds a process may take until it learns


def learn(preset: str, way: str, counter: Path) -> None:
    """Learn for ever; the number of batches stands in a file."""
    from phalanx.config.presets import PRESETS
    from phalanx.registry import MakeEnv, make_network
    from phalanx.runtime.affinity import usable_cores
    from phalanx.runtime.waits import SleepAtOnce

    import torch  # isort: skip  after phalanx, which tells its threads how to wait

    experiment = PRESETS[preset][1].with_derived_values()
    torch.set_num_threads(1 if way == "one thread" else usable_cores())
    sampler, spec = experiment.sampler, MakeEnv(experiment.env, 0)(0).spec
    model, size = make_network(experiment, spec), (sampler.rollout_steps, experiment.env.stack, *spec.frame_shape)
    stacks = torch.randint(0, 256, size, dtype=torch.uint8)
    history = torch.full((sampler.rollout_steps,), experiment.env.stack, dtype=torch.uint8)
    SleepAtOnce().switch(way == "sleep at once")
    with counter.open("r+b") as file, mmap.mmap(file.fileno(), 8) as count:
        batches = 0
        while True:
            for start in range(0, len(stacks), sampler.environments):
                rows = slice(start, start + sampler.environments)
                with torch.no_grad():
                    model(stacks[rows], history[rows])
            sum(part.sum() for part in model(stacks, history)).backward()
            model.zero_grad()
            batches += 1
            count[:8] = struct.pack("q", batches)


def windows(ways: dict[str, subprocess.Popen], directory: Path, seconds: float) -> dict[str, float]:
    """Batches per second of each way, one after the other."""
    speeds = {}
    for way, process in ways.items():
        process.send_signal(signal.SIGCONT)
        before, since = batches_of(directory, way), time.perf_counter()
        time.sleep(seconds)
        speeds[way] = (batches_of(directory, way) - before) / (time.perf_counter() - since)
        process.send_signal(signal.SIGSTOP)
    return speeds


def batches_of(directory: Path, way: str) -> int:
    return struct.unpack("q", (directory / way).read_bytes())[0]


def start(way: str, preset: str, directory: Path) -> subprocess.Popen:
    """A process that has learnt once and is stopped."""
    (directory / way).write_bytes(bytes(8))
    process = subprocess.Popen([sys.executable, __file__, "--learn", way, preset, str(directory / way)])
    deadline = time.monotonic() + START
    while not batches_of(directory, way):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise SystemExit(f"'{way}' does not learn")
        time.sleep(0.1)
    process.send_signal(signal.SIGSTOP)
    return process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="a2c-pong")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--neighbours", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as processes:
        ways, directory = {}, Path(folder)
        for way in WAYS:
            ways[way] = start(way, options.preset, directory)
            processes.callback(ways[way].kill)
        speeds: dict[tuple[int, str], list[float]] = {}
        for _ in range(options.rounds):
            for count in (0, options.neighbours):
                loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
                try:
                    for way, speed in windows(ways, directory, options.seconds).items():
                        speeds.setdefault((count, way), []).append(speed)
                finally:
                    for loop in loops:
                        loop.kill()
                        loop.wait()
        print(f"load {os.getloadavg()[0]:.1f}; batches per second, medians of {options.rounds} windows")
        for (count, way), values in speeds.items():
            print(f"{count} neighbour(s)  {way:<14} {statistics.median(values):8.1f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--learn"]:
        learn(sys.argv[3], sys.argv[2], Path(sys.argv[4]))
    else:
        main()
