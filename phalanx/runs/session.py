"""A session: one sitting of a run. It owns the run directory, the budget, the logs, the checkpoints and the signals.

Topologies hand it a replica; they know nothing of files or terminals.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from phalanx.config import DQNConfig, Experiment
from phalanx.config.stored import save
from phalanx.errors import NotFinite, RunError, UserError
from phalanx.files import open_to_append, remove
from phalanx.registry import make_evaluation_policy
from phalanx.replay.experience import FRAMES_ON_HOST, Replay, replay_bytes
from phalanx.replica.replica import Replica
from phalanx.runs.background import BackgroundWriter
from phalanx.runs.checkpoint import MALFORMED, Checkpoints, Loaded, in_one_line
from phalanx.runs.logger import Logger, MovedError, event_line
from phalanx.runs.metrics import ScoreWindow
from phalanx.runtime.device import Compute
from phalanx.runtime.signals import Interrupted, StopSignals
from phalanx.runtime.watchdog import Watchdog
from phalanx.sampling.evaluator import evaluate
from phalanx.sampling.processes import ProcessEnvs
from phalanx.types import EnvSpec

FIRST_CHECKPOINT_SECONDS = 10.0  # after which a run that is killed can be resumed, however rare checkpoints are
SILENT_SECONDS = 600.0  # within which something must happen on a GPU, besides what a worker may take for a step


class Session:
    """The record and the end of a run."""

    def __init__(
        self,
        experiment: Experiment,
        directory: Path,
        checkpoints: Checkpoints,
        resume: Loaded | None = None,
        early: ProcessEnvs | None = None,
    ) -> None:
        self.experiment = experiment
        self.directory = directory
        self.checkpoints = checkpoints
        self.background = BackgroundWriter(checkpoints)
        self.loaded = resume
        self.early = early  # workers that were started before
        self.scores = ScoreWindow(100)
        self.stop_reason = ""
        self.checkpoint_due = False
        self.saved = resume is not None  # is there a checkpoint to resume from?
        self.events = 0
        self.saving = False  # a checkpoint in this thread,
        self.writing = False  # which no signal may tear
        self.stop = StopSignals(self._leave, lambda: self.writing)
        self.watchdog = Watchdog(self._pulse, lambda: self.saving or self.background.busy, self._last_words)
        self.began = time.perf_counter()
        self.time_before = 0.0  # seconds of earlier sessions
        self.logger: Logger
        self.replica: Replica
        self.compute: Compute

    def train(self, replica: Replica) -> None:
        """The loop of every topology with one replica, and its end, while the environments are still there."""
        self.start(replica)
        try:
            while self.goes_on() or not replica.settled:
                replica.iterate(early=not (self.stop_reason or self.checkpoint_due))
                self.after_iteration()
            self._finish(with_envs=True)
        except Interrupted:
            self.stop.calm()  # the first signal's clock still runs, if there were two
            self.stop_reason = f"stopped by {self.stop.name}"
            self._finish(with_envs=False)
        except NotFinite as error:
            raise NotFinite(f"{error}; {self._save_evidence(error)}", None) from None
        except MovedError as error:
            raise RunError(f"{error}; {self._save_elsewhere(error.place)}" if error.place else str(error)) from None
        except Exception:
            self._save_in_need()
            raise

    def event(self, sentence: str) -> None:
        """Something worth telling: a line on the screen and in events.log."""
        self.events += 1
        self.logger.event(sentence)

    def start(self, replica: Replica) -> None:
        """Take over a fresh replica: restore it if the run is resumed, and begin to log."""
        run, spec = self.experiment.run, replica.envs.spec
        self.replica, self.compute = replica, replica.compute
        self.logger = self._open_logger(spec)
        self.event(self._first_line())
        if self.loaded is not None:
            self._restore(self.loaded)
            self.logger.rewind(replica.progress.steps)
            save(self.experiment, self.directory / "config.json")  # flags may have changed it
        now = time.perf_counter()
        self.last_record = (now, replica.progress.steps)
        self.last_checkpoint = (now, replica.progress.updates)
        self.next_evaluation = (replica.progress.steps // run.eval_every + 1) * run.eval_every if run.eval_every else 0
        replica.timing.reset()
        self._announce_warm_up()
        if self.compute.device.type != "cpu":  # which may take as long as it likes
            self.watchdog.silence = SILENT_SECONDS + self.experiment.sampler.step_timeout

    def _restore(self, loaded: Loaded) -> None:
        """Go on from a checkpoint, or from an older one if it proves to be none of this run."""
        try:
            self.replica.restore(loaded.weights, loaded.state["replica"], loaded.path)
            self.scores.restore(loaded.state["scores"])
            self.time_before = loaded.state["time_s"]
        except (UserError, OSError, RuntimeError, *MALFORMED) as error:
            reason = f"the checkpoint {loaded.path} cannot be restored ({in_one_line(error)})"
            self.checkpoints.give_up(loaded.path, reason)
            try:
                self.loaded = self.checkpoints.load_another()
            except UserError:
                raise UserError(f"{reason}, nor can another; start the run anew") from None
            self._restore(self.loaded)

    def goes_on(self) -> bool:
        """Is there budget left? Notes why not, with a record: what is under way may still end and change the score."""
        if not self.stop_reason:
            self._look_for_the_end()
            if self.stop_reason:
                self._record_the_rest()
        return not self.stop_reason

    def _look_for_the_end(self) -> None:
        run, progress, score = self.experiment.run, self.replica.progress, self._score()
        if self.stop.number is not None:
            self.stop_reason = f"stopped by {self.stop.name}"
        elif progress.steps >= run.steps:
            self.stop_reason = f"{run.steps:,} steps done"
        elif run.seconds and time.perf_counter() - self.began >= run.seconds:
            self.stop_reason = f"{run.seconds:g} seconds are over"
        elif run.target_score is not None and score is not None and score >= run.target_score:
            self.stop_reason = f"target score {run.target_score:g} reached"

    def after_iteration(self) -> None:
        """Take in finished games; log, evaluate and write a checkpoint when due."""
        run, progress = self.experiment.run, self.replica.progress
        scores = self.replica.collector.take_scores()
        progress.episodes += self.scores.add(np.array(scores))
        if self.background.failure is not None:
            self.background.finish()
        now = time.perf_counter()
        if self.next_evaluation and progress.steps >= self.next_evaluation:
            self.next_evaluation = (progress.steps // run.eval_every + 1) * run.eval_every
            self._evaluate()
        elif now - self.last_record[0] >= run.log_every:
            self.record()
        written_at, written_updates = self.last_checkpoint
        due = run.checkpoint_updates and progress.updates - written_updates >= run.checkpoint_updates
        wait = run.checkpoint_every if self.saved else min(run.checkpoint_every, FIRST_CHECKPOINT_SECONDS)
        self.checkpoint_due = bool(due or now - written_at >= wait) and not self.background.busy
        if self.checkpoint_due and self.replica.settled:  # if not, it will be after the next iteration
            self.checkpoint()
            self.checkpoint_due = False

    def record(self, extra: dict[str, Any] | None = None) -> None:
        """One line in metrics.jsonl and on the screen."""
        replica, progress = self.replica, self.replica.progress
        now = time.perf_counter()
        then, steps_then = self.last_record
        self.last_record = (now, progress.steps)
        frames = replica.envs.spec.frames_per_step
        shares = replica.timing.shares()
        replica.timing.reset()
        self.logger.record(
            {
                "time_s": round(self.time_s, 3),
                "steps": progress.steps,
                "frames": progress.steps * frames,
                "updates": progress.updates,
                "version": progress.version,
                "episodes": progress.episodes,
                "score": self.scores.mean,
                "best": self.scores.best,
                "sps": (progress.steps - steps_then) / max(now - then, 1e-9),
                "lag_mean": float(replica.lag),
                "lag_max": replica.lag,
                "env_share": shares["env"],
                "infer_share": shares["infer"],
                "learn_share": shares["learn"],
                "learning_rate": replica.learner.learning_rate(progress),
                **self._warm_up(),
                **replica.learner.take_metrics(),
                **(extra or {}),
            }
        )

    def checkpoint(self, with_envs: bool = True, last: bool = False) -> Path | None:
        """Write the whole state of the run. One with a replay memory is written in the background, unless it is the
        last."""
        if not last:
            self.logger.require_place()
        # the state first: it waits for updates that may still be under way on the device after an interruption
        state = {
            "replica": self.replica.state(with_envs),
            "scores": self.scores.state(),
            "time_s": self.time_s,
        }
        progress, weights = self.replica.progress, self.replica.weights()
        if not finite(weights):
            raise RunError(
                f"the parameters are not finite after update {progress.updates}, so they are not saved; resume from "
                f"the checkpoint before, with a lower optimizer.learning_rate"
            )
        contents = (weights, state, progress.steps, self._score())
        self.last_checkpoint, self.saved = (time.perf_counter(), progress.updates), True
        saver = self.replica.experience.saver()
        if saver is not None and not last:
            self.background.write(*contents, saver)
            return None
        self.saving = self.writing = True
        try:
            self._finish_earlier()
            return self.checkpoints.write(*contents, saver)
        finally:
            self.saving, self.writing = False, last  # after the last one only the end is left
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

    def run(self, topology: Callable[[Experiment, Session], None]) -> int:
        """Run a topology to its end, whatever that is; the exit code."""
        try:
            with self.stop:
                self._run(topology)
        except Exception as error:
            foreseen = isinstance(error, UserError | RunError)
            self._note(str(error) if foreseen else f"{type(error).__name__}: {error}")
            raise
        finally:
            if hasattr(self, "logger"):
                self.logger.close()
        return self.stop.exit_code

    def _run(self, topology: Callable[[Experiment, Session], None]) -> None:
        try:
            with self.watchdog:
                topology(self._adapted(), self)
        except Interrupted:  # before the first step, or a third signal
            if hasattr(self, "logger"):
                self.event("stopped at once; what the newest checkpoint holds is kept")
            else:
                self._note(f"stopped by {self.stop.name} before the first step")
        except RunError:
            if self.stop.number is None or hasattr(self, "replica"):
                raise  # else the signal reached workers that were about to start
            self._note(f"stopped by {self.stop.name} before the first step")

    def _note(self, sentence: str) -> None:
        """Keep the sentence that ends the run in events.log, if the disk lets it."""
        with contextlib.suppress(OSError, RunError):
            if hasattr(self, "logger"):
                self.logger.note(sentence)
            else:
                with open_to_append(self.directory / "events.log", errors="replace") as log:
                    log.write(event_line(sentence))

    def _adapted(self) -> Experiment:
        """The experiment for the topology: one resumed without its environments must not play its first games again,
        and restored environments need not be decorrelated first."""
        loaded, run = self.loaded, self.experiment.run
        if loaded is None or loaded.steps == 0:
            return self.experiment
        if loaded.state["replica"]["sampling"] is not None:
            sampler = dataclasses.replace(self.experiment.sampler, decorrelation=0)
            return dataclasses.replace(self.experiment, sampler=sampler)
        seed = np.random.SeedSequence(run.seed, spawn_key=(loaded.steps,)).generate_state(1)
        return dataclasses.replace(self.experiment, run=dataclasses.replace(run, seed=int(seed[0])))

    @property
    def time_s(self) -> float:
        return self.time_before + time.perf_counter() - self.began

    def _record_the_rest(self) -> None:
        if self.replica.progress.steps > self.last_record[1]:
            self.record()

    def _finish(self, with_envs: bool) -> None:
        self._record_the_rest()
        self.logger.require_place()
        path = self.checkpoint(with_envs, last=True)
        progress = self.replica.progress
        score = "no game finished" if self.scores.mean is None else f"{self.scores.mean:.2f}"
        end, run = f"{self.stop_reason} after {self.time_s:.0f} s", shlex.quote(str(self.directory))
        self._note(f"{end}; the checkpoint is {path}")
        self.logger.summary(
            [
                end,
                f"steps {progress.steps:,}  updates {progress.updates:,}  games {progress.episodes:,}",
                f"mean score of the last {min(self.scores.count, 100)} games: {score}",
                f"checkpoint: {path}",
                f"next: phalanx eval {run} | phalanx play {run} --video play.mp4 | phalanx resume {run}",
            ]
        )

    def _save_evidence(self, error: NotFinite) -> str:
        """Keep the batch that was not finite, and a checkpoint of the parameters before it; what was kept, in words."""
        path = self.directory / "not-finite.safetensors"
        tensors = {name: value for name, value in vars(error.batch).items() if isinstance(value, torch.Tensor)}
        try:
            remove(path)  # it may be a link to anywhere
            save_file({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, path)
            batch = f"the batch is in {path}"
        except (OSError, SafetensorError) as failure:
            batch = f"the batch could not be kept ({failure})"
        if not finite(self.replica.weights()):
            with contextlib.suppress(RunError):
                self.background.finish()  # one that is being written is an earlier one
            return f"{batch}, the parameters are lost: resume from an earlier checkpoint"
        kept = "are kept" if self._save_in_need() else "could not be kept"
        return f"{batch}, the last good parameters {kept}"

    def _save_elsewhere(self, place: Path) -> str:
        """Write the last checkpoint where the run directory is now; what to do next, in words."""
        self.checkpoints.directory = place / "checkpoints"
        saved = self._save_in_need()
        return (
            f"{'continue it' if saved else 'its newest checkpoint is kept'}: phalanx resume {shlex.quote(str(place))}"
        )

    def _save_in_need(self) -> bool:
        """The last checkpoint of a run that an error ends. Was it written? A full disk, or a device that is gone, must
        not hide the error."""
        try:
            self.checkpoint(with_envs=False, last=True)
        except Exception:
            return False
        return True

    def _evaluate(self) -> None:
        run, replica = self.experiment.run, self.replica
        policy = make_evaluation_policy(self.experiment, replica.model, self.compute)
        with self.watchdog.patient():
            scores = evaluate(self.experiment.env, policy, self.compute, run.eval_games, run.seed, replica.progress)
        self.record({"eval/score": sum(scores) / len(scores), "eval/games": len(scores)})

    def _open_logger(self, spec: EnvSpec) -> Logger:
        run = self.experiment.run
        return Logger(
            self.directory,
            run.steps,
            spec.frames_per_step,
            resume=self.loaded is not None,
            preset=f"{self.experiment.preset} on {self.experiment.env.name}",
            device=str(self.compute.device),
            seconds=run.seconds,
        )

    def _first_line(self) -> str:
        """What runs, and with which choices that were left to phalanx."""
        algorithm = type(self.experiment.algorithm).__name__.removesuffix("Config")
        precision = "bfloat16" if self.compute.bfloat16 else "float32"
        seed = self.experiment.run.seed
        return f"{algorithm} on {self.experiment.env.name}, {self.compute.device}, {precision}, seed {seed}"

    def _announce_warm_up(self) -> None:
        """Say what the replay memory takes and when learning will start."""
        replay, spec, algorithm = self.replica.experience, self.replica.envs.spec.seen, self.experiment.algorithm
        if not (isinstance(replay, Replay) and isinstance(algorithm, DQNConfig)):
            return
        memory = replay_bytes(algorithm, spec, replay.storage.environments)
        sentence = f"the replay memory of {replay.storage.rows:,} steps takes up to {memory / 1e9:.2f} GB"
        if replay.storage.frames_on_host:
            sentence += f"; its {FRAMES_ON_HOST}"
        if missing := self._missing_steps():
            sentence += f"; learning {'starts' if self.loaded is None else 'goes on'} after {missing:,} steps"
        self.event(sentence)

    def _warm_up(self) -> dict[str, float]:
        """How far the memory is filled before learning starts, or goes on if the run is resumed without it."""
        algorithm, missing = self.experiment.algorithm, self._missing_steps()
        if not isinstance(algorithm, DQNConfig) or not missing:
            return {}
        return {"warmup": (algorithm.learning_starts - missing) / algorithm.learning_starts}

    def _missing_steps(self) -> int:
        """Steps to be collected before the memory is learnt from."""
        algorithm, memory = self.experiment.algorithm, self.replica.experience
        if not isinstance(algorithm, DQNConfig) or not isinstance(memory, Replay):
            return 0
        starts = algorithm.learning_starts
        return max(0, starts - self.replica.progress.steps, min(starts, memory.storage.rows) - memory.size)

    def _score(self) -> float | None:
        """Mean of the last 100 games, None before there were so many."""
        return self.scores.mean if self.scores.count >= 100 else None

    def _pulse(self) -> object:
        """What changes as long as the run goes on."""
        timing = self.replica.timing.pulse if hasattr(self, "replica") else None
        return timing, self.events

    def _last_words(self, sentence: str) -> None:
        """Why the process ends here and now."""
        if hasattr(self, "logger"):
            self.event(sentence)
            self.logger.close()
        else:
            self._note(sentence)
            print(f"phalanx: {sentence}", file=sys.stderr, flush=True)

    def _leave(self) -> None:
        """A signal came: no environment begins another rollout early."""
        if hasattr(self, "replica"):
            self.replica.leave()


def finite(weights: dict[str, torch.Tensor]) -> bool:
    return all(math.isfinite(float(tensor.double().sum())) for tensor in weights.values())
