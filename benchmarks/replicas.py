"""Two replicas on two cores beside one run with as many environments, on Pong, in short windows in turn.

    .venv/bin/python benchmarks/replicas.py [PRESET] [--rounds 10] [--window 3] [--only one asynchronous] [-- flags]

`one` is `synchronous` with one learner and a worker process for each core; `asynchronous` and `lockstep` have a learner
for each core, whose environments are in its own process. Batches of a learner are half as large as those of `one`; in
lock step two halves make one update. All runs are started first; then only one is at work at a time and the others are
stopped, so that a busy hour hits all alike. A ratio is the median over the rounds of the ratios within a round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CONTENDERS = {
    "one": ["--topology", "synchronous", "--topology.replicas", "1"],
    "asynchronous": ["--topology", "asynchronous", "--topology.replicas", "2"],
    "lockstep": ["--topology", "synchronous", "--topology.replicas", "2"],
}
START_TIMEOUT = 120.0  # seconds until a run must have made its first updates


class Contender:
    """A run of `phalanx train` that can be stopped and go on."""

    def __init__(self, name: str, place: Path, options: argparse.Namespace, flags: list[str]) -> None:
        self.name = name
        self.metrics = place / name / "metrics.jsonl"
        command = [sys.executable, "-m", "phalanx", "train", options.preset, "--run.directory", str(place)]
        command += ["--run.name", name, "--run.log-every", "0.05", "--run.steps", "1000000000", *CONTENDERS[name]]
        command += ["--sampler.environments", str(options.environments), "--sampler.decorrelation", "0", *flags]
        with (place / f"{name}.log").open("w") as log:
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)

    def wait_until_it_learns(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while self.newest().get("updates", 0) < 20:
            if time.monotonic() > deadline or self.process.poll() is not None:
                sys.exit(f"{self.name} did not begin to learn; see {self.metrics.parent.parent}")
            time.sleep(0.1)

    def newest(self) -> dict[str, Any]:
        """The last whole record."""
        if not self.metrics.exists():
            return {}
        with self.metrics.open("rb") as file:
            file.seek(max(0, self.metrics.stat().st_size - 8192))
            lines = file.read().split(b"\n")[:-1]
        return json.loads(lines[-1]) if lines else {}

    def signal_all(self, number: signal.Signals) -> None:
        for pid in [self.process.pid, *descendants(self.process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def window(self, seconds: float) -> float:
        """Steps per second while it alone is at work, after a moment in which it gets going."""
        self.signal_all(signal.SIGCONT)
        time.sleep(0.5)
        before, began = self.newest()["steps"], time.monotonic()
        time.sleep(seconds)
        speed = (self.newest()["steps"] - before) / (time.monotonic() - began)
        self.signal_all(signal.SIGSTOP)
        return speed

    def end(self) -> None:
        self.signal_all(signal.SIGCONT)
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        self.signal_all(signal.SIGKILL)
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("preset", nargs="?", default="a2c")
    parser.add_argument("--environments", type=int, default=32, help="of all replicas together")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--window", type=float, default=3.0, help="seconds")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--json", help="file for the results")
    own, flags = sys.argv[1:], []
    if "--" in own:
        at = own.index("--")
        own, flags = own[:at], own[at + 1 :]
    options = parser.parse_args(own)
    rounds = []
    with started(options, flags) as contenders:
        for number in range(options.rounds):
            order = contenders if number % 2 == 0 else contenders[::-1]
            rounds.append({contender.name: contender.window(options.window) for contender in order})
            print(json.dumps({name: round(speed) for name, speed in rounds[-1].items()}), flush=True)
        ends = {contender.name: contender.newest() for contender in contenders}
    show(rounds, options.only, ends)
    if options.json:
        results = {"options": vars(options), "flags": flags, "rounds": rounds, "last_records": ends}
        Path(options.json).write_text(json.dumps(results) + "\n")


@contextlib.contextmanager
def started(options: argparse.Namespace, flags: list[str]) -> Iterator[list[Contender]]:
    """All of them, one after the other until they learn, then stopped."""
    contenders: list[Contender] = []
    with tempfile.TemporaryDirectory() as place:
        try:
            for name in options.only:
                contenders.append(Contender(name, Path(place), options, flags))
                contenders[-1].wait_until_it_learns()
                contenders[-1].signal_all(signal.SIGSTOP)
            yield contenders
        finally:
            for contender in contenders:
                contender.end()


def descendants(pid: int) -> list[int]:
    """The processes that come from one, parents first."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def show(rounds: list[dict[str, float]], names: list[str], ends: dict[str, dict[str, Any]]) -> None:
    print(f"\n{'':<14}{'steps/s':>10}{'x ' + names[0]:>12}{'staleness':>12}")
    for name in names:
        speed = statistics.median(measured[name] for measured in rounds)
        ratio = statistics.median(measured[name] / measured[names[0]] for measured in rounds)
        staleness = ends[name].get("staleness_mean")
        words = "" if staleness is None else f"{staleness:.2f}"
        print(f"{name:<14}{speed:>10,.0f}{ratio:>12.2f}{words:>12}")


if __name__ == "__main__":
    main()
