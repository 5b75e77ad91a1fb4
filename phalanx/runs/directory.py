"""The directory of a run: made once, written by one process at a time, with the checkpoints in it."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import itertools
import os
import shlex
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from phalanx.config import Experiment
from phalanx.config.code import with_whole_paths
from phalanx.config.stored import save
from phalanx.errors import UserError, tell
from phalanx.files import remove
from phalanx.runs.checkpoint import Checkpoints
from phalanx.runs.origin import gpu_name, origin
from phalanx.runtime.device import choose_compute
from phalanx.types import Progress

OWN_FILES = ("config.json", "metrics.jsonl", "events.log", "not-finite.safetensors", "checkpoints")
OWN_PREFIXES = (".tmp-", "events.out.tfevents.")
SLOT = {"env", "idle", "requests", "fresh"}  # what the state of an environment's slot has at least
FEW_RECORDS = 1 << 16  # bytes of metrics.jsonl: more are of a run whose checkpoints were taken away


def new_directory(experiment: Experiment, report: Callable[[str], None] = tell) -> Path:
    """A fresh run directory, or that of a run which ended before its first checkpoint; any other that exists is
    refused, never overwritten."""
    run = experiment.run
    directory = Path(run.directory) / (run.name or unused_name(experiment))
    made: list[Path] = []
    try:
        for parent in reversed(directory.parents):
            if not parent.exists():
                parent.mkdir(exist_ok=True)
                made.append(parent)
        if os.path.lexists(directory):
            _take_over(directory, report)
        else:
            directory.mkdir()
        made.append(directory)
        save(with_whole_paths(experiment), directory / "config.json", origin(gpu_name(choose_compute(run).device)))
    except BaseException as error:
        _unmake(made)
        if not isinstance(error, OSError):
            raise
        reason = error.strerror
        raise UserError(f"cannot make the run directory {directory}: {reason}; choose --run.directory") from None
    return directory


def unused_name(experiment: Experiment) -> str:
    """For a run that was given none: of preset, environment, seed and time, and a number where a run began in the same
    second."""
    run, environment = experiment.run, experiment.env.name.replace("/", "-")
    name = f"{experiment.preset}-{environment}-{run.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(name for name in names if not os.path.lexists(Path(run.directory) / name))


def _unmake(made: list[Path]) -> None:
    """Leave no empty directories behind, such as those of a run whose disk is full."""
    with contextlib.suppress(OSError):  # one that is not empty stays, and what it lies in
        for path in reversed(made):
            path.rmdir()


def _take_over(directory: Path, report: Callable[[str], None]) -> None:
    """Make the directory of a run that has no checkpoint, and that nobody writes, as good as new."""
    if not directory.is_dir() or not _never_saved(directory):
        quoted = shlex.quote(str(directory))
        raise UserError(
            f"run {directory} exists already; choose another --run.name, or continue it: phalanx resume {quoted}"
        )
    try:
        with locked(directory, surely=True):
            for path in directory.iterdir():
                if path.name in OWN_FILES or path.name.startswith(OWN_PREFIXES):
                    remove(path)
    except OSError as error:
        raise UserError(
            f"run {directory} exists already and cannot be started again ({error.strerror}); choose another --run.name"
        ) from None
    report(f"run {directory} ended before its first checkpoint; it starts again, and nothing of it is kept")


def _never_saved(directory: Path) -> bool:
    """Was a run begun here that did not come to its first checkpoint?"""
    with contextlib.suppress(OSError):
        checkpoints, records = directory / "checkpoints", directory / "metrics.jsonl"
        begun = stat.S_ISREG((directory / "config.json").lstat().st_mode)
        few = not os.path.lexists(records) or records.lstat().st_size <= FEW_RECORDS
        held = checkpoints.iterdir() if os.path.lexists(checkpoints) else iter(())
        return begun and few and all(path.name.startswith(".tmp-") for path in held)
    return False


@contextlib.contextmanager
def locked(directory: Path, surely: bool = False) -> Iterator[None]:
    """Only one process at a time may write to a run; the lock goes with the process, however it ends. Where a file
    system has no locks it is hoped for, unless it must be held `surely`."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(f"run {directory} is being written by another process; stop that one first") from None
    except OSError:  # a file system without locks
        if surely:
            os.close(descriptor)
            raise
    try:
        yield
    finally:
        os.close(descriptor)


def run_checkpoints(experiment: Experiment, directory: Path, report: Callable[[str], None]) -> Checkpoints:
    environments = experiment.sampler.environments
    return Checkpoints(
        directory / "checkpoints",
        experiment.run.keep_checkpoints,
        report,
        lambda state: check_state(state, environments),
    )


def check_state(state: Any, environments: int) -> None:
    """Refuse, with a ValueError or what a wrong type raises, a state that cannot be one of a session's."""
    scores, seconds, clocks = state["scores"], state["time_s"], state["clocks"]
    if not isinstance(state["store"], dict):
        raise ValueError("store is not a dict")
    names = {field.name for field in dataclasses.fields(Progress)}
    if set(clocks) != names or not all(_is_count(value) for value in clocks.values()):
        raise ValueError("clocks does not hold the clocks of a run")
    if not state["replicas"]:
        raise ValueError("replicas is empty")
    for replica in state["replicas"]:
        _check_replica(replica, environments // len(state["replicas"]))
    numbers = [seconds, *scores["scores"], *([] if scores["best"] is None else [scores["best"]])]
    if not _is_count(scores["count"]) or not all(type(value) in (int, float) for value in numbers):
        raise ValueError("scores or time_s are not numbers")


def _check_replica(replica: Any, environments: int) -> None:
    for name in ("learner", "experience"):
        if not isinstance(replica[name], dict):
            raise ValueError(f"replicas.{name} is not a dict")
    sampling = replica["sampling"]
    if sampling is None:
        return
    slots = sampling["envs"]["slots"]
    if not isinstance(sampling["collector"], dict) or not _is_count(sampling["envs"].get("births", 0)):
        raise ValueError("replicas.sampling has values of other types")
    whole = all(set(slot) >= SLOT and _is_count(slot.get("incarnation", 0)) for slot in slots)
    if len(slots) != environments or not whole:
        raise ValueError(f"replicas.sampling does not hold {environments} environments")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63
