"""`phalanx train` and `phalanx resume`: from a command line to a run, which `phalanx/api.py` starts."""

from __future__ import annotations

import contextlib

from phalanx.cli.directories import named_run
from phalanx.config.flags import parse_experiment, parse_flags
from phalanx.runtime.launch import Launch


def train(arguments: list[str]) -> int:
    experiment = parse_experiment("train", arguments)
    if (launch := Launch.by_torchrun()) is not None:
        from phalanx.topologies import torchrun

        return torchrun.train(launch, experiment)
    from phalanx.api import start
    from phalanx.runs.screen import goal_of, open_screen

    with contextlib.closing(open_screen(goal_of(experiment))) as screen:
        return start(experiment, screen).stop.exit_code


def resume(arguments: list[str]) -> int:
    directory, flags = named_run("resume", arguments)
    from phalanx.api import go_on, refuse_changes
    from phalanx.config.code import given_again
    from phalanx.config.stored import load

    saved = given_again(load(directory / "config.json"), directory)
    experiment = parse_flags("phalanx resume RUN_DIR", saved, flags).validate()
    refuse_changes(experiment, saved)
    if (launch := Launch.by_torchrun()) is not None:
        from phalanx.topologies import torchrun

        return torchrun.train(launch, experiment, directory)
    from phalanx.runs.screen import goal_of, open_screen

    with contextlib.closing(open_screen(goal_of(experiment))) as screen:
        return go_on(experiment, directory, screen).stop.exit_code
