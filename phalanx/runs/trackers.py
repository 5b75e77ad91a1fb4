"""Experiment trackers of others, wandb and trackio, as `--run.loggers` names them: each gets every record of a run.

    Logger --record--> Trackers --socket--> a process for each tracker --> wandb, trackio

A tracker has a process of its own, so that a run never waits for it: neither for its packages, nor for its threads, nor
for a network. One that fails, or that takes nothing any more, is mentioned once and let go, and the run goes on.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from phalanx.errors import RunError, in_words
from phalanx.runtime.channel import send
from phalanx.runtime.child import Child, Parent, ParentGone

PROJECT = "phalanx"
PATIENCE = 20.0  # seconds that a run waits in the end for what its trackers still have to write or to upload
BLOCKED = 0.2  # seconds that a tracker may keep a run waiting which hands it a record


@dataclass(frozen=True)
class Order:
    """What a tracker is told of the run before its first record."""

    tracker: str
    directory: Path
    config: dict[str, Any]  # plain values of the experiment
    resumed: bool


class Trackers:
    """Those of one run."""

    def __init__(self, names: tuple[str, ...], directory: Path, config: dict[str, Any], resumed: bool) -> None:
        self._trackers: list[_Tracker] = []
        self._told: list[str] = []
        for name in dict.fromkeys(names):
            try:
                self._trackers.append(_Tracker(Order(name, directory, config, resumed)))
            except OSError as error:  # no process, or no descriptor, is left for it
                self._told.append(left_out(name, in_words(error)))

    def record(self, values: dict[str, Any]) -> list[str]:
        """Hand each of them a record; what there is to tell of them."""
        told, self._told = self._told, []
        told += [sentence for tracker in self._trackers for sentence in tracker.record(values)]
        self._trackers = [tracker for tracker in self._trackers if not tracker.lost]
        return told

    def close(self) -> list[str]:
        """Let them finish, within limits; what there is to tell of them."""
        trackers, self._trackers = self._trackers, []
        try:
            for tracker in trackers:
                tracker.say_goodbye()
            end = time.monotonic() + PATIENCE
            return [sentence for tracker in trackers for sentence in tracker.wait(end - time.monotonic())]
        finally:
            for tracker in trackers:
                tracker.end()


class _Tracker:
    """One of them, as the run sees it."""

    def __init__(self, order: Order) -> None:
        self.name = order.tracker
        self.lost = False
        self._child = Child(self.name)
        with open(os.devnull, "wb") as nowhere:  # they print much, and would print it over the panel
            self._child.start("phalanx.runs.trackers:serve", order, output=nowhere.fileno())
        assert self._child.control is not None
        self._control: socket.socket = self._child.control
        self._control.settimeout(BLOCKED)

    def record(self, values: dict[str, Any]) -> Iterator[str]:
        yield from self._heard()
        if self.lost:
            return
        try:
            send(self._control, values)
        except OSError:  # its end of the socket is full, or closed
            yield from self._heard()
            if not self.lost:
                yield self._lose("it takes no records any more")

    def say_goodbye(self) -> None:
        """No record comes any more; what it has to say of that may still come back."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)

    def wait(self, seconds: float) -> Iterator[str]:
        """For its end."""
        assert self._child.process is not None
        try:
            self._child.process.wait(max(0.01, seconds))
        except subprocess.TimeoutExpired:
            yield self._lose(f"it did not finish within {PATIENCE:g} s")
        yield from self._heard()

    def end(self) -> None:
        if self._child.process is not None and self._child.process.poll() is None:
            with contextlib.suppress(RunError):  # it hangs in the system, and dies as soon as it does not
                self._child.kill()
        self._child.release()

    def _heard(self) -> Iterator[str]:
        """What it said since it was asked last, up to its last words."""
        while not self.lost and select.select([self._control], [], [], 0)[0]:
            message = self._child.hear()
            if isinstance(message, tuple) and message[0] == "at":
                yield f"{self.name}: {message[1]}"
                continue
            assert self._child.process is not None
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.process.wait(BLOCKED)
            if self._child.traceback or self._child.process.poll() != 0:
                yield self._lose(self._child.last_words().strip().rpartition("\n")[2])
            return

    def _lose(self, reason: str) -> str:
        self.lost = True
        self.end()
        return left_out(self.name, reason)


def left_out(name: str, reason: str) -> str:
    return f"the logger {name} is left out from here on ({reason}); the run is not affected"


def serve(order: Order, parent: Parent) -> None:
    """The process of a tracker."""
    place, log, finish = BEGIN[order.tracker](import_module(order.tracker), order)
    if place:
        parent.tell(("at", place))
    with contextlib.suppress(ParentGone):
        while True:
            values = parent.hear()
            log({name: value for name, value in values.items() if value is not None})
    finish()


Begun = tuple[str, Callable[[dict[str, Any]], Any], Callable[[], Any]]
"""Where people find it, what takes a record, and what ends it."""


def begin_wandb(wandb: Any, order: Order) -> Begun:
    """A run of wandb; offline if WANDB_MODE says so. A resumed run goes on in the one that it began."""
    settings = wandb.Settings(console="off", silent=True, disable_code=True)
    wandb.setup(settings)
    if os.environ.get("WANDB_MODE", "online") == "online" and not wandb.login(prompt=False):
        raise RuntimeError("nobody is logged in: run `wandb login`, or set WANDB_MODE=offline")
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=order.directory.resolve().name,
        dir=order.directory,
        config=order.config,
        id=wandb_id(order.directory) if order.resumed else None,
        resume="allow",
        settings=settings,
    )
    # A resumed run may go back by some steps, which wandb's own count of steps never does.
    run.define_metric("steps")
    run.define_metric("*", step_metric="steps")
    offline = order.directory / "wandb" / Path(run.dir).parent.name
    return run.url or f"offline, for `wandb sync {offline}`", run.log, run.finish


def wandb_id(directory: Path) -> str | None:
    """By which wandb knows the run: the end of the names of its directories, of which the newest counts."""
    names = [path.name.partition("run-")[2] for path in (directory / "wandb").glob("*run-*-*")]
    return max(names).rpartition("-")[2] if names else None


def begin_trackio(trackio: Any, order: Order) -> Begun:
    """A run of trackio, on this machine unless its own environment variables name a Space."""
    resume = "allow" if order.resumed else "never"
    run = trackio.init(project=PROJECT, name=order.directory.resolve().name, config=order.config, resume=resume)
    return f"trackio show --project {PROJECT}", lambda values: run.log(values, step=values["steps"]), trackio.finish


BEGIN: dict[str, Callable[[Any, Order], Begun]] = {"wandb": begin_wandb, "trackio": begin_trackio}
