"""Two versions of phalanx in turn on one machine: was speed lost, or won?

    python benchmarks/versions.py BEFORE AFTER --rounds 5 [--only sampling a2c ppo dqn] [--gpu]

BEFORE and AFTER are commits of this repository, or directories that hold a version. A round runs `phalanx bench` of
both, the order changing from round to round; the ratio of a measure is the median over the rounds of AFTER / BEFORE
within a round. On a GPU (`--gpu`) a round is `phalanx bench gpu --only NAME` for each name.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 300.0  # seconds for one `phalanx bench`
CPU_COMMANDS = {
    "sampling": ["sampling"],
    "a2c": ["training", "a2c", "--env.game", "breakout"],
    "ppo": ["training", "pong"],
    "dqn": ["training", "dqn-fast", "--algorithm.learning-starts", "2000"],
}
GPU_NAMES = ("breakout", "a2c", "ppo", "dqn_512")
MEASURES = ("emulator_sps", "sampling_sps", "inference_sps", "training_sps", "ratio")


@contextlib.contextmanager
def tree_of(version: str) -> Iterator[Path]:
    """A directory with that version, its C code compiled."""
    if Path(version).is_dir():
        compile_frames(Path(version))
        yield Path(version).resolve()
        return
    with tempfile.TemporaryDirectory() as place:
        tree = Path(place) / "tree"
        subprocess.run(["git", "-C", ROOT, "worktree", "add", "--detach", "--force", tree, version], check=True)
        try:
            compile_frames(tree)
            yield tree
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", tree], check=True)


def compile_frames(tree: Path) -> None:
    """In place; without a compiler both versions make frames with numpy."""
    if not list((tree / "phalanx/envs").glob("_frames*.so")):
        subprocess.run([sys.executable, "setup.py", "build_ext", "--inplace"], cwd=tree, capture_output=True)
        shutil.rmtree(tree / "build", ignore_errors=True)


def bench(tree: Path, arguments: list[str]) -> dict[str, Any]:
    """What `phalanx bench` of one version measures."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "phalanx", "bench", *arguments, "--json"]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed in {tree}:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    return found


def measures(found: dict[str, Any], name: str) -> dict[str, float]:
    """The speeds of one result; those of `bench gpu` stand under the name of what was measured."""
    values = next((value for key, value in found.items() if isinstance(value, dict) and name in key), found)
    return {key: float(values[key]) for key in MEASURES if key in values}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a window")
    parser.add_argument("--repeats", type=int, default=2, help="windows of one command")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--only", nargs="+")
    options = parser.parse_args()
    lengths = ["--seconds", str(options.seconds), "--repeats", str(options.repeats)]
    commands = {name: ["gpu", "--only", name] for name in GPU_NAMES} if options.gpu else CPU_COMMANDS
    names = options.only or list(commands)
    speeds: dict[tuple[str, str, str], list[float]] = {}
    with tree_of(options.before) as before, tree_of(options.after) as after:
        for number in range(options.rounds):
            versions = [("before", before), ("after", after)]
            for name in names:
                for version, tree in versions if number % 2 else reversed(versions):
                    for measure, value in measures(bench(tree, [*commands[name], *lengths]), name).items():
                        speeds.setdefault((name, measure, version), []).append(value)
            print(f"round {number + 1} of {options.rounds} done", file=sys.stderr, flush=True)
    for name, measure in dict.fromkeys((name, measure) for name, measure, _ in speeds):
        old, new = speeds[name, measure, "before"], speeds[name, measure, "after"]
        ratio = statistics.median(b / a for a, b in zip(old, new, strict=True))
        medians = f"{statistics.median(old):,.2f} -> {statistics.median(new):,.2f}"
        print(f"{name:<10} {measure:<14} {medians:<28} ratio {ratio:.3f}")


if __name__ == "__main__":
    main()
