"""Seconds from a process's start until the mean score of its last 100 games reaches the preset's target.

    python benchmarks/time_to_score.py PRESET --seeds 0 1 2 --limit 60 -- [flags of phalanx train]

Each seed is a process of its own, one after the other; the clock starts before the interpreter does. A seed that
does not get there within the limit is reported with the score it had. The time is that of the record which was written
when the score was there; the process ends a little later, with rollouts that were under way and a checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def measure(preset: str, seed: int, limit: float, flags: list[str]) -> dict[str, Any]:
    """One run: did it reach the target, after how many seconds and steps, at which speed?"""
    with tempfile.TemporaryDirectory() as directory:
        started = time.time()  # the clock of files
        command = [sys.executable, "-m", "phalanx", "train", preset, "--run.directory", directory, "--run.name", "run"]
        command += ["--run.seed", str(seed), "--run.seconds", str(limit), "--run.log-every", "1", *flags]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit + 120, env=environment)
        ended = time.time()
        if done.returncode:
            return {"seed": seed, "reached": False, "error": done.stderr[-300:]}
        run = Path(directory) / "run"
        metrics = run / "metrics.jsonl"
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
        target = json.loads((run / "config.json").read_text())["run"]["target_score"]
        if target is None:
            sys.exit(f"{preset} has no target score; give one with -- --run.target-score SCORE")
        there = [record for record in records if record["episodes"] >= 100 and record["score"] >= target]
        moment = there[0] if there else records[-1]
        curve = [(round(r["time_s"]), r["steps"], r["score"] and round(r["score"], 1)) for r in records]
        return {
            "seed": seed,
            "reached": bool(there),
            "seconds": round(metrics.stat().st_mtime - started - (records[-1]["time_s"] - moment["time_s"]), 1),
            "until_end": round(ended - started, 1),
            "steps": moment["steps"],
            "score": moment["score"],
            "sps": round(statistics.median(record["sps"] for record in records)),
            "curve": curve[:: max(1, len(curve) // 12)],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("preset")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--limit", type=float, default=60.0)
    own, flags = sys.argv[1:], []
    if "--" in own:
        at = own.index("--")
        own, flags = own[:at], own[at + 1 :]
    options = parser.parse_args(own)
    results = []
    for seed in options.seeds:
        results.append(measure(options.preset, seed, options.limit, flags))
        print(json.dumps(results[-1]), flush=True)
    times = [result["seconds"] if result["reached"] else float("inf") for result in results]
    print(f"{options.preset} {' '.join(flags)}: median {statistics.median(times):.1f} s of {times}", flush=True)


if __name__ == "__main__":
    main()
