from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phalanx.errors import RunError, UserError
from phalanx.runs.logger import Logger
from phalanx.runs.screen import REQUIRED, Goal, LivePanel, PlainLines, Screen, open_screen


def values(steps: int = 1000, **more: Any) -> dict[str, Any]:
    counts = {"time_s": 2.5, "steps": steps, "frames": 4 * steps, "updates": 12, "episodes": 3, "score": -20.25}
    speed = {"sps": 500.0, "env_share": 0.5, "infer_share": 0.2, "learn_share": 0.1}
    return {**dict.fromkeys(REQUIRED, 0), **counts, **speed, **more}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "pong-1"


Make = Callable[..., Logger]


def make_screen(run: Path, live: bool = False, **goal: Any) -> Screen:
    """Plain lines, or with `live` what a run would show where it is."""
    whole = Goal(run.name, 10_000, 4, **goal)
    return open_screen(whole) if live else PlainLines(whole, sys.stdout)


@pytest.fixture
def make(run: Path) -> Make:
    def build(**options: Any) -> Logger:
        resume = options.pop("resume", False)
        return Logger(run, make_screen(run, **options), resume=resume)

    return build


def records(run: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in (run / "metrics.jsonl").read_text().splitlines()]


class TestMetricsFile:
    def test_each_record_is_a_line_of_json_at_once(self, make: Make, run: Path) -> None:
        with make() as log:
            log.record(values(1000, **{"loss/policy": math.nan, "huge": math.inf, "score": None}))
            log.record(values(2000, a=np.float32(0.5), b=torch.tensor(3), c=np.int64(7), d=np.float64(-math.inf)))
            first, second = records(run)
        assert set(REQUIRED) <= set(first)
        assert (first["steps"], first["loss/policy"], first["huge"], first["score"]) == (1000, None, None, None)
        assert (second["a"], second["b"], second["c"], second["d"]) == (0.5, 3, 7, None)

    def test_a_record_without_a_required_name_is_refused(self, make: Make) -> None:
        record = values()
        del record["lag_max"]
        with make() as log, pytest.raises(ValueError, match="lag_max"):
            log.record(record)

    def test_resume_appends_and_rewind_forgets(self, make: Make, run: Path) -> None:
        with make() as log:
            for steps in (100, 200, 300):
                log.record(values(steps))
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"steps": 2')  # the crash cut this one short
        with make(resume=True) as log:
            assert [record["steps"] for record in records(run)] == [100, 200, 300]
            log.rewind(200)
            assert [record["steps"] for record in records(run)] == [100, 200]
            log.record(values(250))
        assert [record["steps"] for record in records(run)] == [100, 200, 250]
        assert not list(run.glob(".tmp*"))

    def test_a_line_without_an_end_is_not_joined_with_the_next(self, make: Make, run: Path) -> None:
        run.mkdir(parents=True)
        (run / "metrics.jsonl").write_text('{"steps": 1}\n[]\nnonsense\n{"steps": 2}')
        with make(resume=True) as log:
            log.record(values(3))
        assert [record["steps"] for record in records(run)] == [1, 3]

    def test_a_new_run_does_not_touch_an_old_one(self, make: Make, run: Path) -> None:
        with make() as log:
            log.record(values())
        with pytest.raises(UserError, match="exists already"):
            make()
        assert len(records(run)) == 1


def test_tensorboard_groups_and_rewind(make: Make, run: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with make() as log:
        log.record(values(100, **{"loss/policy": 0.25, "eval/score": 3, "best": math.nan}))
        log.record(values(200))
        log.record(values(300))
    with make(resume=True) as log:
        log.rewind(200)
        log.record(values(250, score=1.5))
    reader = accumulator.EventAccumulator(str(run))
    reader.Reload()
    tags = set(reader.Tags()["scalars"])
    assert {"charts/score", "charts/sps", "perf/env_share", "losses/policy", "eval/score"} <= tags
    assert not {"charts/steps", "charts/best"} & tags
    scores = [(event.step, event.value) for event in reader.Scalars("charts/score")]
    assert scores == [(100, -20.25), (200, -20.25), (250, 1.5)]


class TestPlainLines:
    def test_lines_are_aligned_and_greppable(self, make: Make, capsys: pytest.CaptureFixture[str]) -> None:
        with make() as log:
            log.record(values(1000))
            log.record(values(9000, score=None, sps=123456.7, env_share=None))
        first, second = capsys.readouterr().out.splitlines()
        words = dict(word.split("=") for word in first.split())
        assert (words["steps"], words["done"], words["score"], words["sps"]) == ("1000", "10.0%", "-20.25", "500.00")
        assert (words["fps"], words["env"], words["other"], words["left"]) == ("2000", "50%", "20%", "0:00:18")
        assert "score=- " in second and "sps=123457 " in second and "env=0% " in second
        assert [m.start() for m in re.finditer(r"\w+=", first)] == [m.start() for m in re.finditer(r"\w+=", second)]
        assert "\x1b" not in first + second

    def test_events_are_shown_and_kept(self, make: Make, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with make() as log:
            log.event("worker 3 died")
            log.event("two\nlines [bold]ü")
        with make(resume=True) as log:
            log.event("resumed")
        lines = (run / "events.log").read_text(encoding="utf-8").splitlines()
        assert [line.partition(" ")[2] for line in lines] == ["worker 3 died", "two lines [bold]ü", "resumed"]
        assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", line) for line in lines)
        assert "worker 3 died\n" in capsys.readouterr().out

    def test_summary(self, make: Make, capsys: pytest.CaptureFixture[str]) -> None:
        with make() as log:
            log.summary(["score 20", "checkpoint runs/x"])
        assert capsys.readouterr().out == "score 20\ncheckpoint runs/x\n"

    def test_rich_is_not_imported_for_plain_lines(self, run: Path) -> None:
        code = (
            "import sys; from pathlib import Path; from phalanx.runs.logger import Logger\n"
            "from phalanx.runs.screen import REQUIRED, Goal, open_screen\n"
            f"with Logger(Path({str(run)!r}), open_screen(Goal('x', 10))) as log:\n"
            "    log.record(dict.fromkeys(REQUIRED, 1))\n"
            "assert not any(name.split('.')[0] in ('rich', 'tensorboard') for name in sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("steps=1 ")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def open_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Put a terminal in the place of stdout; inside the test, since pytest replaces it after the fixtures."""
    pytest.importorskip("rich")
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    return screen


def text_of(output: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)


def on_a_terminal(output: str, columns: int) -> list[str]:
    """The lines that a terminal shows after that output."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[\??([\d;]*)([A-Za-z])|(.)", output, flags=re.DOTALL):
        count, command, character = int(part[0].split(";")[0] or 1), part[1], part[2]
        if command == "A":
            row = max(0, row - count)
        elif command == "K":
            lines[row] = ""
        elif character == "\r":
            column = 0
        elif character:
            if character == "\n" or column == columns:
                row, column = row + 1, 0
                lines += [""] * (row + 1 - len(lines))
            if character != "\n":
                lines[row] = lines[row][:column].ljust(column) + character + lines[row][column + 1 :]
                column += 1
    return lines[:-1] if lines[-1] == "" else lines


class TestLivePanel:
    def test_panel_shows_everything(self) -> None:
        console = pytest.importorskip("rich.console")
        stream = io.StringIO()
        goal = Goal("pong-1", 10_000, 4, "paac", "cuda:0", target=18.0)
        panel = LivePanel(goal, console.Console(force_terminal=True, file=stream, width=120))
        panel.doing("starting 16 workers")
        panel.doing("")
        more = {"best": 21.0, "loss/policy": 0.12345, "entropy": None}
        panel.show(values(2500, **more, epsilon=0.25, game_steps=1234.4, explained_variance=0.875))
        panel.say("worker [3] died")
        panel.close()
        text = text_of(stream.getvalue())
        for part in (
            *("pong-1", "paac", "cuda:0", "25.0%", "at most 0:00:15 left", "-20.25 (last 100 games)", "best 21.00"),
            *("500.00 steps/s", "2000 frames/s", "3 games", "12 updates", "env 50%", "infer 20%", "learn 10%"),
            *("other 20%", "policy 0.1235", "entropy -", "worker [3] died", "starting 16 workers (0 s)"),
            *("a mean score of 18 or 10,000 steps", "epsilon 0.25", "1,234 steps a game", "explained_variance 0.875"),
        ):
            assert part in text, part
        assert "█" * 12 in text

    def test_a_node_tells_who_works_and_who_waits(self) -> None:
        console = pytest.importorskip("rich.console")
        stream = io.StringIO()
        panel = LivePanel(Goal("x", 10_000), console.Console(force_terminal=True, file=stream, width=120))
        panel.show(values())
        assert "threads" not in text_of(stream.getvalue())
        who = {"agents": 16.0, "predictors": 2.0, "trainers": 3.0}
        waits = {"queue_prediction": 4.2, "held": 5.0, "queue_training": 7.0}
        panel.show(values(**who, **waits, pps=1234.4, batch_fill=6.54, tps=251.2))
        panel.close()
        shown = text_of(stream.getvalue())
        assert "16 agents  2 predictors  3 trainers " in shown and "9 agents and 7 segments wait " in shown
        assert "1,234 predictions/s by 6.5  251 segments/s learnt" in shown

    @pytest.mark.parametrize("columns", [80, 200])
    def test_it_is_as_wide_as_ever_and_fits_80_columns(self, columns: int) -> None:
        """Whatever it has to tell."""
        console = pytest.importorskip("rich.console")
        stream = io.StringIO()
        goal = Goal("a-name-" * 20, 10**15, 4, "eps-rainbow-512 on space_invaders", "cuda:0, bfloat16", 1e9, 18.5)
        panel = LivePanel(goal, console.Console(force_terminal=True, file=stream, width=columns))
        many = {f"loss/number_{index}": 1234.5678 for index in range(20)}
        panel.doing("starting " + "very " * 40 + "slowly")
        panel.show(values(10**14, sps=1e6, best=1e6, updates=10**12, episodes=10**12, lag_mean=1e3, **many))
        panel.close()
        lines = [line for line in text_of(stream.getvalue()).replace("\r", "\n").splitlines() if "│" in line]
        assert len(lines) > 10 and {len(line) for line in lines} == {78}

    def test_it_is_redrawn_while_nothing_happens(self) -> None:
        console = pytest.importorskip("rich.console")
        stream = io.StringIO()
        now = [0.0]
        goal = Goal("x", 10_000, clock=lambda: now[0])
        panel = LivePanel(goal, console.Console(force_terminal=True, file=stream, width=100))
        panel.doing("loading torch")
        now[0] = 7.0
        give_up = time.monotonic() + 20
        while "loading torch (7 s)" not in stream.getvalue() and time.monotonic() < give_up:
            time.sleep(0.05)
        panel.close()
        assert "loading torch (7 s)" in stream.getvalue()

    @pytest.mark.parametrize("echoed", ["", "^C", "^C^C^C"])
    def test_a_ctrl_c_leaves_no_border_behind(self, echoed: str) -> None:
        console = pytest.importorskip("rich.console")
        stream = io.StringIO()
        panel = LivePanel(Goal("x", 10_000), console.Console(force_terminal=True, file=stream, width=80))
        panel.show(values(1))
        stream.write(echoed)  # by the terminal, where its cursor is
        panel.show(values(2))
        stream.write(echoed)
        panel.close()
        stream.write("the end\n")
        shown = on_a_terminal(stream.getvalue(), 80)
        assert sum("╭" in line for line in shown) == sum("╰" in line for line in shown) == 1
        assert "the end" in shown[-1]

    def test_a_run_that_did_not_begin_leaves_nothing(self) -> None:
        console = pytest.importorskip("rich.console")
        stream = io.StringIO()
        panel = LivePanel(Goal("x", 10_000), console.Console(force_terminal=True, file=stream, width=80))
        panel.doing("loading torch")
        panel.close()
        stream.write("phalanx: unknown game\n")
        assert [line for line in on_a_terminal(stream.getvalue(), 80) if line] == ["phalanx: unknown game"]

    def test_a_terminal_gets_the_panel_and_the_cursor_back(self, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        terminal = open_terminal(monkeypatch)
        with make(live=True, preset="ppo") as log:
            log.record(values())
            log.event("worker 3 died")
            log.summary(["the end"])
        output = terminal.getvalue()
        assert "pong-1  ppo" in text_of(output) and "worker 3 died" in output and output.endswith("the end\n")
        assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")
        assert sys.stdout is terminal

    def test_the_cursor_comes_back_after_an_error(self, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        terminal = open_terminal(monkeypatch)
        with pytest.raises(KeyboardInterrupt), make(live=True) as log:
            log.record(values())
            raise KeyboardInterrupt
        output = terminal.getvalue()
        assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")

    @pytest.mark.parametrize("variable", ["dumb", None])
    def test_a_dumb_terminal_gets_lines(
        self, make: Make, monkeypatch: pytest.MonkeyPatch, variable: str | None
    ) -> None:
        terminal = open_terminal(monkeypatch)
        monkeypatch.setenv("TERM", variable) if variable else monkeypatch.delenv("TERM")
        with make(live=True) as log:
            log.record(values())
        assert terminal.getvalue().startswith("steps=1000")

    def test_a_failure_of_drawing_stops_nothing(self, make: Make, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        terminal = open_terminal(monkeypatch)

        def fail(*args: Any) -> None:
            raise ZeroDivisionError("no panel today")

        monkeypatch.setattr(LivePanel, "_panel", fail)
        with make(live=True) as log:
            log.record(values(1))
            log.record(values(2))
        assert len(records(run)) == 2
        output = terminal.getvalue()
        assert "no panel today" in output and "steps=2 " in output
        assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")

    def test_without_rich_there_are_lines(self, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        terminal = open_terminal(monkeypatch)
        monkeypatch.setitem(sys.modules, "rich.live", None)
        with make(live=True) as log:
            log.record(values())
        assert "steps=1000" in terminal.getvalue()

    def test_a_closed_pipe_stops_nothing(self, make: Make, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        class Closed(io.StringIO):
            def write(self, text: str) -> int:
                raise BrokenPipeError

        monkeypatch.setattr(sys, "stdout", Closed())
        with make() as log:
            log.record(values(1))
            log.event("nobody sees this")
            log.record(values(2))
        assert len(records(run)) == 2


class TestGoal:
    def test_seconds_and_steps_end_a_run_whichever_comes_first(self) -> None:
        now = 50.0
        goal = Goal("x", 1000, 1, seconds=100.0, clock=lambda: now)
        now += 25
        assert goal.fraction(values(100)) == 0.25 and goal.left(values(100, sps=1.0)) == 75.0
        assert goal.fraction(values(500)) == 0.5 and goal.left(values(500, sps=10.0)) == 50.0
        now += 100
        assert goal.fraction(values(500)) == 1.0 and goal.left(values(500)) == 0.0

    def test_without_a_speed_nobody_knows(self) -> None:
        assert Goal("x", 1000, 1).left(values(sps=0.0)) is None
        assert Goal("x", 1000, 1).left(values(sps=None)) is None

    def test_every_end_is_told(self) -> None:
        assert Goal("x", 4_000_000, target=18.0).end == "a mean score of 18 or 4,000,000 steps"
        assert Goal("x", 1000, seconds=60.0).end == "1,000 steps or 60 s"


class FullFile:
    """A file on a disk that has become full."""

    def __init__(self, file: Any) -> None:
        file.close()

    def write(self, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def close(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


class TestFullDisk:
    @pytest.mark.parametrize("call", [lambda log: log.record(values()), lambda log: log.event("x")])
    def test_one_sentence(self, make: Make, run: Path, call: Callable[[Logger], None]) -> None:
        log: Any = make()
        log._metrics, log._log = FullFile(log._metrics), FullFile(log._log)
        with pytest.raises(RunError, match="No space left on device") as raised:
            call(log)
        assert str(run) in str(raised.value) and "\n" not in str(raised.value)
        with pytest.raises(RunError):
            log.close()
        log.close()

    def test_events_file(self, make: Make) -> None:
        log: Any = make()
        log._events._file = FullFile(log._events._file)
        with pytest.raises(RunError):
            log.record(values())
        with pytest.raises(RunError):
            log.close()

    def test_rewind(self, make: Make, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with make() as log:
            log.record(values(1))
            with monkeypatch.context() as patch:
                patch.setattr(os, "fsync", full)
                with pytest.raises(RunError):
                    log.rewind(0)
        assert [record["steps"] for record in records(run)] == [1]

    def test_closing_does_not_hide_the_error_under_way(self, make: Make) -> None:
        log: Any = make()
        with pytest.raises(ZeroDivisionError), log:
            log._metrics = FullFile(log._metrics)
            raise ZeroDivisionError

    def test_closing_reports_otherwise(self, make: Make) -> None:
        log: Any = make()
        with pytest.raises(RunError), log:
            log._metrics = FullFile(log._metrics)
