"""A run of dba3c in which somebody is killed again and again, at random moments: does it always recover?

    .venv/bin/python benchmarks/chaos_dba3c.py [--minutes 10] [--preset dba3c-catch] [--seed 0] [-- further flags]

In turn a worker, the evaluator, a parameter server and the standby get kill -9, and a worker is stopped for longer than
a step waits for it. A worker that is killed may be the chief; the events tell. A line for each: what the run said, and
the seconds until steps of the full quorum are made again, which may be 30 at most (a worker that is stopped: after it
goes on). In the end the run is interrupted: its parameters must be finite, and no process may be left.

`tests/cluster/test_chaos_dba3c.py` is the short form, and this uses its helpers.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests/cluster"))
from rayrun import RayRun, kill, newest_weights

KINDS = ("worker", "evaluator", "server", "standby", "stop")
STOPPED = 40.0  # seconds for which a worker stands still; a step waits 20 for it, and a checkpoint 10
LONGEST = 30.0  # seconds that a recovery may take
SNAPSHOT_EVERY = 10  # updates between two copies of a server


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--preset", default="dba3c-catch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause", type=float, default=10.0, help="seconds between two deaths, on average")
    parser.add_argument("flags", nargs="*", help="after --: further flags of phalanx train")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    flags = ["--run.steps", "1000000000000", "--topology.evaluate-every", "200", "--run.checkpoint-every", "20"]
    flags += ["--topology.snapshot-every", str(SNAPSHOT_EVERY), *options.flags]
    with tempfile.TemporaryDirectory() as place, RayRun(Path(place), options.preset, *flags) as run:
        run.wait_for_updates()
        run.wait(lambda: len(run.processes("ray::Host")) > len(run.nodes()), "no evaluator")
        until, slowest, count = time.monotonic() + 60 * options.minutes, 0.0, 0
        while time.monotonic() < until:
            time.sleep(chance.expovariate(1 / options.pause))
            kind = KINDS[count % len(KINDS)]
            seconds = strike(run, kind, chance)
            slowest, count = max(slowest, seconds), count + 1
            if seconds > LONGEST:
                sys.exit(f"the recovery took {seconds:.0f} s")
        code = run.end(signal.SIGINT)
        assert code == 128 + signal.SIGINT, code
        assert all(torch.isfinite(value).all() for value in newest_weights(run).values())
        events = run.events()
        print(
            f"{count} deaths and stops, the chief's among them {events.count('was the chief')} times; {run.updates:,}"
        )
        print(f"updates, score {run.score:.2f}; the slowest recovery took {slowest:.1f} s; nothing is left")


def strike(run: Any, kind: str, chance: random.Random) -> float:
    """Kill or stop one of a kind; the seconds until the run is whole again."""
    said, before = len(run.events()), run.updates
    if kind == "stop":
        victim = chance.choice(run.nodes())
        os.kill(victim, signal.SIGSTOP)
        time.sleep(STOPPED)
        assert "from now on" in run.events()[said:], "a worker that stood still was not named"
        os.kill(victim, signal.SIGCONT)
    elif kind in ("worker", "evaluator"):
        nodes = run.nodes()
        kill(chance.choice(nodes if kind == "worker" else sorted(set(run.processes("ray::Host")) - set(nodes))))
    else:
        processes = run.processes(f"ray::{kind.capitalize()}")
        kill(chance.choice(processes))
    started = time.monotonic()
    words = {"server": "came back with update", "standby": "standby of the parameter servers died"}.get(kind, "died")
    if kind != "stop":
        run.wait(lambda: words in run.events()[said:], f"nobody named the death of a {kind}")
    run.wait(lambda: is_whole(run, kind), f"the run is not whole again after the death of a {kind}")
    seconds = time.monotonic() - started
    sentences = [line.partition(" ")[2] for line in run.events()[said:].splitlines() if "games have a mean" not in line]
    if found := re.search(r"came back with update ([\d,]+)", run.events()[said:]):
        assert int(found[1].replace(",", "")) >= before - SNAPSHOT_EVERY, "more updates are lost than stated"
    print(f"{kind:<10}{seconds:5.1f} s  {'; '.join(sentences)[:200]}", flush=True)
    return seconds


def is_whole(run: Any, kind: str) -> bool:
    """Are steps of all workers made, and is everybody there?"""
    records = run.records()
    quorums = [record["quorum"] for record in records if "quorum" in record]
    going = records[-1]["updates"] > records[-2]["updates"]
    there = len(run.nodes()) >= quorums[-1] == max(quorums)
    return going and there and (kind != "evaluator" or len(run.processes("ray::Host")) > len(run.nodes()))


if __name__ == "__main__":
    main()
