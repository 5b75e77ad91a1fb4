"""The directory of a run: made once, written by one process at a time, with the checkpoints in it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from phalanx.config import Experiment
from phalanx.errors import UserError
from phalanx.logs.checkpoint import Checkpoints
from phalanx.stored import save


def new_directory(experiment: Experiment) -> Path:
    """A fresh run directory; an existing one is refused, never overwritten."""
    run = experiment.run
    environment = experiment.env.name.replace("/", "-")
    directory = Path(run.directory) / (
        run.name or f"{experiment.preset}-{environment}-{run.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    )
    try:
        directory.mkdir(parents=True)
    except FileExistsError:
        raise UserError(
            f"run {directory} exists already; choose another --run.name, or continue it: phalanx resume {directory}"
        ) from None
    except OSError as error:
        reason = error.strerror
        raise UserError(f"cannot make the run directory {directory}: {reason}; choose --run.directory") from None
    save(experiment, directory / "config.json")
    return directory


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Only one process at a time may write to a run; the lock goes with the process, however it ends."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(f"run {directory} is being written by another process; stop that one first") from None
    except OSError:
        pass  # a file system without locks
    try:
        yield
    finally:
        os.close(descriptor)


def run_checkpoints(experiment: Experiment, directory: Path, report: Callable[[str], None]) -> Checkpoints:
    return Checkpoints(directory / "checkpoints", experiment.run.keep_checkpoints, report)
