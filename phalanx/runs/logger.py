"""The record of a run: metrics.jsonl, events.log and TensorBoard events; `screen.py` shows it.

The session calls `record` every few seconds and `event` when something happens. Drawing may fail without harm; a record
that cannot be kept stops the run.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from phalanx.errors import RunError, UserError
from phalanx.files import NotPlainError, open_new, open_plain, open_to_append
from phalanx.runs.events import EventWriter
from phalanx.runs.screen import REQUIRED, PlainLines, Screen, reopened
from phalanx.runs.trackers import Trackers


class MovedError(RunError):
    """The run directory is no longer where it was; `place` is where it is now, None if it is gone."""

    def __init__(self, sentence: str, place: Path | None) -> None:
        super().__init__(sentence)
        self.place = place


class Logger:
    """Keeps the records of one run and shows them; a context manager that always gives the terminal back."""

    def __init__(
        self, run_directory: Path, screen: Screen, resume: bool = False, trackers: Trackers | None = None
    ) -> None:
        self._directory = run_directory
        self._trackers = trackers
        self._metrics_path = run_directory / "metrics.jsonl"
        if not resume and os.path.lexists(self._metrics_path):
            raise UserError(f"{self._metrics_path} exists already; resume that run or choose another run.name")
        with self._disk():
            run_directory.mkdir(parents=True, exist_ok=True)
            self._place = os.open(run_directory, os.O_RDONLY | os.O_CLOEXEC)  # knows the directory wherever it goes
            if os.path.lexists(self._metrics_path):
                self._keep_records(math.inf)  # a crash may have left half a line at the end
            self._metrics = open_to_append(self._metrics_path)
            self._log = open_to_append(run_directory / "events.log", encoding="utf-8", errors="replace")
            self._events = EventWriter(run_directory)
        self._screen = screen
        self._closed = False

    def record(self, values: dict[str, Any]) -> dict[str, Any]:
        """Keep one record and show it; every name in REQUIRED must be there, more are welcome. What was kept of it."""
        missing = [name for name in REQUIRED if name not in values]
        if missing:
            raise ValueError(f"a log record lacks {', '.join(missing)}")
        plain = {name: _plain(value) for name, value in values.items()}
        scalars = {_tag(name): value for name, value in plain.items() if value is not None and name != "steps"}
        self.require_place()
        with self._disk():
            self._metrics.write(json.dumps(plain, allow_nan=False) + "\n")
            self._events.scalars(values["steps"], time.time(), scalars)
            self._events.flush()
        self._draw(lambda: self._screen.show(plain))
        for sentence in self._trackers.record(plain) if self._trackers else []:
            self.event(sentence)
        return plain

    def require_place(self) -> None:
        """Raise MovedError if the directory's name does not lead to the directory any more: files that are open would
        take records as before, but those to come would be somewhere else."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(self._directory), os.fstat(self._place)):
                return
        name = f"the run directory {self._directory}"
        with contextlib.suppress(OSError):
            place = Path(os.readlink(f"/proc/self/fd/{self._place}"))
            if os.path.samestat(os.stat(place), os.fstat(self._place)):
                raise MovedError(f"{name} was moved to {place} while the run went on", place)
        raise MovedError(f"{name} was removed while the run went on; start it again", None)

    def rewind(self, steps: int) -> None:
        """Forget the records after `steps`: the run goes on from a checkpoint that old."""
        with self._disk():
            self._metrics.close()
            self._keep_records(steps)
            self._metrics = open_to_append(self._metrics_path)
            self._events.restart(steps + 1, time.time())
            self._events.flush()

    def event(self, text: str) -> None:
        """Keep and show a sentence about something that happened, such as the death of a worker."""
        self.note(text)
        self._draw(lambda: self._screen.say(text))

    def note(self, text: str) -> None:
        """Keep a sentence in events.log that is shown in another way."""
        with self._disk():
            self._log.write(event_line(text))

    def doing(self, text: str) -> None:
        """Show what takes a while now."""
        self._draw(lambda: self._screen.doing(text))

    def summary(self, lines: list[str]) -> None:
        """Show the last words of a run, below the panel."""
        self._draw(self._screen.close)
        self._screen = PlainLines(self._screen.goal, self._screen.stream)
        self._draw(lambda: self._screen.say("\n".join(lines)))

    def close(self) -> None:
        """Give the terminal back and close the files."""
        if self._closed:
            return
        self._closed = True
        try:
            for sentence in self._trackers.close() if self._trackers else []:
                self.event(sentence)
        finally:
            self._close()

    def _close(self) -> None:
        self._draw(self._screen.close)
        with self._disk(), contextlib.ExitStack() as stack:
            stack.callback(os.close, self._place)
            for file in (self._metrics, self._log, self._events):
                stack.callback(file.close)

    def __enter__(self) -> Logger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except RunError:
            if error is None:  # an error that is under way must not be hidden by one of closing
                raise

    def _keep_records(self, steps: float) -> None:
        """Rewrite metrics.jsonl without records after `steps` and without lines that are not whole."""
        temporary = self._metrics_path.with_name(".tmp-metrics.jsonl")
        source = os.fdopen(open_plain(self._metrics_path), errors="replace")
        with source, open_new(temporary) as target:
            target.writelines(line for line in source if _steps_of(line) <= steps)
            target.flush()
            os.fsync(target.fileno())
        os.replace(temporary, self._metrics_path)

    @contextlib.contextmanager
    def _disk(self) -> Iterator[None]:
        """Turn a failure of the disk into the end of the run, in one sentence."""
        try:
            yield
        except NotPlainError as error:
            raise UserError(f"{error.filename} is not a plain file; remove it and resume the run") from None
        except OSError as error:
            raise RunError(
                f"cannot write the logs in {self._directory} ({error.strerror or error}); "
                "make room there and resume the run"
            ) from error

    def _draw(self, draw: Callable[[], None]) -> None:
        """Draw, and go over to plain lines should that fail: a run must not stop because of its screen."""
        try:
            draw()
        except Exception as error:
            self._screen = reopened(self._screen, error)


def event_line(text: str) -> str:
    """A line of events.log."""
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {' '.join(text.split())}\n"


def _plain(value: Any) -> int | float | None:
    """A number as JSON can hold it; None for what is not finite."""
    if value is None or isinstance(value, int):
        return value
    number = value.item() if hasattr(value, "item") else float(value)
    return number if math.isfinite(number) else None


def _steps_of(line: str) -> float:
    """The steps of a line of metrics.jsonl; not a number, which is beyond any limit, if it is not whole."""
    try:
        return float(json.loads(line)["steps"]) if line.endswith("\n") else math.nan
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return math.nan


def _tag(name: str) -> str:
    """The name of a metric in TensorBoard, where the part before the slash makes a group."""
    if name.endswith("_share"):
        return f"perf/{name}"
    if name.startswith("loss/"):
        return f"losses/{name.removeprefix('loss/')}"
    return name if "/" in name else f"charts/{name}"
