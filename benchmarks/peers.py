"""phalanx beside its peers, in one go on this machine: `make bench`, about 25 minutes; `--quick` takes about 6.

    plan:  contenders in groups, each with the settings it may choose from
    scout: short runs find the best setting of each contender
    rounds: every contender once per round, so that noise hits all alike; the median of the rounds counts

Each measurement runs in a process of its own (`contenders.py`, `ourselves.py`), so that threads, core affinity and the
settings phalanx makes for torch do not leak. A peer that is missing or fails is listed with the reason. Tables are
printed as Markdown, everything goes to `--json FILE`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "numpy", "ale-py", "gymnasium", "envpool", "stable-baselines3")
STARTUP = 120.0  # seconds a measurement may take beyond its warm-up and window
QUIET_LOAD = 0.5
OURS = ("emulator", "sample_phalanx", "train_phalanx")
Settings = dict[str, Any]


@dataclass
class Window:
    """Seconds of warm-up and of measurement."""

    warmup: float
    seconds: float


@dataclass
class Contender:
    """A library in a group of comparable ones, and what was measured of it."""

    group: str
    name: str
    function: str
    choices: list[Settings]
    window: Window
    settings: Settings = field(default_factory=dict)  # the best of the choices
    scouted: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    failure: str = ""

    @property
    def sps(self) -> float:
        return statistics.median(sample["sps"] for sample in self.samples)


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["sampling", "training"], help="one of the two parts")
    parser.add_argument("--game", default="breakout", help="Atari game")
    parser.add_argument("--repeats", type=int, default=3, help="rounds; the median counts")
    parser.add_argument("--quick", action="store_true", help="one round, short windows: a rough picture")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    options = parser.parse_args()
    repeats = 1 if options.quick else options.repeats
    machine, start = describe_machine(), time.perf_counter()
    contenders = []
    if options.only != "training":
        contenders += sampling_plan()
    if options.only != "sampling":
        contenders += training_plan()
    if options.quick:
        for contender in contenders:
            contender.window = Window(contender.window.warmup / 2, contender.window.seconds / 2)
    for contender in contenders:
        choose_settings(contender, options.game, Window(0.5, 1.0) if options.quick else Window(1.0, 3.0))
    for number in range(repeats):
        for contender in contenders:
            take_sample(contender, options.game, f"round {number + 1} of {repeats}")
    print(report(contenders, machine, options.game, repeats, time.perf_counter() - start))
    if options.json:
        record = {**vars(options), "json": None, "machine": machine, "contenders": [asdict(c) for c in contenders]}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def sampling_plan() -> list[Contender]:
    """Random actions, no network."""
    window = Window(2.0, 5.0)
    sizes = (64, 96, 128)  # with 16 every one of them was slower
    ours = [{"envs": n, "groups": g} for n in sizes for g in (1, 2)]
    batched = [{"envs": n, "batch": b} for n in sizes for b in (n, n // 2)]
    plan = [Contender("sampling", "emulator limit", "emulator", [{}], window)]
    for frame in ("84x84", "104x80"):
        group = f"sampling, {frame}"
        # phalanx takes the mean of 2x2 pixels for 104x80, so EnvPool may use its cheaper, bilinear way there
        resize = {} if frame == "84x84" else {"use_inter_area_resize": False}
        pools = [{"frame": frame, **choice, **resize} for choice in batched]
        plan += [
            Contender(group, "phalanx", "sample_phalanx", [{"frame": frame, **choice} for choice in ours], window),
            Contender(group, "EnvPool", "sample_envpool", pools, window),
            Contender(
                group,
                "ale_py AtariVectorEnv",
                "sample_ale_vector",
                [{"frame": frame, **choice} for choice in batched],
                window,
            ),
        ]
    group = "sampling, 84x84"
    plan += [
        Contender(group, "Stable-Baselines3 SubprocVecEnv", "sample_sb3", [{"envs": 16}], window),
        Contender(group, "Gymnasium AsyncVectorEnv", "sample_gymnasium", [{"envs": 16}], window),
    ]
    return plan


def training_plan() -> list[Contender]:
    """Equal network, environments, batches and updates; DQN learns from a batch of 32 for every 4 steps."""
    plan = []
    for algorithm, envs, title, window in (
        ("a2c", 16, "A2C 16 x 5", Window(2.0, 8.0)),
        ("ppo", 8, "PPO 8 x 128, 4 epochs of 4 minibatches", Window(4.0, 10.0)),
        ("dqn", 1, "DQN, 1 environment", Window(2.0, 8.0)),
        ("dqn", 8, "DQN, 8 environments", Window(2.0, 8.0)),
    ):
        work = {"algorithm": algorithm, "envs": envs}
        plan.append(Contender(title, "Stable-Baselines3", "train_sb3", [work], window))
        for topology, precision in (("serial", "float32"), ("synchronous", "float32"), ("synchronous", "bfloat16")):
            if envs == 1 and topology == "synchronous":
                continue  # a worker process for a single environment only adds a hop
            choice = {**work, "topology": topology, "precision": precision}
            plan.append(Contender(title, f"phalanx {topology} {precision}", "train_phalanx", [choice], window))
    return plan


def choose_settings(contender: Contender, game: str, window: Window) -> None:
    """Try each choice briefly and keep the fastest."""
    if len(contender.choices) == 1:
        contender.settings = contender.choices[0]
        return
    for choice in contender.choices:
        result = measure(contender.function, {"game": game, **choice}, window)
        progress(f"scouting {contender.group}: {contender.name} {describe(choice)}", result)
        contender.scouted.append({**choice, **result})
    working = [scouted for scouted in contender.scouted if "sps" in scouted]
    if not working:
        contender.failure = contender.scouted[0]["failure"]
        return
    best = max(working, key=lambda scouted: scouted["sps"])
    contender.settings = contender.choices[contender.scouted.index(best)]


def take_sample(contender: Contender, game: str, round_name: str) -> None:
    """One measurement of a contender that has not failed."""
    if contender.failure:
        return
    result = measure(contender.function, {"game": game, **contender.settings}, contender.window)
    progress(f"{round_name}, {contender.group}: {contender.name}", result)
    if "sps" in result:
        contender.samples.append(result)
    else:
        contender.failure = result["failure"]


def measure(function: str, settings: Settings, window: Window) -> dict[str, Any]:
    """The result of a contender's function in a new process, or {"failure": reason}."""
    script = "ourselves.py" if function in OURS else "contenders.py"
    arguments = json.dumps({**settings, **asdict(window)})
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "benchmarks" / script), function, arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,  # its children can then be ended with it
    )
    limit = window.warmup + window.seconds + STARTUP
    try:
        output, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        return {"failure": f"no result after {limit:.0f} s"}
    finally:
        end_session(process.pid)
    if process.returncode == 0:
        return dict(json.loads(output.strip().splitlines()[-1]))
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return {"failure": lines[-1] if lines else f"exit status {process.returncode}"}


def end_session(leader: int) -> None:
    """End what a measurement may have left running."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def report(contenders: list[Contender], machine: dict[str, Any], game: str, repeats: int, passed: float) -> str:
    """All tables as Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    quiet = "a quiet machine" if machine["quiet"] else "NOT A QUIET MACHINE, rough numbers"
    parts = [
        f"Agent steps per second on {game}, median of {repeats} round(s), {passed / 60:.1f} minutes in all.  \n"
        f"{machine['cpu']}, {machine['cores']} cores, GPU: {machine['gpu']}; load before the start "
        f"{machine['load']:.1f}: {quiet}.  \nPython {machine['python']}, {versions}."
    ]
    limit = next((c for c in contenders if c.function == "emulator" and c.samples), None)
    for group in dict.fromkeys(contender.group for contender in contenders):
        members = [contender for contender in contenders if contender.group == group]
        reference = (
            limit if group.startswith("sampling") else next((c for c in members if c.function == "train_sb3"), None)
        )
        parts.append(f"### {group}\n\n{table(members, reference)}\n{verdict(members)}")
    return "\n\n".join(part.rstrip() for part in parts)


def table(members: list[Contender], reference: Contender | None) -> str:
    """One row for each contender; the ratio is to the reference."""
    against = reference if reference is not None and reference.samples else None
    lines = [
        f"| | setting | steps/s | lowest to highest | x {against.name if against else '-'} |",
        "|---|---|--:|--:|--:|",
    ]
    for member in members:
        if not member.samples:
            lines.append(f"| {member.name} | {describe(member.settings)} | - | {member.failure} | - |")
            continue
        values = sorted(sample["sps"] for sample in member.samples)
        ratio = f"{member.sps / against.sps:.2f}" if against else "-"
        spread = f"{values[0]:,.0f} to {values[-1]:,.0f}" + (f"; then {member.failure}" if member.failure else "")
        lines.append(f"| {member.name} | {describe(member.settings)} | {member.sps:,.0f} | {spread} | {ratio} |")
    return "\n".join(lines)


def verdict(members: list[Contender]) -> str:
    """The fastest phalanx against the fastest peer, and whether all did the same work."""
    ours = [member for member in members if "phalanx" in member.function and member.samples]
    peers = [member for member in members if "phalanx" not in member.function and member.samples]
    if not ours or not peers:
        return ""
    best, rival = max(ours, key=lambda c: c.sps), max(peers, key=lambda c: c.sps)
    sentence = f"\nFastest phalanx / fastest peer ({rival.name}): {best.sps / rival.sps:.2f}"
    work = {(c.samples[0].get("parameters"), c.samples[0].get("steps_per_update")) for c in (*ours, *peers)}
    if len(work) > 1:
        return f"{sentence}\nNOT THE SAME WORK (parameters, steps per update): {sorted(work)}"
    parameters, steps = work.pop()
    return sentence if parameters is None else f"{sentence}; all: {parameters:,} parameters, {steps:g} steps per update"


def describe(settings: Settings) -> str:
    """Settings in a table cell; the frame size, the algorithm and the way it runs are in the title and the name."""
    told = ("frame", "algorithm", "topology", "precision")
    return ", ".join(f"{name} {value}" for name, value in settings.items() if name not in told)


def describe_machine() -> dict[str, Any]:
    """Where the numbers come from; asked before anything runs."""
    load, versions = os.getloadavg()[0], {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "missing"
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    gpu = subprocess.run(
        ["sh", "-c", "nvidia-smi --query-gpu=name --format=csv,noheader"], capture_output=True, text=True
    )
    return {
        "cpu": models[0].split(":")[1].strip() if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": gpu.stdout.strip() or "none",
        "python": platform.python_version(),
        "versions": versions,
        "load": load,
        "quiet": load < QUIET_LOAD,
    }


def progress(what: str, result: dict[str, Any]) -> None:
    outcome = f"{result['sps']:,.0f} steps/s" if "sps" in result else f"failed: {result['failure']}"
    print(f"{what}: {outcome}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
