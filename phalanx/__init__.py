"""phalanx: deep reinforcement learning at the speed of the hardware.

    run = phalanx.train("ppo-gym", env="CartPole-v1", overrides={"run.steps": 100_000})
    agent = phalanx.load(run.directory, best=True)
    action = agent.act(observation)

docs/python.md tells of the rest.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # type checkers take it for true; typing itself takes longer to import than all of this

# A torch thread with nothing to do must soon sleep, for the simulators need its core; but not at once, for waking it
# between two layers costs more than the layer. Read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "5000")

__version__ = "0.1.0"

if TYPE_CHECKING:
    from phalanx.agent import Agent
    from phalanx.agent import load_agent as load
    from phalanx.api import Run, resume, train
    from phalanx.config import Experiment
    from phalanx.errors import RunError, UserError
    from phalanx.types import EnvSpec

__all__ = ["Agent", "EnvSpec", "Experiment", "Run", "RunError", "UserError", "load", "resume", "train"]

PLACES = {
    "Agent": "phalanx.agent:Agent",
    "EnvSpec": "phalanx.types:EnvSpec",
    "Experiment": "phalanx.config:Experiment",
    "Run": "phalanx.api:Run",
    "RunError": "phalanx.errors:RunError",
    "UserError": "phalanx.errors:UserError",
    "load": "phalanx.agent:load_agent",
    "resume": "phalanx.api:resume",
    "train": "phalanx.api:train",
}
"""Where each of these is: nothing is imported before it is used."""


def __getattr__(name: str) -> object:
    if name not in PLACES:
        raise AttributeError(f"module 'phalanx' has no attribute {name!r}")
    from importlib import import_module

    module, _, found = PLACES[name].partition(":")
    globals()[name] = value = getattr(import_module(module), found)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
