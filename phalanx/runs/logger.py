"""The record of a run: metrics.jsonl, events.log, TensorBoard events, and what people see while it runs.

The topology calls `record` every few seconds and `event` when something happens. On a terminal a panel is redrawn in
place; elsewhere each record is one plain line. Drawing may fail without harm; a record that cannot be kept stops the
run.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TextIO

from phalanx.errors import RunError, UserError
from phalanx.files import NotPlainError, open_new, open_plain, open_to_append
from phalanx.runs.events import EventWriter

Values = dict[str, Any]  # of a record: int, float or None once `_plain` has seen it

REQUIRED = (
    *("time_s", "steps", "frames", "updates", "version", "episodes", "score", "sps"),
    *("lag_mean", "lag_max", "env_share", "infer_share", "learn_share"),
)
SHARES = {"env": "cyan", "infer": "green", "learn": "magenta", "other": "bright_black"}
SHOW_CURSOR = "\x1b[?25h"
BAR_WIDTH = 40


class MovedError(RunError):
    """The run directory is no longer where it was; `place` is where it is now, None if it is gone."""

    def __init__(self, sentence: str, place: Path | None) -> None:
        super().__init__(sentence)
        self.place = place


@dataclass
class Goal:
    """What the run is and when it ends, for the screen."""

    run: str
    total_steps: int
    frames_per_step: int
    preset: str = ""
    device: str = ""
    seconds: float = 0.0  # budget of this session, 0 for none
    clock: Callable[[], float] = time.monotonic
    start: float = field(init=False)

    def __post_init__(self) -> None:
        self.start = self.clock()

    def fraction(self, values: Values) -> float:
        """How much of the run is done, by steps or by seconds, whichever is further."""
        by_time = (self.clock() - self.start) / self.seconds if self.seconds else 0.0
        return min(1.0, max(float(values["steps"]) / self.total_steps, by_time))

    def left(self, values: Values) -> float | None:
        """Seconds until the run ends, None while nobody knows."""
        ends = [(self.total_steps - values["steps"]) / values["sps"]] if values["sps"] else []
        if self.seconds:
            ends.append(self.seconds - (self.clock() - self.start))
        return max(0.0, min(ends)) if ends else None


class Screen(Protocol):
    """Where people look."""

    def show(self, values: Values) -> None: ...

    def say(self, text: str) -> None: ...

    def close(self) -> None: ...


class PlainLines:
    """One line per record: aligned, and easy to grep."""

    def __init__(self, goal: Goal, stream: TextIO) -> None:
        self._goal = goal
        self._stream = stream

    def show(self, values: Values) -> None:
        words = [
            (f"steps={values['steps']}", 17),
            (f"done={self._goal.fraction(values):.1%}", 12),
            (f"score={_number(values['score'])}", 16),
            (f"sps={_number(values['sps'])}", 14),
            (f"fps={_number(_frames_per_second(values, self._goal))}", 14),
            (f"games={values['episodes']}", 13),
            (f"updates={values['updates']}", 16),
            *([(f"warmup={values['warmup']:.0%}", 12)] if "warmup" in values else []),
            *((f"{stage}={_number(share, '.0%')}", 11) for stage, share in _shares(values).items()),
            (f"left={_duration(self._goal.left(values))}", 0),
        ]
        self.say(" ".join(word.ljust(width) for word, width in words))

    def say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        pass


class LivePanel:
    """A panel redrawn in place with each record; `console` is the terminal unless another one is given."""

    def __init__(self, goal: Goal, console: Any = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._goal = goal
        # No refresh thread: a panel changes only when there is a record.
        self._live = Live(console=console or Console(force_terminal=True), auto_refresh=False)
        self._live.start()

    def show(self, values: Values) -> None:
        self._live.update(self._panel(values), refresh=True)

    def say(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._live.stop()

    def _panel(self, values: Values) -> Any:
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        goal, done = self._goal, self._goal.fraction(values)
        progress = Table.grid(padding=(0, 1))
        progress.add_row(ProgressBar(1.0, done, width=BAR_WIDTH), f"{done:.1%}", f"{_duration(goal.left(values))} left")
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold", no_wrap=True)
        grid.add_row("progress", progress)
        grid.add_row("score", f"{_number(values['score'])} (last 100 games)  best {_number(values.get('best'))}")
        frames = _number(_frames_per_second(values, goal))
        grid.add_row("speed", f"{_number(values['sps'])} steps/s  {frames} frames/s")
        grid.add_row(
            "counts",
            f"{values['steps']:,} of {goal.total_steps:,} steps  {values['episodes']:,} games  "
            f"{values['updates']:,} updates  lag {_number(values['lag_mean'])} (max {_number(values['lag_max'])})",
        )
        grid.add_row("time goes to", _share_bar(values))
        extras = {name: value for name, value in values.items() if name not in REQUIRED and name != "best"}
        if extras:
            grid.add_row("learning", "  ".join(f"{_short(name)} {_number(v, '.4g')}" for name, v in extras.items()))
        title = Text("  ".join(word for word in (goal.run, goal.preset, goal.device) if word))
        return Panel(grid, title=title, title_align="left", expand=False)


class Logger:
    """Keeps the records of one run and shows them; a context manager that always gives the terminal back."""

    def __init__(
        self,
        run_directory: Path,
        total_steps: int,
        frames_per_step: int,
        live: bool | None = None,
        resume: bool = False,
        *,
        preset: str = "",
        device: str = "",
        seconds: float = 0.0,
    ) -> None:
        self._directory = run_directory
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
        self._goal = Goal(run_directory.resolve().name, total_steps, frames_per_step, preset, device, seconds)
        self._stdout = sys.stdout  # kept, since the panel redirects what others print
        self._screen: Screen = PlainLines(self._goal, self._stdout)
        self._closed = False
        if _on_terminal() if live is None else live:
            self._draw(self._go_live)

    def record(self, values: dict[str, Any]) -> None:
        """Keep one record and show it; every name in REQUIRED must be there, more are welcome."""
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

    def summary(self, lines: list[str]) -> None:
        """Show the last words of a run, below the panel."""
        self._draw(self._screen.close)
        self._screen = PlainLines(self._goal, self._stdout)
        self._draw(lambda: self._screen.say("\n".join(lines)))

    def close(self) -> None:
        """Give the terminal back and close the files."""
        if self._closed:
            return
        self._closed = True
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

    def _go_live(self) -> None:
        self._screen = LivePanel(self._goal)

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
            broken, self._screen = self._screen, PlainLines(self._goal, self._stdout)
            with contextlib.suppress(Exception):
                broken.close()
            with contextlib.suppress(Exception):
                if self._stdout.isatty():
                    self._stdout.write(SHOW_CURSOR)
                self._screen.say(f"the screen shows plain lines from here on ({type(error).__name__}: {error})")


def event_line(text: str) -> str:
    """A line of events.log."""
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {' '.join(text.split())}\n"


def _on_terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


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


def _shares(values: Values) -> dict[str, float]:
    """Where the time goes; unknown shares count as zero."""
    shares = {stage: values[f"{stage}_share"] or 0.0 for stage in ("env", "infer", "learn")}
    return {**shares, "other": max(0.0, 1.0 - sum(shares.values()))}


def _share_bar(values: Values) -> Any:
    from rich.text import Text

    bar, legend = Text(), Text("  ")
    for stage, share in _shares(values).items():
        bar.append("█" * round(share * BAR_WIDTH), SHARES[stage])
        legend.append(f"{stage} {share:.0%} ", SHARES[stage])
    return bar + legend


def _frames_per_second(values: Values, goal: Goal) -> float | None:
    return None if values["sps"] is None else values["sps"] * goal.frames_per_step


def _number(value: float | None, form: str = "") -> str:
    """A number for people: a few digits, `-` where there is none."""
    if value is None:
        return "-"
    return format(value, form or (".0f" if abs(value) >= 1000 else ".2f"))


def _short(name: str) -> str:
    return name.removeprefix("loss/")


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
