"""Environments with unusual observations: `odd_environments:Odd/...`, registered when this module is imported.

They show samples of their spaces, and pay 1 for one of two actions.
"""

from __future__ import annotations

import copy
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Graph, MultiBinary, MultiDiscrete, Sequence, Tuple

OBSERVATIONS: dict[str, Any] = {
    "Dict": Dict({"place": Box(-1.0, 1.0, (3,)), "kind": Discrete(4), "inner": Dict({"flags": MultiBinary(3)})}),
    "Tuple": Tuple((Discrete(5, start=2), Box(0.0, 1.0, (2, 2)))),
    "MultiDiscrete": MultiDiscrete([3, 4, 2]),
    "MultiBinary": MultiBinary(6),
    "Image64": Box(0, 255, (64, 64, 3), np.uint8),
    "Image7": Box(0, 255, (7, 7, 3), np.uint8),
    "FloatImage": Box(-1.0, 1.0, (3, 12, 10), np.float32),
    "UnboundedImage": Box(-np.inf, np.inf, (9, 9, 2), np.float32),
    "BooleanBoard": Box(0, 1, (5, 6), bool),
    "Screen": Box(0, 255, (120, 160, 3), np.uint8),
    "OnlyImage": Dict({"screen": Box(0, 255, (10, 10, 1), np.uint8)}),
    "ImageAndVector": Dict({"screen": Box(0, 255, (10, 12, 3), np.uint8), "health": Box(0.0, 1.0, (1,))}),
    "TwoImages": Dict({"left": Box(0, 255, (8, 8, 3), np.uint8), "right": Box(0, 255, (8, 8, 3), np.uint8)}),
    "Stacked": Box(0, 255, (4, 12, 12, 3), np.uint8),
    "Graph": Dict({"net": Graph(Box(0.0, 1.0, (2,)), None), "place": Box(0.0, 1.0, (2,))}),
    "Sequence": Sequence(Discrete(3)),
}
ACTIONS: dict[str, Any] = {
    "ManyActions": MultiDiscrete([3, 2]),
    "Buttons": MultiBinary(4),
    "Continuous": Box(-1.0, 1.0, (2,)),
}


class Odd(gymnasium.Env):
    def __init__(self, name: str) -> None:
        self.observation_space = copy.deepcopy(OBSERVATIONS.get(name, Box(-1.0, 1.0, (2,))))  # with its own generator
        self.action_space = ACTIONS.get(name, Discrete(2, start=1))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return self.observation_space.sample(), float(action == 2), self.steps == 8, False, {}


for name in (*OBSERVATIONS, *ACTIONS):
    gymnasium.register(f"Odd/{name}-v0", entry_point=Odd, kwargs={"name": name})


class FewTorques(gymnasium.ActionWrapper):
    """Pendulum with three torques, as docs/environments.md has it."""

    action_space = Discrete(3)

    def action(self, action: Any) -> Any:
        return np.array([(-2.0, 0.0, 2.0)[action]])


gymnasium.register(
    "Odd/FewTorques-v0", entry_point=lambda **options: FewTorques(gymnasium.make("Pendulum-v1", **options))
)


class Mistaken(gymnasium.Env):
    """Breaks the contract of Gymnasium in one way."""

    action_space = Discrete(2)

    def __init__(self, way: str) -> None:
        self.way = way
        self.observation_space = Dict({"a": Box(0, 1, (3,))}) if way == "keys" else Box(0, 255, (12, 12, 3), np.uint8)
        if way == "flat":
            self.observation_space = Dict({"a": Box(0, 1, (3,)), "b": Discrete(3)})

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if self.way in ("keys", "flat"):
            return {"c": np.zeros(3)}, {}
        shown = np.zeros((6, 12, 3) if self.way == "shape" else (12, 12, 3), np.uint8)
        return shown if self.way == "reset" else (shown, {})

    def step(self, action: int) -> Any:
        shown = np.zeros((12, 12, 4) if self.way == "later" else (12, 12, 3), np.uint8)
        if self.way == "own":
            (_, _) = (1, 2, 3)
        if self.way == "old":
            return shown, 0.0, False, {}
        return 1.0 if self.way == "alone" else (shown, 0.0, False, False, {})


gymnasium.register("Odd/Mistaken-v0", entry_point=Mistaken, max_episode_steps=9, disable_env_checker=True)
