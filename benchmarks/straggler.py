"""Does a worker of dba3c that is slow hold up the others?

    .venv/bin/python benchmarks/straggler.py [--workers 4] [--times 5] [--ms 20] [--seconds 20] [--json FILE]

Runs `phalanx train a2c-gym --topology dba3c` on an environment that sleeps (`sleeping.py`), so that two cores can host
many workers; each has one environment. Three runs in turn: without the slow worker; with it as one worker too many (a
quorum of all but one); and with it in a quorum of all. Its steps take `--times` as long. The throughput is that of data
points in gradients that count: updates a second, times the quorum, times the batch. The target is that the second run
has at least .9 of the first one's.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BATCH = 16
SETTLED = 5  # updates after which all are at work
LONGEST_START = 180.0  # seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, default=4, help="with the slow one")
    parser.add_argument("--times", type=float, default=5.0, help="that a step of the slow one takes as long")
    parser.add_argument("--ms", type=float, default=20.0, help="milliseconds of a step")
    parser.add_argument("--seconds", type=float, default=20.0, help="measured at the end of each run")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("flags", nargs="*", help="after --: further flags of phalanx train")
    options = parser.parse_args()
    count = options.workers
    runs = {
        f"{count - 1} of {count - 1}, all alike": (count - 1, count - 1, False),
        f"{count - 1} of {count}, one slow": (count, count - 1, True),
        f"{count} of {count}, one slow": (count, count, True),
    }
    results: list[dict[str, Any]] = []
    for _ in range(options.rounds):
        results += [{"run": name, **measure(*run, options)} for name, run in runs.items()]
    show(results, list(runs))
    if options.json:
        Path(options.json).write_text(json.dumps({"options": vars(options), "results": results}, indent=1) + "\n")


def measure(workers: int, quorum: int, slow: bool, options: argparse.Namespace) -> dict[str, Any]:
    """One run: data points per second at its end, and what became of gradients."""
    flags = ["--topology", "dba3c", "--topology.workers", str(workers), "--topology.quorum", str(quorum / workers)]
    flags += ["--topology.shards", "1", "--topology.agents", "1", "--topology.batch", str(BATCH)]
    flags += ["--sampler.environments", str(workers), "--sampler.horizon", str(BATCH), "--sampler.decorrelation", "0"]
    flags += ["--env.id", "sleeping:Sleeping-v0", "--run.log-every", "0.5", "--run.steps", "1000000000"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    with tempfile.TemporaryDirectory() as place:
        environment = {**os.environ, "PYTHONPATH": path, "SLEEPING_MS": str(options.ms)}
        if slow:
            environment |= {"STRAGGLER": str(Path(place) / "slow"), "STRAGGLER_TIMES": str(options.times)}
        command = [sys.executable, "-m", "phalanx", "train", "a2c-gym", "--run.directory", place, "--run.name", "run"]
        window = watch([*command, *flags, *options.flags], environment, Path(place), options.seconds)
    first, last = window[0], window[-1]
    updates = (last["updates"] - first["updates"]) / (last["time_s"] - first["time_s"])
    late = last.get("gradients_late", 0) - first.get("gradients_late", 0)
    pushes = last["gradients_pushes"] - first["gradients_pushes"]
    result = {
        "updates_per_second": updates,
        "points_per_second": updates * quorum * BATCH,
        "late_share": late / pushes,
    }
    print(json.dumps(result), file=sys.stderr, flush=True)
    return result


def watch(command: list[str], environment: dict[str, str], place: Path, seconds: float) -> list[dict[str, Any]]:
    """Records of so many seconds of a run, once all are at work; then it is stopped."""
    with (place / "output").open("w") as output:
        run = subprocess.Popen(command, env=environment, cwd=place, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + LONGEST_START
        while not (begun := [record for record in records(place) if record["updates"] >= SETTLED]):
            if run.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"the run did not begin: {(place / 'output').read_text()[-500:]}")
            time.sleep(0.2)
        time.sleep(seconds)
        return [record for record in records(place) if record["time_s"] >= begun[0]["time_s"]]
    finally:
        run.send_signal(signal.SIGINT)
        run.wait(60)


def records(place: Path) -> list[dict[str, Any]]:
    try:
        lines = (place / "run/metrics.jsonl").read_text().splitlines(keepends=True)
    except OSError:
        return []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def show(results: list[dict[str, Any]], names: list[str]) -> None:
    """A line for each kind of run; means over the rounds."""
    print(f"{'quorum':<24}{'updates/s':>12}{'points/s':>12}{'of the first':>14}{'late':>8}")
    base = 0.0
    for name in names:
        own = [result for result in results if result["run"] == name]
        updates, points, late = (
            sum(result[key] for result in own) / len(own)
            for key in ("updates_per_second", "points_per_second", "late_share")
        )
        base = base or points
        print(f"{name:<24}{updates:>12.2f}{points:>12.1f}{points / base:>14.2f}{late:>8.1%}")


if __name__ == "__main__":
    main()
