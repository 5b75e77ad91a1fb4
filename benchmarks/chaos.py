"""Chaos: a run on a local Ray whose processes are killed in turn at random moments, for as long as one likes.

python benchmarks/chaos.py [--preset NAME] [--kills N] [--seed N] [-- FLAGS of phalanx train]

Each kill is a SIGKILL of a process of the next kind: actors, bundles, learners or workers (`ray::Host`), replay shards,
parameter servers, their standby. The run has recovered when it has named the death, the successor is ready, and further
updates were made; it must within 30 s. In the end the run is interrupted (or killed, with `--end kill`), and must leave
finite parameters, no process and no directory of Ray. The short form is `tests/cluster/test_chaos.py`.
"""

from __future__ import annotations

import argparse
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "cluster"))

from rayrun import RayRun, kill, ray_directories

KINDS = {  # as Ray calls processes -> what the run says of one that was killed
    "ray::Host": "died:",
    "ray::ReplayServer": "died and came back empty",
    "ray::Server": "came back with update",
    "ray::Standby": "standby of the parameter servers died and came back",
}
LONGEST = 30.0  # seconds that a recovery may take
UPDATES = 3  # after a death, before the run counts as recovered


def main() -> int:
    """Run, kill, print; 1 if anything was not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="gorila-catch")
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument(
        "--pause", type=float, default=6.0, help="the most seconds between a recovery and the next kill"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the victims")
    parser.add_argument("--end", choices=("interrupt", "kill"), default="interrupt", help="of the driver")
    parser.add_argument("flags", nargs="*", help="further ones of phalanx train, after --")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    flags = ["--run.steps", "1000000000", "--sampler.max-deaths", "1000000", *options.flags]
    with tempfile.TemporaryDirectory() as directory:
        with RayRun(Path(directory), options.preset, *flags) as run:
            run.wait_for_updates(UPDATES)
            times = torment(run, options, chance)
            wrong = [f"{kind}: {most:.1f} s" for kind, values in times.items() if (most := max(values)) > LONGEST]
            wrong += end(run, options.end)
            report(run, times)
        wrong += [f"{left} is left" for left in ray_directories()]
    for sentence in wrong:
        print(f"WRONG: {sentence}")
    return 1 if wrong else 0


def torment(run: RayRun, options: argparse.Namespace, chance: random.Random) -> dict[str, list[float]]:
    """Kill one after the other; seconds to each recovery, by kind."""
    times: dict[str, list[float]] = defaultdict(list)
    kinds = [kind for kind in KINDS if run.processes(kind)]
    for number in range(options.kills):
        time.sleep(chance.uniform(0.5, options.pause))
        kind = kinds[number % len(kinds)]
        said = run.events().count(KINDS[kind])
        victims = sorted(ready(run, kind))
        if not victims:
            print(f"{kind}: nobody there")
            continue
        victim = chance.choice(victims)
        kill(victim)
        started = time.monotonic()
        run.wait_for_event(KINDS[kind], said + 1)
        named = time.monotonic() - started
        wait_for_successor(run, kind, len(victims))
        run.wait_for_updates(UPDATES)
        times[kind].append(time.monotonic() - started)
        print(
            f"{number + 1:4} {kind:18} named after {named:5.1f} s, recovered after {times[kind][-1]:5.1f} s", flush=True
        )
    return times


def ready(run: RayRun, kind: str) -> set[int]:
    """Processes of a kind that are at work, or wait for it; those that start are not."""
    return set(run.processes(kind)) - set(run.processes(f"{kind}.__init__"))


def wait_for_successor(run: RayRun, kind: str, many: int) -> None:
    run.wait(lambda: len(ready(run, kind)) >= many, f"no successor of {kind}")


def end(run: RayRun, how: str) -> list[str]:
    """What is wrong at the end of the run."""
    wrong = []
    if how == "kill":
        run.driver.kill()
        run.driver.wait(60)
    elif (code := run.end(signal.SIGINT)) != 128 + signal.SIGINT:
        wrong.append(f"the run ended with {code}")
    run.nothing_is_left()
    checkpoints = sorted((run.directory / "checkpoints").glob("step-*"))
    for name, value in (load_file(checkpoints[-1] / "model.safetensors") if checkpoints else {}).items():
        if not torch.isfinite(value).all():
            wrong.append(f"{name} is not finite")
    for least, most in re.findall(r"([\d,]+) are lost \(at most ([\d,]+) can be\)", run.events()):
        if int(least.replace(",", "")) > int(most.replace(",", "")):
            wrong.append(f"{least} updates were lost, more than {most}")
    updates = [record["updates"] for record in run.records()]
    return wrong if updates == sorted(updates) else [*wrong, "updates were counted backwards"]


def report(run: RayRun, times: dict[str, list[float]]) -> None:
    last = run.records()[-1]
    counts = {name: int(value) for name, value in last.items() if name.startswith("gradients_")}
    print(f"{last['steps']:,} steps, {last['updates']:,} updates, score {last['score']}, {counts}")
    for kind, values in times.items():
        median, most = statistics.median(values), max(values)
        print(f"{kind:18} {len(values):3} kills, recovery median {median:5.1f} s, most {most:5.1f} s")


if __name__ == "__main__":
    raise SystemExit(main())
