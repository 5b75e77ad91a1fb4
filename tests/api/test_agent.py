"""An agent that is asked for actions chooses what phalanx's own evaluator chooses."""

from __future__ import annotations

import json
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

import phalanx
from phalanx.cli.main import main
from phalanx.config import AtariConfig
from phalanx.envs.atari import AtariEnv
from phalanx.envs.observations import row_of, rows_in
from phalanx.errors import UserError
from phalanx.registry import MakeEnv
from phalanx.runtime.seeds import Role, number
from phalanx.sampling.evaluator import evaluation_env
from phalanx.sampling.serial import SerialEnvs
from phalanx.types import torch_dtype

ROWS = 3


class Refusing:
    """A reader that finds fault with the second of several observations."""

    def __init__(self, reader: Any) -> None:
        self.reader = reader

    def count(self, observation: Any) -> int | None:
        return self.reader.count(observation)

    def write(self, observation: Any, row: int | None, frame: np.ndarray) -> None:
        self.reader.write(observation, row, frame)
        if row == 1:
            raise UserError("the second is no observation")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs that several tests look at, by what they are of."""
    place = str(tmp_path_factory.mktemp("runs"))
    shared = {"run.directory": place, "run.precision": "float32"}
    small = {**shared, "sampler.environments": 4, "sampler.horizon": 8, "run.steps": 256}
    atari = {**shared, "sampler.environments": 2, "sampler.horizon": 4, "run.steps": 8, "topology": "serial"}
    return {
        "stack": phalanx.train("a2c-catch", overrides={**small, "env.stack": 3}, quiet=True).directory,
        "values": phalanx.train("dqn-catch", overrides={**small, "env.stack": 2}, quiet=True).directory,
        "vector": phalanx.train("a2c-gym", overrides=small, quiet=True).directory,
        "atari": phalanx.train("a2c", overrides={**atari, "sampler.decorrelation": 0}, quiet=True).directory,
    }


def evaluator_course(agent: phalanx.Agent, steps: int, greedy: bool) -> list[dict[str, Any]]:
    """What the evaluator sees and does, step by step, written down once more."""
    config = agent.experiment.env
    envs = SerialEnvs(MakeEnv(evaluation_env(config), 5, role=Role.EVALUATION), ROWS)
    generator = torch.Generator().manual_seed(number(agent.seed, Role.EVALUATION_ACTIONS))
    policy, course = agent.policy(greedy), []
    stacks = torch.zeros((ROWS, config.stack, *envs.spec.frame_shape), dtype=torch_dtype(envs.spec.frame_dtype))
    history = torch.zeros(ROWS, dtype=torch.uint8)
    for _ in range(steps):
        step = envs.recv(0)
        stacks = torch.cat([stacks[:, 1:], torch.from_numpy(step.observation.copy())[:, None]], dim=1)
        history = (history + 1).clamp(max=config.stack).masked_fill(torch.from_numpy(step.first), 1)
        draws = torch.rand(ROWS, generator=generator)
        action = policy.act(stacks, history, draws, slice(0, ROWS)).action.numpy()
        course.append({"observation": step.observation.copy(), "first": step.first.copy(), "action": action})
        envs.send(0, action)
    envs.close()
    return course


@pytest.mark.parametrize("kind", ["stack", "values", "vector"])
@pytest.mark.parametrize("greedy", [False, True])
def test_a_batch_gets_the_actions_of_the_evaluator(runs, kind, greedy):
    agent = phalanx.load(runs[kind])
    course = evaluator_course(agent, 40, greedy)
    assert any(step["first"].any() for step in course[1:])
    agent.reset()
    for step in course:
        actions = agent.act(step["observation"], first=step["first"], greedy=greedy)
        assert actions.dtype == np.int64 and actions.tolist() == step["action"].tolist()


def test_a_single_environment_gets_what_its_row_of_a_batch_gets(runs):
    agent, alone = (phalanx.load(runs["stack"], greedy=True) for _ in range(2))
    for step in evaluator_course(agent, 30, greedy=True):
        if step["first"][1]:
            alone.reset()
        action = alone.act(step["observation"][1])
        assert type(action) is int and action == step["action"][1]


def test_episodes_of_one_environment_may_be_told_by_first(runs):
    agent, other = (phalanx.load(runs["stack"], greedy=True) for _ in range(2))
    for step in evaluator_course(agent, 30, greedy=True):
        assert other.act(step["observation"][0], first=bool(step["first"][0])) == step["action"][0]


def test_without_first_an_agent_remembers_across_episodes(runs):
    agent = phalanx.load(runs["stack"])
    frames = np.zeros((2, 1, 10, 5), np.uint8)
    for expected in (1, 2, 3, 3):
        agent.act(frames)
        assert agent._history.tolist() == [expected] * 2
    agent.act(frames, first=[True, False])
    assert agent._history.tolist() == [1, 3]


def test_another_number_of_environments_begins_after_reset_only(runs):
    agent = phalanx.load(runs["stack"])
    agent.act(np.zeros((2, 1, 10, 5), np.uint8))
    with pytest.raises(UserError, match=r"observations of 3 environments, but there were 2 before; call agent.reset"):
        agent.act(np.zeros((3, 1, 10, 5), np.uint8))
    agent.reset()
    assert len(agent.act(np.zeros((3, 1, 10, 5), np.uint8))) == 3
    plain = phalanx.load(runs["vector"])  # sees one observation at a time and remembers nothing
    assert [np.shape(plain.act(np.zeros(shape))) for shape in ((2, 4), (4,), (5, 4))] == [(2,), (), (5,)]


@pytest.mark.parametrize("shape", [(3,), (2, 5), (1, 2, 4), ()])
def test_observations_of_another_shape_are_refused(runs, shape):
    with pytest.raises(
        UserError,
        match=r"cannot take observations of shape .*; one has the shape \(4,\), and a batch of N the shape \(N, 4\)",
    ):
        phalanx.load(runs["vector"]).act(np.zeros(shape))


def test_chance_goes_on_from_episode_to_episode(runs):
    """Else all episodes of a user's loop would be one."""
    episodes = []
    for _ in range(2):
        agent = phalanx.load(runs["stack"], seed=4)
        episodes.append([])
        for _ in range(3):
            agent.reset()
            episodes[-1].append([agent.act(np.zeros((1, 10, 5), np.uint8)) for _ in range(30)])
    assert episodes[0] == episodes[1]  # that of another agent of the same seed
    assert len({tuple(episode) for episode in episodes[0]}) == 3


def test_an_observation_that_is_refused_changes_nothing(runs):
    agent = phalanx.load(runs["stack"])
    frames = np.full((2, 1, 10, 5), 3, np.uint8)
    agent.act(frames)
    before = agent._stacks.clone(), agent._history.clone()
    for refused in ({"observation": frames, "first": [True] * 3}, {"observation": np.zeros((3, 1, 10, 5), np.uint8)}):
        with pytest.raises(UserError):
            agent.act(**refused)
    agent._reader, reader = Refusing(agent._reader), agent._reader
    with pytest.raises(UserError, match="the second"):
        agent.act(frames + 1)
    agent._reader = reader
    assert torch.equal(agent._stacks, before[0]) and torch.equal(agent._history, before[1])


def test_what_is_no_flag_of_each_environment_is_refused(runs):
    agent = phalanx.load(runs["vector"])
    with pytest.raises(UserError, match=r"first has shape \(3,\), but must be \(2,\)"):
        agent.act(np.zeros((2, 4)), first=[True] * 3)
    with pytest.raises(UserError, match="the batch of observations is empty"):
        agent.act(np.zeros((0, 4)))


@pytest.mark.parametrize(("kind", "best"), [("stack", True), ("values", False)])
def test_evaluate_is_phalanx_eval(runs, kind, best, capsys):
    assert main(["eval", str(runs[kind]), "--games", "5", "--seed", "3", "--json", *(["--best"] if best else [])]) == 0
    told = json.loads(capsys.readouterr().out)
    agent = phalanx.load(runs[kind], best=best)
    assert agent.evaluate(games=5, seed=3) == told["scores"]
    assert agent.steps == told["steps"]
    with pytest.raises(UserError, match="games is 0, but must be at least 1"):
        agent.evaluate(games=0)


def test_loading_takes_no_chance_from_the_user(runs):
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    phalanx.load(runs["stack"]).act(np.zeros((1, 10, 5), np.uint8))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_an_agent_of_gymnasium_plays_a_vector_environment(runs):
    with phalanx.load(runs["vector"]) as agent:
        envs = gymnasium.make_vec("CartPole-v1", 4)
        observations, _ = envs.reset(seed=0)
        for _ in range(5):
            observations, *_ = envs.step(agent.act(observations))
        envs.close()


def test_screens_of_an_emulator_become_the_frames_of_training(runs):
    agent = phalanx.load(runs["atari"])
    config = agent.experiment.env
    assert isinstance(config, AtariConfig)
    one_screen = AtariConfig(**{**vars(config), "max_pool": False})  # as somebody has who sees every fourth
    env = AtariEnv(one_screen, np.random.SeedSequence(3))
    frame, made = np.empty(env.spec.frame_shape, np.uint8), np.empty(env.spec.frame_shape, np.uint8)
    env.reset(frame)
    for step in range(40):
        env.step(step % env.spec.actions, frame)
        for seen in (env._ale.getScreenRGB(), env._ale.getScreenGrayscale(), frame):
            assert agent._reader.count(seen) is None and agent._reader.count(np.stack([seen] * 2)) == 2
            agent._reader.write(np.stack([seen, seen]), 1, made)
            assert np.array_equal(made, frame)
    assert agent.act(env._ale.getScreenRGB()) in range(env.spec.actions)
    with pytest.raises(UserError, match=r"this agent cannot take observations of shape .*; known are screens in colo"):
        agent.act(np.zeros((4, 84, 84), np.uint8))
    with pytest.raises(UserError, match="colours that the emulator does not show"):
        agent.act(np.full((210, 160, 3), 77, np.uint8) + np.arange(3, dtype=np.uint8))


def test_numbers_that_are_no_bytes_are_refused(runs):
    """Of screens that somebody scaled, say: cast, they would be black."""
    with phalanx.load(runs["atari"], greedy=True) as agent:
        screen = np.zeros((210, 160, 3), np.uint8)
        assert agent.act(screen.astype(np.float32)) == (agent.reset(), agent.act(screen))[1]
        for scaled in (screen + 0.5, screen + np.int64(300), screen - 1.0, screen + np.nan):
            with pytest.raises(phalanx.UserError, match="but the agent was trained on bytes; give whole numbers"):
                agent.act(scaled)


def test_batches_of_composed_spaces_are_told_by_their_parts():
    spaces = gymnasium.spaces
    space = spaces.Dict({"a": spaces.Box(0, 1, (2,)), "b": spaces.Tuple((spaces.Discrete(3), spaces.MultiBinary(2)))})
    single = space.sample()
    batch = {"a": np.ones((4, 2)), "b": (np.arange(4) % 3, np.zeros((4, 2), int))}
    assert rows_in(space, single) is None and rows_in(space, batch) == 4
    row = row_of(space, batch, 2)
    assert rows_in(space, row) is None and row["b"][0] == 2
    listed = row_of(space, {"a": [[1, 1]] * 4, "b": [[0, 1, 2, 0], [[0, 0]] * 4]}, 2)  # as JSON gives it
    assert listed == {"a": [1, 1], "b": (2, [0, 0])}
    with pytest.raises(UserError, match="lacks parts of"):
        rows_in(space, {"a": np.ones(2)})
    with pytest.raises(UserError, match="parts of the observation are of different numbers"):
        rows_in(space, {**batch, "a": np.ones((3, 2))})


class Composed(gymnasium.Env):
    """Shows samples of a Dict."""

    observation_space = gymnasium.spaces.Dict(
        {"kind": gymnasium.spaces.Discrete(3), "place": gymnasium.spaces.Box(-1.0, 1.0, (2,))}
    )
    action_space = gymnasium.spaces.Discrete(4, start=5)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: int) -> Any:
        return self.observation_space.sample(), 1.0, False, True, {}


def test_composed_observations_are_read_single_and_in_batches(tmp_path):
    overrides = {"run.directory": str(tmp_path), "run.steps": 64, "run.precision": "float32"}
    agent = phalanx.load(phalanx.train("a2c-gym", env=Composed, overrides=overrides, quiet=True).directory, greedy=True)
    envs = gymnasium.vector.SyncVectorEnv([Composed] * 3)
    observations, _ = envs.reset(seed=1)
    actions = agent.act(observations)
    envs.step(actions)
    rows = [{name: values[row] for name, values in observations.items()} for row in range(3)]
    assert actions.tolist() == [agent.act(row) for row in rows]
    assert set(actions.tolist()) <= {5, 6, 7, 8}
