"""Explicit tables from names to code: the only place where a name in a configuration becomes an object.

Nothing registers itself at import time, so spawned processes see the same world. Modules are imported when used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from phalanx.config import (
    A2CConfig,
    AtariConfig,
    C51Config,
    DQNConfig,
    EnvConfig,
    Experiment,
    GymnasiumConfig,
    PPOConfig,
    SynchronousConfig,
    ToyConfig,
)
from phalanx.envs import Env
from phalanx.given import spoken
from phalanx.runtime.seeds import Role, stream

if TYPE_CHECKING:
    import torch
    from torch import nn

    from phalanx.algorithms import Algorithm
    from phalanx.runtime.device import Compute
    from phalanx.seams import Experience, Policy
    from phalanx.types import EnvSpec

ENVS: dict[type, Callable[[Any], str]] = {
    AtariConfig: lambda config: "phalanx.envs.atari:AtariEnv",
    GymnasiumConfig: lambda config: "phalanx.envs.gymnasium:GymnasiumEnv",
    ToyConfig: lambda config: f"phalanx.envs.toy:{config.name.capitalize()}",
}


@dataclass(frozen=True)
class Family:
    """What algorithms of one kind need around them, each as `module:function`."""

    network: str  # (experiment, spec) -> model
    policy: str  # (experiment, model, compute, environments) -> the policy that collects experience
    evaluation_policy: str  # (experiment, model, compute, greedy) -> the policy that is judged
    experience: str  # (experiment, spec, environments, device) -> where rollouts go
    remembers: bool  # does it learn from a replay memory?


ACTOR_CRITIC = Family(
    network="phalanx.models.heads:make_network",
    policy="phalanx.models.policies:make_policy",
    evaluation_policy="phalanx.models.policies:make_evaluation_policy",
    experience="phalanx.replay.latest:make_latest",
    remembers=False,
)
VALUE_BASED = Family(
    network="phalanx.models.q_heads:make_network",
    policy="phalanx.models.q_policies:make_policy",
    evaluation_policy="phalanx.models.q_policies:make_evaluation_policy",
    experience="phalanx.replay.memory:make_memory",
    remembers=True,
)

ALGORITHMS: dict[type, tuple[str, Family]] = {
    A2CConfig: ("phalanx.algorithms.a2c:make", ACTOR_CRITIC),
    PPOConfig: ("phalanx.algorithms.ppo:make", ACTOR_CRITIC),
    DQNConfig: ("phalanx.algorithms.dqn:make", VALUE_BASED),
    C51Config: ("phalanx.algorithms.c51:make", VALUE_BASED),
}


GIVEN_ALGORITHM = "phalanx.algorithms.given:make"
"""A class of a user's own, in whichever family its configuration is."""


@dataclass(frozen=True)
class Topology:
    """What a topology needs of the machine."""

    run: str  # (experiment, session) -> None, as `module:function`
    worker_processes: bool  # do environments run in processes of their own, which may keep to cores?
    prestarts: bool = False  # may those be started before torch is loaded?
    reference: bool = False  # float32 unless told otherwise: what others are compared with


TOPOLOGIES: dict[str, Topology] = {
    "serial": Topology("phalanx.topologies.serial:run", worker_processes=False, reference=True),
    "synchronous": Topology("phalanx.topologies.synchronous:run", worker_processes=True, prestarts=True),
    "asynchronous": Topology("phalanx.topologies.asynchronous:run", worker_processes=True),
    "ga3c": Topology("phalanx.topologies.ga3c:run", worker_processes=True),
    "gorila": Topology("phalanx.topologies.gorila:run", worker_processes=True),
    "dba3c": Topology("phalanx.topologies.dba3c:run", worker_processes=True),
}

LOCKSTEP = Topology("phalanx.topologies.lockstep:run", worker_processes=True)
"""`synchronous` with several replicas."""


def find(path: str) -> Any:
    """The object behind `module:name`."""
    module, name = path.split(":")
    return getattr(import_module(module), name)


@dataclass(frozen=True)
class MakeEnv:
    """Makes an environment by its number in the run; a value, so that it can be sent to another process."""

    config: EnvConfig
    seed: int
    raw: bool = False  # publish raw screens, for a decoder on the device; Atari only
    role: Role = Role.ENVIRONMENT

    def __call__(self, number: int, incarnation: int = 0) -> Env:
        seed = stream(self.seed, self.role, number, incarnation)
        make = find(ENVS[type(self.config)](self.config))
        return make(self.config, seed, raw=True) if self.raw else make(self.config, seed)


def family(experiment: Experiment) -> Family:
    return ALGORITHMS[type(experiment.algorithm)][1]


def make_network(experiment: Experiment, spec: EnvSpec) -> nn.Module:
    """The model an experiment's algorithm learns, initialised from torch's global generator."""
    return find(family(experiment).network)(experiment, spec)


def make_policy(experiment: Experiment, model: nn.Module, compute: Compute, environments: int) -> Policy:
    """The policy that collects experience in so many environments."""
    return find(family(experiment).policy)(experiment, model, compute, environments)


def make_evaluation_policy(experiment: Experiment, model: nn.Module, compute: Compute, greedy: bool = False) -> Policy:
    """The policy that is judged: sampled or greedy for actor-critic, a small epsilon for value-based methods."""
    return find(family(experiment).evaluation_policy)(experiment, model, compute, greedy)


def make_experience(experiment: Experiment, spec: EnvSpec, environments: int, device: torch.device) -> Experience:
    """Where rollouts of so many environments go."""
    return find(family(experiment).experience)(experiment, spec, environments, device)


def make_algorithm(experiment: Experiment, model: nn.Module) -> Algorithm:
    given = experiment.algorithm.code
    return find(GIVEN_ALGORITHM if given else ALGORITHMS[type(experiment.algorithm)][0])(experiment, model)


def algorithm_name(experiment: Experiment) -> str:
    """As people call it."""
    given = experiment.algorithm.code
    return spoken(given) if given else type(experiment.algorithm).__name__.removesuffix("Config")


def topology(experiment: Experiment) -> Topology:
    return LOCKSTEP if in_lockstep(experiment) else TOPOLOGIES[experiment.topology.name]


def replicas(experiment: Experiment) -> int:
    """How many learners a run has."""
    return getattr(experiment.topology, "replicas", 1) or 1


def in_lockstep(experiment: Experiment) -> bool:
    """Do several learners make every update together? A number that is open (0) is taken for several."""
    return isinstance(experiment.topology, SynchronousConfig) and experiment.topology.replicas != 1


def memory_of(experiment: Experiment) -> DQNConfig | None:
    """The configuration of the replay memory an experiment learns from, if it has one."""
    algorithm = experiment.algorithm
    return algorithm if isinstance(algorithm, DQNConfig) else None
