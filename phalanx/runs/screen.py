"""What people see while a run goes on: on a terminal a panel that is redrawn every second, elsewhere plain lines.

`phalanx train` opens the screen before anything slow is done, so that it says at once what is to run and what is being
done; the logger (`logger.py`) shows each record on it. Drawing may fail without harm to the run.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TextIO

from phalanx.config import Experiment

Values = dict[str, Any]  # of a record: int, float or None, as `metrics.jsonl` holds them

REQUIRED = (
    *("time_s", "steps", "frames", "updates", "version", "episodes", "score", "sps"),
    *("lag_mean", "lag_max", "env_share", "infer_share", "learn_share"),
)
CORES = ("others_share", "core_wait_share")
NODE = ("agents", "predictors", "trainers", "queue_prediction", "held", "queue_training", "batch_fill", "pps", "tps")
ELSEWHERE = {
    *REQUIRED,
    *NODE,
    *CORES,
    "best",
    "game_steps",
    "epsilon",
    "explained_variance",
}  # shown in rows of their own
SHARES = {"env": "cyan", "infer": "green", "learn": "magenta", "other": "bright_black"}
SHOW_CURSOR = "\x1b[?25h"
WIDTH = 78  # of the panel, whatever the terminal's: nothing jumps, and 80 columns are enough
VALUES_WIDTH = WIDTH - 15  # what borders and the names of the rows leave
BAR_WIDTH = 24


@dataclass
class Goal:
    """What the run is and when it ends."""

    run: str  # its directory, or the preset while there is none
    total_steps: int
    frames_per_step: int = 1
    preset: str = ""
    device: str = ""  # and precision
    seconds: float = 0.0  # budget of this session, 0 for none
    target: float | None = None  # score that ends the run
    clock: Callable[[], float] = time.monotonic
    start: float = field(init=False)

    def __post_init__(self) -> None:
        self.start = self.clock()

    def fraction(self, values: Values) -> float:
        """How much of the run is done, by steps or by seconds, whichever is further."""
        by_time = self.gone / self.seconds if self.seconds else 0.0
        return min(1.0, max(float(values["steps"]) / self.total_steps, by_time))

    def left(self, values: Values) -> float | None:
        """Seconds until the run ends, None while nobody knows. A target score may end it sooner."""
        ends = [(self.total_steps - values["steps"]) / values["sps"]] if values["sps"] else []
        if self.seconds:
            ends.append(self.seconds - self.gone)
        return max(0.0, min(ends)) if ends else None

    @property
    def gone(self) -> float:
        """Seconds since the session began."""
        return self.clock() - self.start

    @property
    def end(self) -> str:
        """When the run ends, in words."""
        ends = [] if self.target is None else [f"a mean score of {self.target:g}"]
        ends += [f"{self.total_steps:,} steps"] + ([f"{self.seconds:g} s"] if self.seconds else [])
        return " or ".join(ends)


def goal_of(experiment: Experiment) -> Goal:
    """What is known of a run before anything of it is made."""
    run = experiment.run
    preset = f"{experiment.preset} on {experiment.env.name}"
    return Goal(experiment.preset, run.steps, preset=preset, seconds=run.seconds, target=run.target_score)


class Screen(Protocol):
    """Where people look."""

    goal: Goal  # more of it is filled in as it becomes known
    stream: TextIO  # the standard output, which a panel redirects

    def doing(self, text: str) -> None:
        """What takes a while now; nothing while the run simply goes on."""

    def show(self, values: Values) -> None: ...

    def say(self, text: str) -> None: ...

    def close(self) -> None: ...


class PlainLines:
    """One line per record: aligned, and easy to grep."""

    def __init__(self, goal: Goal, stream: TextIO) -> None:
        self.goal = goal
        self.stream = stream

    def doing(self, text: str) -> None:
        if text:
            self.say(f"{text} ...")

    def show(self, values: Values) -> None:
        words = [
            (f"steps={values['steps']}", 17),
            (f"done={self.goal.fraction(values):.1%}", 12),
            (f"score={number(values['score'])}", 16),
            (f"sps={number(values['sps'])}", 14),
            (f"fps={number(_frames_per_second(values, self.goal))}", 14),
            (f"games={values['episodes']}", 13),
            (f"updates={values['updates']}", 16),
            *([(f"warmup={values['warmup']:.0%}", 12)] if "warmup" in values else []),
            *((f"{stage}={number(share, '.0%')}", 11) for stage, share in _shares(values).items()),
            (f"left={'' if self.goal.target is None else '<'}{_duration(self.goal.left(values))}", 0),
        ]
        self.say(" ".join(word.ljust(width) for word, width in words))

    def say(self, text: str) -> None:
        print(text, file=self.stream, flush=True)

    def close(self) -> None:
        pass


class Silence:
    """Nobody looks: `metrics.jsonl` and `events.log` have it all."""

    def __init__(self, goal: Goal) -> None:
        self.goal = goal
        self.stream: TextIO = open(os.devnull, "w")  # noqa: SIM115  as long as the screen

    def doing(self, text: str) -> None: ...

    def show(self, values: Values) -> None: ...

    def say(self, text: str) -> None: ...

    def close(self) -> None:
        self.stream.close()


class LivePanel:
    """A panel redrawn in place every second; `console` is the terminal unless another one is given."""

    def __init__(self, goal: Goal, console: Any = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self.goal = goal
        self.stream = sys.stdout
        self._values: Values | None = None  # of the newest record,
        self._shown_at = 0.0  # and when it came
        self._doing, self._since = "", goal.clock()
        self._drawn: Any = ""
        self._error: Exception | None = None  # of the thread that redraws, told by whoever draws next
        self._console = console or Console(force_terminal=True)
        self._live = Live(console=self._console, refresh_per_second=1, get_renderable=self._draw)
        self._live.start()

    def doing(self, text: str) -> None:
        self._doing, self._since = text, self.goal.clock()
        self._refresh()

    def show(self, values: Values) -> None:
        self._values, self._shown_at = values, self.goal.clock()
        self._refresh()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._live.transient = self._values is None  # a run that did not begin leaves nothing but its sentence
        self._live.stop()

    def _refresh(self) -> None:
        self._live.refresh()
        if self._error is not None:
            raise self._error

    def _draw(self) -> Any:
        """The panel, with an empty line below it: there the cursor rests, and what is echoed for Ctrl-C moves no
        border."""
        from rich.console import Group

        try:
            self._drawn = Group(self._panel(), "")
        except Exception as error:
            self._error = error
        return self._drawn

    def _panel(self) -> Any:
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        goal, values = self.goal, self._values
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold", no_wrap=True, width=9)
        grid.add_column(width=VALUES_WIDTH, overflow="ellipsis")
        grid.add_row("until", goal.end)
        if values is not None:
            self._add_record(grid, values)
        if self._doing or values is None:
            waited = goal.clock() - self._since
            grid.add_row("now", f"{self._doing or 'waiting for the first record'} ({waited:.0f} s)")
        title = Text("  ".join(word for word in (goal.run, goal.preset, goal.device) if word))
        title.truncate(WIDTH - 6, overflow="ellipsis")
        return Panel(grid, title=title, title_align="left", width=min(WIDTH, self._console.width))

    def _add_record(self, grid: Any, values: Values) -> None:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        goal, done = self.goal, self.goal.fraction(values)
        left = goal.left(values)
        if left is not None and not goal.seconds:  # the record grows older
            left = max(0.0, left - (goal.clock() - self._shown_at))
        most = "" if goal.target is None else "at most "
        progress = Table.grid(padding=(0, 1))
        words = f"{done:.1%}  {_duration(goal.gone)} gone, {most}{_duration(left)} left"
        progress.add_row(ProgressBar(1.0, done, width=BAR_WIDTH - 8), words)
        grid.add_row("progress", progress)
        grid.add_row("score", f"{number(values['score'])} (last 100 games)  best {number(values.get('best'))}")
        frames = number(_frames_per_second(values, goal))
        grid.add_row("speed", f"{number(values['sps'])} steps/s  {frames} frames/s")
        length = f"  {values['game_steps']:,.0f} steps a game" if values.get("game_steps") else ""
        grid.add_row("counts", f"{values['steps']:,} steps  {values['episodes']:,} games{length}")
        lag = f"lag {number(values['lag_mean'])} (max {number(values['lag_max'])})"
        grid.add_row("", f"{values['updates']:,} updates  {lag}")
        if "pps" in values:
            grid.add_row("threads", _node(values))
        grid.add_row("time", _share_bar(values))
        if learning := _learning(values):
            grid.add_row("learning", learning)


def open_screen(goal: Goal) -> Screen:
    """A panel on a terminal that can show one, else plain lines."""
    if _on_terminal():
        with contextlib.suppress(Exception):
            return LivePanel(goal)
    return PlainLines(goal, sys.stdout)


def reopened(broken: Screen, error: Exception) -> Screen:
    """Plain lines in the place of a screen that cannot draw any more."""
    lines = PlainLines(broken.goal, broken.stream)
    with contextlib.suppress(Exception):
        broken.close()
    with contextlib.suppress(Exception):
        if broken.stream.isatty():
            broken.stream.write(SHOW_CURSOR)
        lines.say(f"the screen shows plain lines from here on ({type(error).__name__}: {error})")
    return lines


def _on_terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def _node(values: Values) -> str:
    """Who works in a node of agents, predictors and trainers, who waits, and what is done in a second."""
    who = "  ".join(f"{values[name]:.0f} {name}" for name in ("agents", "predictors", "trainers"))
    waiting = values["queue_prediction"] + values["held"]
    return (
        f"{who}\n{waiting:.0f} agents and {values['queue_training']:.0f} segments wait\n"
        f"{values['pps']:,.0f} predictions/s by {values['batch_fill']:.1f}  {values['tps']:,.0f} segments/s learnt"
    )


def _learning(values: Values) -> str:
    """What the algorithm tells, in words that are not torn between lines."""
    names = [str(name) for name in ("epsilon", "explained_variance") if name in values]
    names += [name for name in values if name not in ELSEWHERE]
    words = [f"{name.removeprefix('loss/')} {number(values[name], '.4g')}" for name in names]
    joined = "  ".join(word.replace(" ", "\N{NO-BREAK SPACE}") for word in words)
    return textwrap.fill(joined, VALUES_WIDTH).replace("\N{NO-BREAK SPACE}", " ")


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


def number(value: float | None, form: str = "") -> str:
    """A number for people: a few digits, `-` where there is none."""
    if value is None or not math.isfinite(value):
        return "-"
    return format(value, form or (".0f" if abs(value) >= 1000 else ".2f"))


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
