"""A trained agent that a user's own code asks for actions: what `phalanx.load` gives.

    agent = phalanx.load("runs/NAME", best=True)
    action = agent.act(observation)

Frame stacks, the history of an episode and the choice of a single observation or a batch are its business. `phalanx
eval` and `phalanx play` load theirs here, too.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch

from phalanx.config import EnvConfig, Experiment
from phalanx.config.code import given_again, refuse_in_vain
from phalanx.config.stored import existing_run, load
from phalanx.envs.observations import Reader, reader_of
from phalanx.errors import require, tell
from phalanx.parameters.flat import FlatParameters
from phalanx.registry import MakeEnv, make_evaluation_policy, make_network
from phalanx.runs.directory import run_checkpoints
from phalanx.runtime.device import Compute, choose_compute
from phalanx.runtime.seeds import Role, number
from phalanx.sampling.evaluator import evaluate
from phalanx.sampling.slot import blamed
from phalanx.seams import Policy
from phalanx.types import Progress, torch_dtype


class Agent:
    """The policy of a checkpoint, with what it remembers of the episodes that it is asked about."""

    def __init__(
        self,
        experiment: Experiment,
        model: torch.nn.Module,
        compute: Compute,
        progress: Progress,
        env: Any,
        greedy: bool,
        seed: int,
    ) -> None:
        self.experiment = experiment
        self.compute = compute
        self.progress = progress
        self.greedy = greedy
        self.seed = seed
        self._model = model
        self._env = env
        self._reader: Reader = reader_of(experiment.env, env)
        self._policies: dict[bool, Policy] = {}
        self._generator = torch.Generator().manual_seed(number(seed, Role.EVALUATION_ACTIONS))
        self.reset()

    def act(self, observation: Any, *, first: Any = None, greedy: bool | None = None) -> Any:
        """The action for an observation, an int as the environment takes it; for those of several environments, each
        with its own, an array.

        `first` says whether the observation begins an episode, for each environment of a batch; it matters where the
        agent sees a stack of them. A single environment may call `reset` instead. `greedy` takes the best action
        instead of drawing one; None does as the agent was loaded to.
        """
        count = self._reader.count(observation)
        self._remember(observation, count, first)
        device, rows = self.compute.device, len(self._history)
        draws = torch.rand(rows, generator=self._generator)
        chosen = self.policy(greedy).act(
            self._stacks.to(device), self._history.to(device), draws.to(device), slice(0, rows)
        )
        actions = chosen.action.cpu().numpy() + getattr(self._env, "first_action", 0)
        return int(actions[0]) if count is None else actions

    def reset(self) -> None:
        """The next observations begin episodes, in any number of environments; chance goes on, so that no episode
        repeats the one before."""
        self._stacks = torch.empty(0)
        self._history = torch.empty(0, dtype=torch.uint8)
        self._is_new = True

    def evaluate(self, games: int = 30, *, seed: int = 0, greedy: bool | None = None) -> list[float]:
        """Raw scores of so many whole games in environments of its own, as `phalanx eval` plays them."""
        require(games > 0, f"games is {games}, but must be at least 1")
        return evaluate(self.experiment.env, self.policy(greedy), self.compute, games, seed, self.progress)

    def policy(self, greedy: bool | None = None) -> Policy:
        """What chooses the actions, for code that has frame stacks already."""
        greedy = self.greedy if greedy is None else greedy
        if greedy not in self._policies:
            policy = make_evaluation_policy(self.experiment, self._model, self.compute, greedy)
            policy.begin(self.progress)
            self._policies[greedy] = policy
        return self._policies[greedy]

    @property
    def steps(self) -> int:
        """Agent steps of training behind it."""
        return self.progress.steps

    def close(self) -> None:
        """Give back the environment that tells the agent what observations look like."""
        with blamed(0):
            self._env.close()

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _remember(self, observation: Any, count: int | None, first: Any) -> None:
        """Move each stack on by the newest frame; one that is refused changes nothing."""
        rows, depth, spec = count or 1, self.experiment.env.stack, self._env.spec
        require(rows == count or count is None, "the batch of observations is empty")
        is_new = self._is_new or (depth == 1 and rows != len(self._history))
        require(
            is_new or rows == len(self._history),
            f"there are observations of {rows} environments, but there were {len(self._history)} before; call "
            "agent.reset() where other episodes begin",
        )
        begins = torch.zeros(rows, dtype=torch.bool)
        if first is not None:
            require(np.shape(first) in ((rows,), ()), f"first has shape {np.shape(first)}, but must be ({rows},)")
            begins |= torch.as_tensor(np.asarray(first, bool))
        newest = torch.zeros((rows, *spec.frame_shape), dtype=torch_dtype(spec.frame_dtype))
        for row, frame in enumerate(newest.numpy()):
            self._reader.write(observation, None if count is None else row, frame)
        if is_new:
            self._stacks = torch.zeros((rows, depth, *spec.frame_shape), dtype=newest.dtype)
            self._history = torch.zeros(rows, dtype=torch.uint8)
            self._is_new = False
        self._stacks = torch.cat([self._stacks[:, 1:], newest[:, None]], dim=1)
        self._history = (self._history + 1).clamp(max=depth).masked_fill(begins, 1)


def load_agent(
    directory: Path | str,
    *,
    best: bool = False,
    greedy: bool = False,
    device: str | None = None,
    seed: int = 0,
    env: Any = None,
    wrap: Any = None,
    model: Any = None,
    instead: str = "device='cpu'",
) -> Agent:
    """The agent of a run's newest checkpoint, or of its `best`.

    `device` is cpu or cuda instead of the run's own; `seed` is that of the actions that are drawn. `env`, `wrap`
    and `model` give code again that the run was given as a Python object by an earlier process.
    """
    directory = existing_run(Path(directory))
    saved = load(directory / "config.json")
    refuse_in_vain(saved, env=env, wrap=wrap, model=model)
    saved = given_again(saved, directory, env=env, wrap=wrap, model=model)
    experiment = saved.validate(learns=False)
    checkpoints = run_checkpoints(experiment, directory, tell)
    loaded = checkpoints.load_best() if best else checkpoints.load()
    compute = choose_compute(dataclasses.replace(experiment.run, device=device or experiment.run.device), instead)
    own = example(experiment.env)
    with torch.random.fork_rng(devices=[]):  # whose chance it is is the user's
        network = make_network(experiment, own.spec).to(compute.device)
    FlatParameters(network).load(loaded.weights)
    return Agent(experiment, network, compute, Progress(**loaded.state["clocks"]), own, greedy, seed)


def example(config: EnvConfig) -> Any:
    """An environment that nobody plays, to ask it about its observations."""
    with blamed(0):
        return MakeEnv(config, 0)(0)
