"""`phalanx train` and `phalanx resume`: from a command line to a session that runs a topology."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from phalanx.cli.directories import named_run
from phalanx.config.experiment import Experiment
from phalanx.config.flags import parse_experiment, parse_flags
from phalanx.errors import UserError, tell
from phalanx.runtime.launch import Launch

if TYPE_CHECKING:
    from phalanx.runs.screen import Screen

FIXED_ON_RESUME = ("env.", "model.", "sampler.environments", "optimizer.rule", "run.seed", "run.name", "run.directory")
"""Values that a resumed run cannot change."""


def train(arguments: list[str]) -> int:
    experiment = parse_experiment("train", arguments)
    if (launch := Launch.by_torchrun()) is not None:
        from phalanx.topologies import torchrun

        return torchrun.train(launch, experiment)
    from phalanx.runs.screen import goal_of, open_screen

    with contextlib.closing(open_screen(goal_of(experiment))) as screen:
        return train_on(experiment, screen)


def train_on(experiment: Experiment, screen: Screen) -> int:
    """A run of its own, shown on that screen; the exit code."""
    screen.doing("loading torch")
    from phalanx.sampling.placement import prestart

    prestarted = prestart(experiment, tell)
    try:
        from phalanx.probe import check_pieces, resolve_precision, resolve_replicas
        from phalanx.registry import find, topology
        from phalanx.runs.directory import locked, new_directory, run_checkpoints
        from phalanx.runs.session import Session
        from phalanx.runtime.device import choose_compute

        screen.doing("probing the environment and the machine")
        experiment = resolve_replicas(experiment)
        check_cluster(experiment)
        check_pieces(experiment, None if prestarted is None else prestarted.spec.seen)
        if prestarted is not None and choose_compute(experiment.run).device.type != "cuda":
            prestarted.close()  # torch cannot use the GPU: they would only be in the way
            prestarted = None
        experiment = resolve_precision(experiment)
        directory = new_directory(experiment)
        checkpoints = run_checkpoints(experiment, directory, tell)
        with locked(directory):
            session = Session(experiment, directory, checkpoints, prestarted=prestarted, screen=screen)
            return session.run(find(topology(experiment).run))
    finally:
        if prestarted is not None:
            prestarted.close()


def check_cluster(experiment: Experiment) -> None:
    """A cluster that is to be joined must be there, before a run directory is."""
    if address := getattr(experiment.topology, "address", ""):
        from phalanx.cluster.engine import check_address

        check_address(address)


def resume(arguments: list[str]) -> int:
    directory, flags = named_run("resume", arguments)
    from phalanx.config.stored import difference, load
    from phalanx.registry import find, topology
    from phalanx.runs.directory import locked, run_checkpoints
    from phalanx.runs.session import Session

    saved = load(directory / "config.json")
    experiment = parse_flags("phalanx resume RUN_DIR", saved, flags).validate()
    for name, (old, _) in difference(experiment, saved).items():
        if name.startswith((*FIXED_ON_RESUME, *fixed_by(saved))):
            raise UserError(f"a resumed run keeps its {name} ({old}); start a new run to change it")
    if (launch := Launch.by_torchrun()) is not None:
        from phalanx.topologies import torchrun

        return torchrun.train(launch, experiment, directory)
    check_cluster(experiment)
    checkpoints = run_checkpoints(experiment, directory, tell)
    with locked(directory):
        loaded = checkpoints.load()
        return Session(experiment, directory, checkpoints, loaded).run(find(topology(experiment).run))


def fixed_by(saved: Experiment) -> list[str]:
    """Further values that a resumed run cannot change: they shape what its checkpoints hold."""
    kept = ["sampler.batch"]  # the horizon that followed from it is kept, and would win
    kept += ["sampler.horizon"] if saved.sampler.overlap else []
    return kept + (["algorithm.prioritized"] if getattr(saved.algorithm, "checkpoint_replay", False) else [])
