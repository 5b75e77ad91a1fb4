"""Runs from Python: `phalanx.train` and `phalanx.resume`. The command line starts its runs here, too.

    run = phalanx.train("ppo-gym", env="CartPole-v1", overrides={"run.steps": 100_000})
    run.directory, run.score, run.records

Worker processes run a program of their own, so that a script needs no `if __name__ == "__main__"`, and a notebook no
file. What cannot go on is a `UserError` or a `RunError`, with the sentence that the command line would print.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.config.code import given_again, remember, with_code, with_whole_paths
from phalanx.config.experiment import Experiment
from phalanx.config.overrides import dotted, with_overrides
from phalanx.config.presets import default_preset
from phalanx.config.presets import preset as preset_named
from phalanx.config.stored import difference, existing_run, load
from phalanx.errors import UserError, require, tell
from phalanx.files import read_plain
from phalanx.runtime.launch import Launch

if TYPE_CHECKING:
    from phalanx.runs.screen import Screen
    from phalanx.runs.session import OnRecord, Session

FIXED_ON_RESUME = ("env.", "model.", "sampler.environments", "optimizer.rule", "run.seed", "run.name", "run.directory")
"""Values that a resumed run cannot change."""
SAID_BY = {
    "env": ("env.id", "env.game", "env.name"),
    "wrap": ("env.wrap",),
    "model": ("model.torso",),
    "algorithm": ("algorithm", "algorithm.code"),
}
"""The fields that arguments set."""
MOST_RECORDS = 1 << 30  # bytes of them


@dataclass(frozen=True)
class Run:
    """A run that has ended, or was interrupted; `phalanx.Run(directory)` looks at any other one."""

    directory: Path
    end: str = ""
    """Why it ended: `100,000 steps done`, `target score 18 reached`, `stopped by on_record`, `stopped by SIGTERM`.
    Empty while it goes on, or if it broke off."""
    interrupted: bool = False
    """Did a signal stop it, such as Ctrl-C? `phalanx.resume` goes on where it stopped."""
    deaths: Mapping[str, int] = field(default_factory=dict, hash=False)
    """How many workers died and were replaced, by what they died of: `{"KeyError: 'left' (tiny.py:29)": 9}`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "directory", existing_run(Path(self.directory)))
        if not self.end:  # it is looked at later
            object.__setattr__(self, "end", _kept_end(self.directory))
            object.__setattr__(self, "interrupted", self.end.startswith("stopped by SIG"))

    @property
    def records(self) -> list[dict[str, Any]]:
        """What was recorded every few seconds: the lines of metrics.jsonl."""
        path = self.directory / "metrics.jsonl"
        try:
            lines = read_plain(path, MOST_RECORDS).splitlines(keepends=True)
        except FileNotFoundError:  # it did not come to the first one
            return []
        return [json.loads(line) for line in lines if line.endswith("\n")]  # of a run that goes on, one may be half

    @property
    def score(self) -> float | None:
        """Mean raw score of the last 100 games; None if no game was finished."""
        return next((record["score"] for record in reversed(self.records)), None)


def _kept_end(directory: Path) -> str:
    """Why a run ended, by the last line of its events.log; empty if that does not tell."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        lines = read_plain(directory / "events.log", MOST_RECORDS).splitlines()
        found = re.match(r"\S+ (.+) after \d+ s; the checkpoint is ", lines[-1]) if lines else None
        return found[1] if found else ""
    return ""


def train(
    preset: str | Experiment,
    *,
    env: Any = None,
    model: Any = None,
    algorithm: Any = None,
    overrides: Mapping[str, Any] | None = None,
    on_record: OnRecord | None = None,
    quiet: bool = False,
) -> Run:
    """Train an agent, and return when the run has ended.

    The preset is one of `phalanx presets`, or a whole `Experiment`. `env` is an id, code that makes a Gymnasium
    environment (`module:function`, `file.py:Class`), or a callable that returns one. `model` is a callable, or its
    name, from the `EnvSpec` of what the network sees to a torch module; `algorithm` a class with `batches` and `loss`,
    or its name. `overrides` are the dotted names of the command line's flags with their values. `on_record` gets each
    record, a dict, and may return False to stop the run. The progress is shown as by `phalanx train`, unless `quiet`.
    """
    base = preset_named(default_preset() if preset == "default" else preset) if isinstance(preset, str) else preset
    require(isinstance(base, Experiment), f"{base!r} is neither a preset's name nor an Experiment")
    _refuse_calling(on_record)
    _refuse_twice(overrides or {}, env=env, model=model, algorithm=algorithm)
    experiment = with_overrides(with_code(base, env, model, algorithm), overrides or {}).validate()
    _refuse_torchrun()
    with contextlib.closing(_screen(experiment, quiet)) as screen:
        return _result(start(experiment, screen, on_record))


def resume(
    directory: Path | str,
    *,
    env: Any = None,
    wrap: Any = None,
    model: Any = None,
    algorithm: Any = None,
    overrides: Mapping[str, Any] | None = None,
    on_record: OnRecord | None = None,
    quiet: bool = False,
) -> Run:
    """Continue a run where it stopped, and return when it has ended: with another budget, say, by
    `overrides={"run.steps": 2_000_000}`. Code that the run was given as a Python object is given again;
    `wrap` is that of `env.wrap`."""
    directory = existing_run(Path(directory))
    again = {"env": env, "wrap": wrap, "model": model, "algorithm": algorithm}
    _refuse_calling(on_record)
    _refuse_twice(overrides or {}, **again)
    saved = given_again(load(directory / "config.json"), directory, **again)
    experiment = with_overrides(with_code(saved, env, model, algorithm), overrides or {}).validate()
    refuse_changes(experiment, saved)
    _refuse_torchrun()
    with contextlib.closing(_screen(experiment, quiet)) as screen:
        return _result(go_on(experiment, directory, screen, on_record))


def start(experiment: Experiment, screen: Screen, on_record: OnRecord | None = None) -> Session:
    """A run of its own, shown on that screen; its session, which has ended."""
    screen.doing("loading torch")
    from phalanx.sampling.placement import prestart

    prestarted = prestart(experiment, tell)
    try:
        from phalanx.probe import check_pieces, resolve_precision, resolve_replicas
        from phalanx.registry import find, topology
        from phalanx.runs.directory import locked, new_directory, run_checkpoints
        from phalanx.runs.session import Session
        from phalanx.runtime.device import choose_compute, torch_as_it_was

        screen.doing("probing the environment and the machine")
        experiment = resolve_replicas(experiment)
        _check_cluster(experiment)
        check_pieces(experiment, None if prestarted is None else prestarted.spec.seen)
        if prestarted is not None and choose_compute(experiment.run).device.type != "cuda":
            prestarted.close()  # torch cannot use the GPU: they would only be in the way
            prestarted = None
        experiment = resolve_precision(experiment)
        directory = new_directory(experiment)
        remember(experiment, directory)
        checkpoints = run_checkpoints(experiment, directory, tell)
        with locked(directory), torch_as_it_was():
            session = Session(
                experiment, directory, checkpoints, prestarted=prestarted, screen=screen, on_record=on_record
            )
            session.run(find(topology(experiment).run))
            return session
    finally:
        if prestarted is not None:
            prestarted.close()


def go_on(experiment: Experiment, directory: Path, screen: Screen, on_record: OnRecord | None = None) -> Session:
    """A run that goes on where it stopped, shown on that screen; its session, which has ended."""
    screen.doing("loading torch")
    from phalanx.registry import find, topology
    from phalanx.runs.directory import locked, run_checkpoints
    from phalanx.runs.session import Session
    from phalanx.runtime.device import torch_as_it_was

    _check_cluster(experiment)
    checkpoints = run_checkpoints(experiment, directory, tell)
    with locked(directory), torch_as_it_was():
        screen.doing("reading the checkpoint")
        session = Session(experiment, directory, checkpoints, checkpoints.load(), screen=screen, on_record=on_record)
        session.run(find(topology(experiment).run))
        return session


def _check_cluster(experiment: Experiment) -> None:
    """Ray, and a cluster that is to be joined, must be there, before a run directory is."""
    from phalanx.probe import check_cluster

    check_cluster(experiment)
    if address := getattr(experiment.topology, "address", ""):
        from phalanx.cluster.engine import check_address, check_token

        check_address(address)
        check_token(address)


def refuse_changes(experiment: Experiment, saved: Experiment) -> None:
    """Of what a resumed run cannot change."""
    for name, (old, _) in difference(with_whole_paths(experiment), with_whole_paths(saved)).items():
        if name.startswith((*FIXED_ON_RESUME, *_fixed_by(saved))):
            raise UserError(f"a resumed run keeps its {name} ({old}); start a new run to change it")


def _refuse_calling(on_record: Any) -> None:
    """What cannot be called with a record, before anything is made."""
    kind = type(on_record).__name__
    require(on_record is None or callable(on_record), f"on_record= is {kind}; give a function that takes a record")


def _refuse_twice(overrides: Mapping[str, Any], **given: Any) -> None:
    """Of what an argument says, nothing else may be said by `overrides`."""
    for name, thing in given.items():
        found = next((key for key in overrides if dotted(key) in SAID_BY[name]), None)
        both = f"{name}= and overrides[{found!r}] say the same; give one of them"
        require(thing is None or found is None, both)


def _fixed_by(saved: Experiment) -> list[str]:
    """Further values that a resumed run cannot change: they shape what its checkpoints hold."""
    kept = ["sampler.batch"]  # the horizon that followed from it is kept, and would win
    kept += ["sampler.horizon"] if saved.sampler.overlap else []
    return kept + (["algorithm.prioritized"] if getattr(saved.algorithm, "checkpoint_replay", False) else [])


def _screen(experiment: Experiment, quiet: bool) -> Screen:
    from phalanx.runs.screen import Silence, goal_of, open_screen

    silence: Screen = Silence(goal := goal_of(experiment))
    return silence if quiet else open_screen(goal)


def _refuse_torchrun() -> None:
    require(Launch.by_torchrun() is None, "torchrun starts runs from the command line: torchrun ... -m phalanx train")


def _result(session: Session) -> Run:
    return Run(
        session.directory,
        session.stop_reason,
        interrupted=session.stop.number is not None,
        deaths=dict(session.deaths.causes),
    )
