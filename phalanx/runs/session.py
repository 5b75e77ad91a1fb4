"""A session: one sitting of a run. It owns the run directory, the budget, the logs, the checkpoints and the signals.

Topologies hand it reports; they know nothing of files or terminals:

    with session.recording(replica, spec, compute):
        while session.goes_on():
            session.note(replica.iterate(session.may_run_ahead))
"""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from phalanx.config import Experiment
from phalanx.config.code import AGAIN, code_of, with_whole_paths
from phalanx.config.stored import changed_fields, load, load_origin, save
from phalanx.errors import NotFinite, RunError, UserError
from phalanx.files import open_to_append
from phalanx.given import Given
from phalanx.parameters.flat import FlatParameters
from phalanx.probe import check_loggers
from phalanx.registry import algorithm_name, make_evaluation_policy, make_network, replicas
from phalanx.replica.report import Report, Source
from phalanx.runs.checkpoint import MALFORMED, Checkpoints, Loaded, in_one_line
from phalanx.runs.interval import Interval
from phalanx.runs.keeper import Keeper, as_snapshot, holds_games
from phalanx.runs.logger import Logger, MovedError, event_line
from phalanx.runs.metrics import ScoreWindow
from phalanx.runs.neighbours import Neighbours
from phalanx.runs.origin import changes, gpu_name, origin
from phalanx.runs.screen import Screen, goal_of, open_screen
from phalanx.runs.trackers import Trackers
from phalanx.runtime.affinity import usable_cores
from phalanx.runtime.deaths import Deaths
from phalanx.runtime.device import Compute, choose_compute
from phalanx.runtime.seeds import Role, number
from phalanx.runtime.signals import Interrupted, StopSignals, unwrapped
from phalanx.runtime.watchdog import Watchdog
from phalanx.sampling.evaluator import evaluate
from phalanx.sampling.placement import place
from phalanx.sampling.processes import ProcessEnvs
from phalanx.types import EnvSpec, Progress

OnRecord = Callable[[dict[str, Any]], object]
"""Takes each record as it is kept; one that returns False asks the run to stop."""
SILENT_SECONDS = 600.0  # within which something must happen on a GPU, besides what a worker may take for a step


class Session:
    """The record and the end of a run."""

    def __init__(
        self,
        experiment: Experiment,
        directory: Path,
        checkpoints: Checkpoints,
        resume: Loaded | None = None,
        prestarted: ProcessEnvs | None = None,
        screen: Screen | None = None,
        on_record: OnRecord | None = None,
    ) -> None:
        if resume is not None and resume.state.get("exported"):
            raise UserError(f"{directory} was exported: it can play, but not learn; resume the run that it comes from")
        check_loggers(experiment)
        self.experiment = experiment
        self.directory = directory
        self.checkpoints = checkpoints
        self.loaded = resume
        self.prestarted = prestarted  # workers that were started before torch was loaded
        self.screen = screen or open_screen(goal_of(experiment))
        self.on_record = on_record
        self.scores = ScoreWindow(100)
        self.lengths: deque[int] = deque(maxlen=100)  # steps of the last games
        self.progress = Progress()
        self.stop_reason = ""
        self.events = 0
        self.deaths = Deaths()
        self.keeper = Keeper(
            experiment.run, directory, checkpoints, self._memory, self._score, self.event, resume is not None
        )
        self.stop = StopSignals(self._leave, lambda: self.keeper.must_not_be_torn)
        self.watchdog = Watchdog(self._pulse, lambda: self.keeper.writing, self._last_words)
        self.began = time.perf_counter()
        self.time_before = 0.0  # seconds of earlier sessions
        self.logger: Logger | None = None
        self.source: Source | None = None
        self.origin: dict[str, Any] | None = None  # for config.json, once a resumed run has made a step
        self.neighbours = Neighbours(self.event, usable_cores())
        self.interval = Interval()
        self.last_record = self.speed_since = (self.began, 0)  # when, and after how many steps
        self.next_evaluation = 0

    def run(self, topology: Callable[[Experiment, Session], None]) -> int:
        """Run a topology to its end, whatever that is; the exit code."""
        try:
            with self.stop:
                self._run(topology)
        except Exception as error:
            foreseen = isinstance(error, UserError | RunError)
            self._write_event(str(error) if foreseen else f"{type(error).__name__}: {error}")
            raise
        finally:
            self.neighbours.close()
            if self.logger is not None:
                self.logger.close()
            self.screen.close()
        return self.stop.exit_code

    def _run(self, topology: Callable[[Experiment, Session], None]) -> None:
        try:
            with self.watchdog:
                self._say_what_is_made()
                topology(self._adapted(), self)
        except Interrupted:  # before the first step, or a third signal
            if self.logger is not None:
                self.event("stopped at once; what the newest checkpoint holds is kept")
            else:
                self._stopped_early()
        except RunError:
            if self.stop.number is None or self.source is not None:
                raise  # else the signal reached workers that were about to start
            self._stopped_early()

    def _stopped_early(self) -> None:
        self.stop_reason = f"stopped by {self.stop.name} before the first step"
        self._write_event(self.stop_reason)

    @contextlib.contextmanager
    def recording(self, source: Source, spec: EnvSpec, compute: Compute) -> Iterator[None]:
        """Around the loop of a topology: restore what is resumed, begin to log, and at the end, whatever it is, write
        the last checkpoint while the environments are still there."""
        self._begin(source, spec, compute)
        try:
            with unwrapped():
                yield
                self._finish(source, with_envs=True)
        except Interrupted:
            self.stop.calm()  # the first signal's clock still runs, if there were two
            self.stop_reason = f"stopped by {self.stop.name}"
            self._finish(source, with_envs=False)
        except NotFinite as error:
            raise NotFinite(f"{error}; {self.keeper.save_evidence(source, error)}", None) from None
        except MovedError as error:
            place = error.place
            words = f"{error}; {self.keeper.save_elsewhere(source, place)}" if place else str(error)
            raise RunError(words) from None
        except Exception:
            self.keeper.save_in_need(source)
            raise

    def goes_on(self) -> bool:
        """Is there budget left, or something under way that must end first? Notes why not, with a record: what is under
        way may still end and change the score."""
        assert self.source is not None
        if not self.stop_reason:
            self._look_for_the_end()
            if self.stop_reason:
                self._record_the_rest()
        return not self.stop_reason or not self.source.quiescent

    @property
    def may_run_ahead(self) -> bool:
        """May environments that are done early begin the next rollout? Not when something waits for all to be done."""
        return not (self.stop_reason or self.keeper.due)

    def note(self, report: Report) -> None:
        """Take in a report; log, evaluate and write a checkpoint when due."""
        assert self.source is not None
        self._went_on(report.progress)
        self.scores.add(np.array(report.scores))
        self.lengths.extend(report.lengths)
        self.interval.add(report)
        run = self.experiment.run
        if self.next_evaluation and self.progress.steps >= self.next_evaluation:
            self.next_evaluation = (self.progress.steps // run.eval_every + 1) * run.eval_every
            self._evaluate()
        elif time.perf_counter() - self.last_record[0] >= run.log_every:
            self.record()
        assert self.logger is not None
        self.keeper.look(self.source, self.progress, self.logger.require_place)

    def record(self, extra: dict[str, Any] | None = None) -> None:
        """One line in metrics.jsonl and on the screen."""
        assert self.logger is not None
        self.neighbours.look()
        progress, now = self.progress, time.perf_counter()
        if now - self.last_record[0] >= self.experiment.run.log_every / 2:  # else the last one was cut short by the end
            self.speed_since = self.last_record
        then, steps_then = self.speed_since
        self.last_record = (now, progress.steps)
        kept = self.logger.record(
            {
                "time_s": round(self.time_s, 3),
                "steps": progress.steps,
                "frames": progress.steps * self.frames_per_step,
                "updates": progress.updates,
                "version": progress.version,
                "episodes": progress.episodes,
                "score": self.scores.mean,
                "best": self.scores.best,
                **({"game_steps": sum(self.lengths) / len(self.lengths)} if self.lengths else {}),
                "sps": (progress.steps - steps_then) / max(now - then, 1e-9),
                **self.interval.take(),
                **self.neighbours.numbers,
                **(extra or {}),
            }
        )
        if self.on_record is not None:
            answer = self.on_record(dict(kept))  # theirs to change; the screen goes on showing ours
            if isinstance(answer, bool | np.bool_) and not answer and not self.stop_reason:
                self.stop_reason = "stopped by on_record"

    def event(self, sentence: str) -> None:
        """Something worth telling: a line on the screen and in events.log."""
        self.events += 1
        sentence = self.deaths.told(sentence)
        if self.logger is not None:
            self.logger.event(sentence)
        else:  # the environments are not there yet
            self._write_event(sentence)
            with contextlib.suppress(Exception):
                self.screen.say(sentence)

    @property
    def time_s(self) -> float:
        return self.time_before + time.perf_counter() - self.began

    def _begin(self, source: Source, spec: EnvSpec, compute: Compute) -> None:
        run = self.experiment.run
        self.compute, self.spec, self.frames_per_step = compute, spec.seen, spec.frames_per_step
        self.screen.goal.frames_per_step = spec.frames_per_step
        self.screen.goal.device = f"{compute.device}, {precision_of(compute)}"
        resumed = self.loaded is not None
        trackers = Trackers(run.loggers, self.directory, dataclasses.asdict(self.experiment), resumed)
        self.logger = Logger(self.directory, self.screen, resumed, trackers)
        self.logger.doing("")
        self.source = source
        self.neighbours.begin(torch.get_num_threads() if replicas(self.experiment) == 1 else 1)
        self.event(self._first_line())
        if self.loaded is not None:
            self._restore(source, self.loaded)
            self.logger.rewind(source.progress.steps)
            self.origin = origin(gpu_name(compute.device))
            self._tell_other_origin(self.origin)
        self.progress = progress = source.progress
        self.last_record = self.speed_since = (time.perf_counter(), progress.steps)
        if self.loaded is not None and progress.steps >= run.steps:
            self.event(f"already done: {progress.steps:,} of {run.steps:,} steps; --run.steps {2 * run.steps} goes on")
        elif self.loaded is not None:
            self._tell_changes()
        self.keeper.begin(progress)
        self.next_evaluation = (progress.steps // run.eval_every + 1) * run.eval_every if run.eval_every else 0
        self.interval.begin()
        for sentence in source.notes():
            self.event(sentence)
        if compute.device.type != "cpu":  # which may take as long as it likes
            self.watchdog.silence = SILENT_SECONDS + self.experiment.sampler.step_timeout

    def _tell_other_origin(self, now: dict[str, Any]) -> None:
        if changed := changes(load_origin(self.directory / "config.json"), now):
            self.event(
                f"versions or machine differ from before: {', '.join(changed)}; results may differ in their last bits"
            )

    def _tell_changes(self) -> None:
        """What flags have changed since the last session."""
        saved = load(self.directory / "config.json", report=lambda sentence: None)
        if changed := changed_fields(with_whole_paths(self.experiment), saved):
            self.event(f"changed from here on: {', '.join(changed)}")

    def _went_on(self, progress: Progress) -> None:
        """Take in how far the run is. With its first step a resumed one is of this configuration, and not before: one
        that was done already keeps that it learnt with."""
        if self.origin is not None and progress.steps > self.progress.steps:
            save(with_whole_paths(self.experiment), self.directory / "config.json", self.origin)
            self.origin = None
        self.progress = progress

    def _restore(self, source: Source, loaded: Loaded) -> None:
        """Go on from a checkpoint, or from an older one if it proves to be none of this run."""
        try:
            source.restore(as_snapshot(loaded.weights, loaded.state), loaded.path)
            self.scores.restore(loaded.state["scores"])
            self.time_before = loaded.state["time_s"]
        except (UserError, OSError, RuntimeError, *MALFORMED) as error:
            reason = f"the checkpoint {loaded.path} cannot be restored ({in_one_line(error)})"
            self.checkpoints.give_up(loaded.path, reason)
            try:
                self.loaded = self.checkpoints.load_another()
            except UserError:
                raise UserError(f"{reason}, nor can another; start the run anew") from None
            self._restore(source, self.loaded)

    def _look_for_the_end(self) -> None:
        run, score = self.experiment.run, self._score()
        if self.stop.number is not None:
            self.stop_reason = f"stopped by {self.stop.name}"
        elif self.progress.steps >= run.steps:
            self.stop_reason = f"{run.steps:,} steps done"
        elif run.seconds and time.perf_counter() - self.began >= run.seconds:
            self.stop_reason = f"{run.seconds:g} seconds are over"
        elif run.target_score is not None and score is not None and score >= run.target_score:
            self.stop_reason = f"target score {run.target_score:g} reached"

    def _record_the_rest(self) -> None:
        if self.progress.steps > self.last_record[1]:
            self.record()

    def _finish(self, source: Source, with_envs: bool) -> None:
        assert self.logger is not None
        self._went_on(source.progress)  # after an interruption, further on than the last report
        self._record_the_rest()
        self.logger.require_place()
        path = self.keeper.write(source, with_envs, last=True)
        progress = self.progress = self.keeper.saved  # replicas go on until they are asked for their states
        self._record_the_rest()
        score = "no game finished" if self.scores.mean is None else f"{self.scores.mean:.2f}"
        end = f"{self.stop_reason} after {self.time_s:.0f} s"
        self._write_event(f"{end}; the checkpoint is {path}")
        self.logger.summary(
            [
                end,
                f"steps {progress.steps:,}  updates {progress.updates:,}  games {progress.episodes:,}",
                f"mean score of the last {min(self.scores.count, 100)} games: {score}",
                *([str(self.deaths)] if self.deaths.causes else []),
                f"checkpoint: {path}",
                *self._next_commands(),
            ]
        )

    def _next_commands(self) -> list[str]:
        """What people may want to do now. Code that was given as a Python object is known to this process alone:
        another one gives it again, to act all of it but the algorithm."""
        code = code_of(self.experiment)
        again = [argument for argument, field in AGAIN.items() if isinstance(code.get(field), Given)]
        if again:
            acting = ", ".join([repr(str(self.directory)), *(f"{name}=..." for name in again if name != "algorithm")])
            learning = ", ".join([repr(str(self.directory)), *(f"{name}=..." for name in again)])
            is_over = self.progress.steps >= self.experiment.run.steps
            return [f"next: phalanx.load({acting})", *([] if is_over else [f"      phalanx.resume({learning})"])]
        run, steps = shlex.quote(str(self.directory)), self.experiment.run.steps
        further = f" --run.steps {2 * steps}" if self.progress.steps >= steps else ""  # else there is nothing to do
        return [
            f"next: phalanx eval {run}",
            *([f"      phalanx play {run} --video play.mp4"] if self.spec.can_be_drawn else []),
            f"      phalanx resume {run}{further}",
        ]

    def _evaluate(self) -> None:
        """Play whole games with a model of its own, which takes the source's newest parameters."""
        assert self.source is not None and self.logger is not None
        run = self.experiment.run
        with torch.random.fork_rng():  # training must not notice
            model = make_network(self.experiment, self.spec).to(self.compute.device)
        FlatParameters(model).load(self.source.weights())
        policy = make_evaluation_policy(self.experiment, model, self.compute)
        self.logger.doing(f"playing {run.eval_games} games to evaluate")
        with self.watchdog.patient():
            scores = evaluate(self.experiment.env, policy, self.compute, run.eval_games, run.seed, self.progress)
        self.logger.doing("")
        self.record({"eval/score": sum(scores) / len(scores), "eval/games": len(scores)})

    def _say_what_is_made(self) -> None:
        """Where the run is, and what it starts with: it takes seconds."""
        experiment, goal = self.experiment, self.screen.goal
        goal.run = self.directory.resolve().name
        count = replicas(experiment)
        what, compute = f"starting {count} replicas", choose_compute(experiment.run)
        goal.device = f"{compute.device}, {precision_of(compute)}"
        if count == 1:
            workers = place(experiment, compute.device.type).workers
            what = f"starting {workers} workers" if workers else "making the environments"
        with contextlib.suppress(Exception):  # a screen may fail; the logger finds out and has another one
            self.screen.say(f"the run is in {self.directory}; it ends after {goal.end}")
            self.screen.doing(what)

    def _adapted(self) -> Experiment:
        """The experiment for the topology: one resumed without its environments must not play its first games again,
        and restored environments need not be decorrelated first."""
        loaded, run = self.loaded, self.experiment.run
        if loaded is None or loaded.steps == 0:
            return self.experiment
        saved = loaded.state["replicas"]
        if len(saved) == replicas(self.experiment) and all(holds_games(self.experiment, one) for one in saved):
            sampler = dataclasses.replace(self.experiment.sampler, decorrelation=0)
            return dataclasses.replace(self.experiment, sampler=sampler)
        seed = number(run.seed, Role.RESUME, loaded.steps)
        return dataclasses.replace(self.experiment, run=dataclasses.replace(run, seed=seed))

    def _first_line(self) -> str:
        """What runs, and with which choices that were left to phalanx."""
        algorithm = algorithm_name(self.experiment)
        device, seed = f"{self.compute.device}, {precision_of(self.compute)}", self.experiment.run.seed
        return f"{algorithm} on {self.experiment.env.name}, {device}, seed {seed}"

    def _memory(self) -> dict[str, Any]:
        """What the session itself adds to a checkpoint."""
        return {"scores": self.scores.state(), "time_s": self.time_s}

    def _score(self) -> float | None:
        """Mean of the last 100 games, None before there were so many."""
        return self.scores.mean if self.scores.count >= 100 else None

    def _pulse(self) -> object:
        """What changes as long as the run goes on."""
        return None if self.source is None else self.source.pulse, self.events

    def _write_event(self, sentence: str) -> None:
        """Keep the sentence that ends the run in events.log, if the disk lets it."""
        with contextlib.suppress(OSError, RunError):
            if self.logger is not None:
                self.logger.note(sentence)
            else:
                with open_to_append(self.directory / "events.log", errors="replace") as log:
                    log.write(event_line(sentence))

    def _last_words(self, sentence: str) -> None:
        """Why the process ends here and now."""
        if self.logger is not None:
            self.event(sentence)
            self.logger.close()
        else:
            self._write_event(sentence)
            print(f"phalanx: {sentence}", file=sys.stderr, flush=True)

    def _leave(self) -> None:
        """A signal came: no environment begins another rollout early."""
        if self.source is not None:
            self.source.leave()


def precision_of(compute: Compute) -> str:
    return "bfloat16" if compute.bfloat16 else "float32"
