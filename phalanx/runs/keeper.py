"""The keeper of a session: it writes the checkpoints of a run, in time, in the background and in need."""

from __future__ import annotations

import contextlib
import math
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from phalanx.config import Experiment, GA3CConfig, RunConfig
from phalanx.errors import NotFinite, RunError
from phalanx.files import remove
from phalanx.replica.report import Snapshot, Source
from phalanx.runs.background import BackgroundWriter
from phalanx.runs.checkpoint import Checkpoints
from phalanx.types import Progress

FIRST_CHECKPOINT_SECONDS = 10.0  # after which a run that is killed can be resumed, however rare checkpoints are


class Keeper:
    """Writes snapshots of a source, together with what the session remembers (`memory`), as checkpoints."""

    def __init__(
        self,
        run: RunConfig,
        directory: Path,
        checkpoints: Checkpoints,
        memory: Callable[[], dict[str, Any]],
        score: Callable[[], float | None],
        event: Callable[[str], None],
        resumed: bool,
    ) -> None:
        self.run = run
        self.directory = directory
        self.checkpoints = checkpoints
        self.memory = memory
        self.score = score
        self.event = event
        self.background = BackgroundWriter(checkpoints)
        self.has_checkpoint = resumed  # is there one to resume from?
        self.saving = False  # is one being written in this thread?
        self.must_not_be_torn = False  # would an interruption lose what is being written?
        self.due = False  # one is to be written as soon as nothing is under way
        self.last = (time.perf_counter(), 0)  # when the last one was begun, and its updates
        self.saved = Progress()  # what the last one holds

    @property
    def writing(self) -> bool:
        """Is a checkpoint being written, in whatever thread?"""
        return self.saving or self.background.busy

    def begin(self, progress: Progress) -> None:
        self.last = (time.perf_counter(), progress.updates)

    def look(self, source: Source, progress: Progress, require_place: Callable[[], None]) -> None:
        """Write a checkpoint if one is due and nothing is under way, into a run directory that must still be there;
        what failed in the background is raised."""
        if self.background.failure is not None:
            self.background.finish()
        began, updates = self.last
        every = self.run.checkpoint_updates
        by_updates = bool(every) and progress.updates - updates >= every
        wait = self.run.checkpoint_every
        wait = wait if self.has_checkpoint else min(wait, FIRST_CHECKPOINT_SECONDS)
        by_time = time.perf_counter() - began >= wait
        self.due = (by_updates or by_time) and not self.background.busy
        if self.due and source.quiescent:  # if not, it will be after the next iteration
            require_place()
            self.write(source)
            self.due = False

    def write(self, source: Source, with_envs: bool = True, last: bool = False) -> Path | None:
        """Write the whole state of the run. One with a replay memory is written in the background, unless it is the
        last."""
        snapshot = source.snapshot(with_envs)
        progress, saver = snapshot.clocks, snapshot.saver
        if not finite(snapshot.weights):
            raise RunError(
                f"the parameters are not finite after update {progress.updates}, so they are not saved; resume from "
                f"the checkpoint before, with a lower optimizer.learning_rate"
            )
        contents = (snapshot.weights, {**as_state(snapshot), **self.memory()}, progress.steps, self.score())
        self.last, self.has_checkpoint = (time.perf_counter(), progress.updates), True
        self.saved = progress
        if saver is not None and not last:
            self.background.write(*contents, saver)
            return None
        self.saving = self.must_not_be_torn = True
        try:
            self._finish_earlier()
            return self.checkpoints.write(*contents, saver)
        finally:
            self.saving, self.must_not_be_torn = False, last  # after the last one only the end is left
            if saver is not None:
                saver.release()

    def _finish_earlier(self) -> None:
        """Wait for the checkpoint in the background. Should it have failed, the last one may still succeed."""
        try:
            self.background.finish()
        except Exception as failure:
            if self.background.busy:
                raise
            self.event(f"an earlier checkpoint could not be written: {failure}")

    def save_in_need(self, source: Source) -> bool:
        """The last checkpoint of a run that an error ends. Was it written? A full disk, or a device that is gone, must
        not hide the error."""
        try:
            self.write(source, with_envs=False, last=True)
        except Exception:
            return False
        return True

    def save_elsewhere(self, source: Source, place: Path) -> str:
        """Write the last checkpoint where the run directory is now; what to do next, in words."""
        self.checkpoints.directory = place / "checkpoints"
        saved = self.save_in_need(source)
        return (
            f"{'continue it' if saved else 'its newest checkpoint is kept'}: phalanx resume {shlex.quote(str(place))}"
        )

    def save_evidence(self, source: Source, error: NotFinite) -> str:
        """Keep the batch that was not finite, and a checkpoint of the parameters before it; what was kept, in words."""
        path = self.directory / "not-finite.safetensors"
        tensors = {name: value for name, value in vars(error.batch).items() if isinstance(value, torch.Tensor)}
        try:
            remove(path)  # it may be a link to anywhere
            save_file({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, path)
            batch = f"the batch is in {path}"
        except (OSError, SafetensorError) as failure:
            batch = f"the batch could not be kept ({failure})"
        if not finite(source.weights()):
            with contextlib.suppress(RunError):
                self.background.finish()  # one that is being written is an earlier one
            return f"{batch}, the parameters are lost: resume from an earlier checkpoint"
        kept = "are kept" if self.save_in_need(source) else "could not be kept"
        return f"{batch}, the last good parameters {kept}"


def as_state(snapshot: Snapshot) -> dict[str, Any]:
    """A snapshot as a checkpoint's state, without the weights, which have a file of their own."""
    return {"clocks": dict(vars(snapshot.clocks)), "store": snapshot.store, "replicas": snapshot.replicas}


def as_snapshot(weights: dict[str, torch.Tensor], state: dict[str, Any]) -> Snapshot:
    """What `as_state` was given."""
    return Snapshot(weights, Progress(**state["clocks"]), state["store"], state["replicas"])


def holds_games(experiment: Experiment, replica: dict[str, Any]) -> bool:
    """Are there games in the state of a replica, or of a node, that the experiment goes on with?"""
    topology, sampler = experiment.topology, experiment.sampler
    if not isinstance(topology, GA3CConfig):
        return replica["sampling"] is not None
    games = (replica.get("node") or {}).get("games")
    if games is None:
        return False
    each = sampler.environments // topology.agents
    is_of_this_size = games["open"]["columns"]["reward"].shape == (topology.places * each, sampler.horizon)
    return is_of_this_size and not len(games["agents"]["slots"]) % each


def finite(weights: dict[str, torch.Tensor]) -> bool:
    return all(math.isfinite(float(tensor.double().sum())) for tensor in weights.values())
