"""How much faster are many learners than one, where simulation is what takes the time?

    .venv/bin/python benchmarks/scaling.py [--learners 8] [--ms 20] [--json FILE]

Runs `phalanx train a2c-gym` on an environment that sleeps (`sleeping.py`), so that two cores can host many learners:
asynchronous ones and ones in lock step, one and many of each in turn. Each learner has one environment in its own
process, rollouts of 16 steps and a small network. Speed is that of the last seconds of a run, when all are at work.
Blocked and updating are shares of the learners' time: behind locks of others, and in updates of the central parameters.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
START = 12.0  # seconds that a run may take to start, and for each learner
EACH = 2.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--learners", type=int, default=8)
    parser.add_argument("--ms", type=float, default=20.0, help="milliseconds of a step")
    parser.add_argument("--chunks", type=int, default=3, help="of the central parameters")
    parser.add_argument("--seconds", type=float, default=15.0, help="measured at the end of each run")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--topologies", nargs="+", default=["asynchronous", "synchronous"])
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("flags", nargs="*", help="after --: further flags of phalanx train")
    options = parser.parse_args()
    results = [
        measure(topology, learners, options)
        for _ in range(options.rounds)
        for topology in options.topologies
        for learners in (1, options.learners)
    ]
    show(results)
    if options.json:
        Path(options.json).write_text(json.dumps({"options": vars(options), "results": results}, indent=1) + "\n")


def measure(topology: str, learners: int, options: argparse.Namespace) -> dict[str, Any]:
    """One run: steps per second at its end, and what the central parameters cost."""
    seconds = START + EACH * learners + options.seconds
    flags = ["--topology", topology, "--topology.replicas", str(learners), "--sampler.environments", str(learners)]
    flags += ["--topology.chunks", str(options.chunks)] if topology == "asynchronous" else []
    flags += ["--env.id", "sleeping:Sleeping-v0", "--sampler.workers", "1", "--sampler.horizon", "16"]
    flags += ["--run.seconds", str(seconds), "--run.log-every", "0.5", "--run.steps", "1000000000", *options.flags]
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    environment = {**os.environ, "PYTHONPATH": path, "SLEEPING_MS": str(options.ms)}
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "phalanx", "train", "a2c-gym", "--run.directory", place, "--run.name", "run"]
        done = subprocess.run(
            [*command, *flags], env=environment, cwd=place, capture_output=True, text=True, timeout=seconds + 120
        )
        if done.returncode:
            sys.exit(done.stderr[-500:])
        records = [json.loads(line) for line in (Path(place) / "run/metrics.jsonl").read_text().splitlines()]
    end = records[-1]["time_s"]
    window = [record for record in records if record["time_s"] > end - options.seconds]
    halves = window[: len(window) // 2 + 1], window[len(window) // 2 :]
    result = {
        "topology": topology,
        "learners": learners,
        "sps": speed(window),
        "sps_halves": [speed(half) for half in halves],  # of the window: alike if all were at work
        "updates_per_second": speed(window, "updates"),
        "staleness": mean([record["staleness_mean"] for record in window if "staleness_mean" in record]),
    }
    for what in ("blocked", "updating"):
        total = sum(record.get(f"{what}_seconds", 0.0) for record in window[1:])
        result[f"{what}_share"] = total / (learners * (window[-1]["time_s"] - window[0]["time_s"]))
    print(json.dumps(result), flush=True)
    return result


def speed(records: list[dict[str, Any]], clock: str = "steps") -> float:
    return (records[-1][clock] - records[0][clock]) / (records[-1]["time_s"] - records[0]["time_s"])


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def show(results: list[dict[str, Any]]) -> None:
    """A line for each topology and number of learners; means over the rounds."""
    heads = ("learners", "steps/s", "x one", "updates/s", "blocked", "updating")
    print("\n" + f"{'topology':<14}" + "".join(f"{head:>10}" for head in heads))
    kinds = dict.fromkeys((result["topology"], result["learners"]) for result in results)
    for topology, learners in kinds:
        own = [r for r in results if (r["topology"], r["learners"]) == (topology, learners)]
        one = [r for r in results if (r["topology"], r["learners"]) == (topology, 1)]
        numbers = {name: mean([r[name] for r in own]) for name in own[0] if name.endswith(("sps", "share", "second"))}
        ratio = numbers["sps"] / mean([r["sps"] for r in one])
        shared = topology == "asynchronous"
        blocked, updating = (f"{numbers[f'{what}_share']:.3%}" if shared else "" for what in ("blocked", "updating"))
        numbers_in_words = f"{learners:>10}{numbers['sps']:>10.1f}{ratio:>10.2f}{numbers['updates_per_second']:>10.1f}"
        print(f"{topology:<14}{numbers_in_words}{blocked:>10}{updating:>10}")


if __name__ == "__main__":
    main()
