"""What tests of GA3C share: a node whose agents really run, driven turn by turn or by its threads, and a device of its
own kind in the place of a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tape import TapeCapturer

from phalanx.config import Experiment, GA3CConfig, OptimizerConfig, ToyConfig
from phalanx.config.presets import preset
from phalanx.learning import graph_learner
from phalanx.parameters import rules
from phalanx.replica import node as node_module
from phalanx.replica import trainer as trainer_module
from phalanx.replica.node import Node
from phalanx.runtime.device import Compute
from phalanx.sampling import fixed_rollouts, graph_inference, predictor
from phalanx.topologies import ga3c

PATIENCE = 60.0  # seconds after which a test gives up


def experiment_of(
    name: str = "a2c-catch",
    env: ToyConfig | None = None,
    agents: int = 4,
    each: int = 1,
    horizon: int = 5,
    steps: int = 10**6,
    rule: str = "rmsprop-inside",
    algorithm: dict[str, Any] | None = None,
    **topology: Any,
) -> Experiment:
    experiment = preset(name)
    sampler = dataclasses.replace(experiment.sampler, environments=agents * each, horizon=horizon, groups=1)
    return dataclasses.replace(
        experiment,
        env=env or experiment.env,
        algorithm=dataclasses.replace(experiment.algorithm, **(algorithm or {})),
        optimizer=OptimizerConfig(rule=rule, learning_rate=1e-3),
        sampler=sampler,
        topology=GA3CConfig(agents=agents, **{"min_batch": 1, **topology}),
        run=dataclasses.replace(experiment.run, steps=steps),
    ).validate()


class Stream:
    """Everything is done at once."""

    device_index = 0

    def __init__(self, priority: int = 0) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    def synchronize(self) -> None: ...


class Event:
    def __init__(self, blocking: bool = False) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


def both_views(shape: tuple[int, ...], dtype: np.dtype, device: torch.device) -> tuple[np.ndarray, torch.Tensor]:
    array = np.zeros(shape, dtype)
    return array, torch.from_numpy(array)


def clip_without_a_look(gradient: torch.Tensor, max_norm: float) -> torch.Tensor:
    """As on a GPU."""
    norm = torch.linalg.vector_norm(gradient)
    gradient.mul_((max_norm / (norm + 1e-6)).clamp_(max=1.0))
    return norm


@contextlib.contextmanager
def node_of(experiment: Experiment, graphs: bool = False, tell: Any = print) -> Iterator[Node]:
    """On the CPU; with `graphs` what a GPU would do is written on tapes, and played."""
    compute = Compute(torch.device("cpu"), graphs=graphs, threads=1)
    with contextlib.ExitStack() as stack:
        if graphs:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            for name, stand_in in {"Stream": Stream, "Event": Event, "current_stream": Stream}.items():
                patch.setattr(torch.cuda, name, stand_in)
            patch.setattr(torch.cuda, "synchronize", lambda: None)
            for module in (node_module, trainer_module, predictor):
                patch.setattr(module, "on_stream", lambda stream: contextlib.nullcontext())
            patch.setattr(node_module, "lock_pages", lambda memory: None)
            patch.setattr(node_module, "unlock_pages", lambda memory: None)
            patch.setattr(node_module, "mapped", lambda array, device: torch.from_numpy(array))
            patch.setattr(graph_inference, "both_views", both_views)
            patch.setattr(fixed_rollouts, "both_views", both_views)
            patch.setattr(graph_inference, "Capturer", TapeCapturer)
            patch.setattr(graph_learner, "Capturer", TapeCapturer)
            patch.setattr(rules, "global_norm_clip", clip_without_a_look)
        agents = stack.enter_context(ga3c.make_agents(experiment, compute, tell))
        yield stack.enter_context(Node(experiment, agents, compute, tell))


class Driven:
    """A node without threads: this one takes their turns, so that the same happens each time."""

    def __init__(self, node: Node, predictors: int = 1, trainers: int = 1) -> None:
        self.node = node
        for crew, count in ((node.predictors, predictors), (node.trainers, trainers)):
            while len(crew.hands) < count:
                crew.hands.append(crew.hire(len(crew.hands)))
        node.agents.play(node.topology.agents)

    def predict(self, number: int = 0) -> None:
        """All agents arrive, and are answered."""
        assert self.node.agents.all_arrived(PATIENCE)
        self.node.predictors.hands[number].turn(0.0)

    def learn(self, number: int = 0) -> None:
        """Take whatever is in the queue."""
        for _ in range(len(self.node.queue)):
            self.node.trainers.hands[number].turn(0.0)

    def run(self, turns: int) -> None:
        for _ in range(turns):
            self.predict()
            self.learn()
