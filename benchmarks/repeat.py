"""Is a run repeatable on a busy machine? Trains the same command several times while other processes load the cores.

    .venv/bin/python benchmarks/repeat.py --times 5 --load 3 -- a2c --run.seed 7 --run.steps 4000

Prints the SHA-256 of each run's final parameters; exit code 1 if two of them differ.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

BURN = "while True: sum(range(100_000))"
TIMEOUT = 600.0  # seconds for one run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--times", type=int, default=5, help="runs")
    parser.add_argument("--load", type=int, default=3, help="processes that compute beside every second run")
    parser.add_argument("train", nargs="+", help="arguments of `phalanx train`")
    options = parser.parse_args()
    found = [fingerprint(options.train, options.load if number % 2 else 0) for number in range(options.times)]
    for number, digest in enumerate(found):
        print(f"run {number} ({options.load if number % 2 else 0} processes beside it): {digest}")
    print("all alike" if len(set(found)) == 1 else "they differ")
    return int(len(set(found)) > 1)


def fingerprint(arguments: list[str], load: int) -> str:
    """The SHA-256 of the parameters that one run ends with."""
    burners = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(load)]
    try:
        with tempfile.TemporaryDirectory() as directory:
            place = ["--run.directory", directory, "--run.name", "run"]
            command = [sys.executable, "-m", "phalanx", "train", *arguments, *place]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=TIMEOUT)
            newest = max(Path(directory, "run", "checkpoints").glob("step-*"))
            return hashlib.sha256((newest / "model.safetensors").read_bytes()).hexdigest()
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


if __name__ == "__main__":
    sys.exit(main())
