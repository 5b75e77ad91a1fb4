"""A new user's first minutes: a wheel, an empty environment outside the tree, and the README's commands in it.

    make check-install              or: .venv/bin/python benchmarks/install_check.py [--keep DIR]

Builds the wheel and looks into it, installs it beside PyTorch with the versions of constraints.txt, and runs there the
README's commands and Python, with small budgets. It prints the footprint, and how long `import phalanx` and `--help`
take. Anything that fails ends it with exit code 1. It needs a package index, or a directory of wheels, for pip.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = re.search(r"^torch==\S+", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
README = (ROOT / "README.md").read_text()
BUDGETS = {"resume": ("--run.steps", "2000"), "play": ("--max-frames", "50"), "eval": (), "export": (), "plan": ()}
ATARI = ("--run.steps", "1", "--sampler.decorrelation", "10")
BESIDES = (
    ("--version",),
    ("--help",),
    ("presets",),
    ("train", "ppo", "--help"),
    ("eval", "runs/NAME", "--games", "5", "--json"),
    ("play", "runs/NAME", "--video", "play.gif", "--max-frames", "50"),
    ("eval", "package", "--games", "5"),
    ("bench", "training", "a2c-catch", "--seconds", "0.2", "--repeats", "1"),
    ("completion", "bash"),
)
"""What the README's blocks do not show."""
PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt"))
OFTEN = 5  # a time is the median of so many


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="where to make the environment, which then stays")
    options = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="phalanx-install-")) if options.keep is None else options.keep.resolve()
    try:
        wheel = built(place)
        look_into(wheel)
        python = installed(place, wheel)
        footprint(place, wheel, python)
        commands(place, python)
    finally:
        if options.keep is None:
            shutil.rmtree(place, ignore_errors=True)
    print("everything works")


def built(place: Path) -> Path:
    """The wheel, from a copy of what git knows, so that nothing that lies in the tree gets into it by chance."""
    source = place / "source"
    source.mkdir(parents=True, exist_ok=True)
    files = run(["git", "ls-files", "-co", "--exclude-standard", "-z"], ROOT).split("\0")
    for name in filter(None, files):
        if (ROOT / name).is_file() and not name.startswith("papers/"):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, source / name)
    run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(place), str(source)], place)
    (wheel,) = place.glob("phalanx-*.whl")
    return wheel


def look_into(wheel: Path) -> None:
    """The wheel has what is needed, and no more."""
    names = zipfile.ZipFile(wheel).namelist()
    for wanted in (r"phalanx/py\.typed", r"phalanx/envs/frames\.c", r"phalanx/envs/_frames.*\.so"):
        require(any(re.fullmatch(wanted, name) for name in names), f"{wanted} is not in the wheel")
    strangers = [name for name in names if not name.startswith("phalanx") or re.search(r"(^|/)tests?[_/]", name)]
    require(not strangers, f"the wheel holds {strangers}")
    print(f"wheel              {wheel.name}, {wheel.stat().st_size / 1e3:,.0f} kB, {len(names)} files")


def installed(place: Path, wheel: Path) -> Path:
    """The Python of a new environment with the wheel in it."""
    run([sys.executable, "-m", "venv", str(place / "venv")], place)
    python = place / "venv/bin/python"
    require(TORCH is not None, "constraints.txt does not say which torch")
    run([str(python), *PIP, TORCH.group() if TORCH else "torch"], place)
    run([str(python), *PIP, str(wheel)], place)
    return python


def footprint(place: Path, wheel: Path, python: Path) -> None:
    listed = json.loads(run([str(python), "-m", "pip", "list", "--format", "json"], place))
    packages = [each["name"] for each in listed if each["name"] not in ("pip", "setuptools")]
    (site,) = (place / "venv/lib").glob("python*/site-packages")
    sizes = {path.name: size(path) for path in site.iterdir() if not path.name.startswith(("pip", "setuptools"))}
    largest = sorted(sizes, key=lambda name: -sizes[name])[:5]
    print(f"packages           {len(packages)}: {', '.join(packages)}")
    print(f"bytes              {sum(sizes.values()) / 1e9:.2f} GB, of which", end=" ")
    print(", ".join(f"{name} {sizes[name] / 1e6:,.0f} MB" for name in largest))
    spent = "import time; t = time.perf_counter(); import phalanx; print(time.perf_counter() - t)"
    imports = [float(run([str(python), "-c", spent], place)) for _ in range(OFTEN)]
    print(f"import phalanx     {statistics.median(imports) * 1e3:.1f} ms")
    helps = [timed([str(place / "venv/bin/phalanx"), "--help"], place) for _ in range(OFTEN)]
    print(f"phalanx --help     {statistics.median(helps):.2f} s")


def commands(place: Path, python: Path) -> None:
    """Each command of a new user, in an empty directory."""
    work = place / "work"
    work.mkdir()
    for command in (*readme_commands(), *BESIDES):
        begin = time.perf_counter()
        run([str(python.parent / "phalanx"), *command], work)
        print(f"{time.perf_counter() - begin:6.1f} s           phalanx {' '.join(command)}", flush=True)
    for program in readme_programs():
        run([str(python), "-c", program], work)
    where = run([str(python), "-c", "import phalanx; print(phalanx.__file__)"], work)
    require(where.startswith(str(place)), f"phalanx was imported from {where}")


def readme_commands() -> list[tuple[str, ...]]:
    """The commands of the README's blocks with small budgets; the run that its others name is one of Gymnasium."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    lines = [line for _, text in blocks for line in text.splitlines() if line.startswith("phalanx ")]
    found = []
    for line in lines:
        name, what, *flags = shlex.split(line.removeprefix("phalanx "), comments=True)
        if name == "train":
            budget = ("--run.steps", "1000", "--run.name", "NAME") if what.endswith("-gym") else ATARI
        else:
            budget = BUDGETS[name]
        games = ("--games", "2") if name in ("eval", "export") else ()
        found.append((name, what, *flags, *budget, *games))  # of a flag that is there twice, the last one counts
    return found


def readme_programs() -> list[str]:
    """The README's Python with small budgets."""
    programs = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    return [re.sub(r"\b\d+_000\b", "500", program).replace("games=30", "games=3") for program in programs]


def size(path: Path) -> int:
    """Bytes of a file, or of all files in a directory."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file() and not file.is_symlink())


def timed(command: list[str], place: Path) -> float:
    begin = time.perf_counter()
    run(command, place)
    return time.perf_counter() - begin


def run(command: list[str], place: Path) -> str:
    """What a command prints; its failure ends everything."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=900)
    require(done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def require(condition: bool, sentence: str) -> None:
    if not condition:
        sys.exit(f"install_check: {sentence}")


if __name__ == "__main__":
    main()
