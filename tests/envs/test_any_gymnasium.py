"""Any Gymnasium environment with discrete actions trains for a moment, or is refused with one sentence: the table that
docs/environments.md promises."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

import phalanx
from phalanx.cli.main import main
from phalanx.config import GymnasiumConfig
from phalanx.envs.gymnasium import GymnasiumEnv
from phalanx.envs.layout import frame_layout
from phalanx.errors import UserError
from whole_runs import newest, same

SMALL = ("--sampler.environments", 4, "--sampler.horizon", 8, "--run.device", "cpu")
A2C = ("a2c-gym", *SMALL)
PPO = ("ppo-gym", *SMALL, "--algorithm.epochs", 1)
DQN = ("dqn-gym", *SMALL, "--algorithm.learning-starts", 64, "--algorithm.intensity", 4)


def needs(package: str) -> Any:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"needs {package}")


KNOWN = [
    pytest.param("CartPole-v1", "vector of 4", A2C),
    pytest.param("Acrobot-v1", "vector of 6", A2C),
    pytest.param("MountainCar-v0", "vector of 2", A2C),
    pytest.param("FrozenLake-v1", "vector of 16", DQN),
    pytest.param("FrozenLake8x8-v1", "vector of 64", A2C),
    pytest.param("Taxi-v4", "vector of 500", DQN),
    pytest.param("CliffWalking-v1", "vector of 48", A2C),
    pytest.param("Blackjack-v1", "vector of 45", PPO),
    pytest.param("LunarLander-v3", "vector of 8", A2C, marks=needs("Box2D")),
    pytest.param("MinAtar/Breakout-v1", "image of 10x10 with 4", A2C, marks=needs("minatar")),
    pytest.param("MinAtar/Freeway-v0", "image of 10x10 with 7", DQN, marks=needs("minatar")),
]
ODD = [
    ("Dict", "vector of 10"),
    ("Tuple", "vector of 9"),
    ("MultiDiscrete", "vector of 9"),
    ("MultiBinary", "vector of 6"),
    ("Image64", "image of 64x64 with 3"),
    ("Image7", "image of 7x7 with 3"),
    ("FloatImage", "image of 12x10 with 3 channel(s), which come first; floats from -1 to 1"),
    ("UnboundedImage", "image of 9x9 with 2 channel(s), which come last; floats taken as they are"),
    ("BooleanBoard", "image of 5x6 with 1 channel(s); bytes from 0 to 1"),
    ("Screen", "image of 120x160 with 3"),
    ("OnlyImage", "image of 10x10 with 1"),
    ("FewTorques", "vector of 3"),
]
SEVERAL_CHOICES = "takes several choices at each step"
REFUSED = [
    (
        "odd_environments:Odd/ImageAndVector-v0",
        r"shows screen \(10x12x3\) beside health, but .* one image or .* vector",
    ),
    ("odd_environments:Odd/TwoImages-v0", r"shows left \(8x8x3\) and right \(8x8x3\), but"),
    ("odd_environments:Odd/Stacked-v0", r"several images at once, of shape \(4, 12, 12, 3\); .* --env.stack"),
    ("odd_environments:Odd/Graph-v0", r"shows net \(Graph\), which Gymnasium does not flatten"),
    ("odd_environments:Odd/Sequence-v0", "shows Sequence, which Gymnasium does not flatten"),
    ("odd_environments:Odd/ManyActions-v0", SEVERAL_CHOICES),
    ("odd_environments:Odd/Buttons-v0", SEVERAL_CHOICES),
    ("odd_environments:Odd/Continuous-v0", "has continuous actions"),
    pytest.param(
        "MiniGrid-Empty-5x5-v0", r"shows image \(7x7x3\) beside direction, mission, but", marks=needs("minigrid")
    ),
    pytest.param("VizdoomBasic-v1", r"shows screen \(240x320x3\) beside", marks=needs("vizdoom")),
    pytest.param("VizdoomBasic-MultiBinary-v1", SEVERAL_CHOICES, marks=needs("vizdoom")),
    ("Pendulum-v1", "has continuous actions"),
    ("MountainCarContinuous-v0", "has continuous actions"),
    ("CartPoll-v1", "unknown Gymnasium environment 'CartPoll-v1'; did you mean CartPole-v1"),
    ("Taxi-v3", "is out of date: .* Please use `Taxi-v4`"),
    ("Nobody/Knows-v0", "nobody has registered 'Nobody/Knows-v0'; .* --env.id module:Nobody/Knows-v0"),
]


@pytest.mark.parametrize(("id", "seen", "flags"), KNOWN)
def test_known_environments_train(train: Any, capsys: Any, id: str, seen: str, flags: Any) -> None:
    assert main(["plan", flags[0], "--env.id", id]) == 0
    assert seen in (told := capsys.readouterr().out)
    assert ("fitted (auto: frames are images" if "image" in seen else "mlp (auto: frames are vectors") in told
    assert train(*flags, "--env.id", id, steps=256) == 0


@pytest.mark.parametrize(("name", "seen"), ODD)
def test_odd_environments_train(train: Any, capsys: Any, name: str, seen: str) -> None:
    id = f"odd_environments:Odd/{name}-v0"
    assert main(["plan", "a2c-gym", "--env.id", id]) == 0
    assert seen in capsys.readouterr().out
    assert train(*(DQN if name in ("Image7", "FloatImage") else A2C), "--env.id", id, steps=96) == 0


@pytest.mark.parametrize("id", ["FrozenLake-v1", "odd_environments:Odd/FloatImage-v0", "odd_environments:Odd/Dict-v0"])
def test_worker_processes_show_the_same(train: Any, tmp_path: Path, monkeypatch: Any, id: str) -> None:
    monkeypatch.chdir(Path(__file__).parent)  # workers find the modules of their directory
    assert train(*A2C, "--env.id", id, name="serial", steps=256) == 0
    workers = ("--topology", "synchronous", "--sampler.workers", 2)
    assert train(*A2C, *workers, "--env.id", id, name="synchronous", steps=256) == 0
    serial, synchronous = newest(tmp_path / "serial"), newest(tmp_path / "synchronous")
    assert same(serial.weights, synchronous.weights)


def test_a_run_on_flattened_observations_is_resumed_exactly(train: Any, resume: Any, tmp_path: Path) -> None:
    env = ("--env.id", "odd_environments:Odd/Tuple-v0")
    assert train(*A2C, *env, name="whole", steps=320) == 0
    assert train(*A2C, *env, name="parts", steps=160) == 0
    assert resume("--run.steps", 320, name="parts") == 0
    assert same(newest(tmp_path / "whole").weights, newest(tmp_path / "parts").weights)


@pytest.mark.parametrize(
    ("id", "wrapper"),
    [
        ("odd_environments:Odd/ImageAndVector-v0", "phalanx.envs.wrappers:image_only"),
        pytest.param("MiniGrid-Empty-5x5-v0", "minigrid.wrappers:ImgObsWrapper", marks=needs("minigrid")),
    ],
)
def test_a_wrapper_leaves_the_image(train: Any, id: str, wrapper: str) -> None:
    assert train(*A2C, "--env.id", id, "--env.wrap", wrapper, steps=64) == 0


@pytest.mark.parametrize("name", ["Dict", "Tuple", "MultiDiscrete", "FloatImage", "OnlyImage"])
def test_an_agent_acts_on_raw_observations(train: Any, tmp_path: Path, name: str) -> None:
    id = f"odd_environments:Odd/{name}-v0"
    assert train(*A2C, "--env.id", id, steps=32) == 0
    environments = gymnasium.make_vec(id, 3, vectorization_mode="sync")
    with phalanx.load(tmp_path / "run", greedy=True) as agent:
        observations, _ = environments.reset(seed=1)
        actions, fed = agent.act(observations), agent._stacks  # what the network saw: it may choose the same for all
        agent.reset()
        alone = gymnasium.make(id)
        layout = frame_layout(alone.observation_space, name)
        for row, action in enumerate(actions):
            observation = alone.reset(seed=1 + row)[0]
            assert agent.act(observation) == action and alone.action_space.contains(action)
            assert torch.equal(agent._stacks[0], fed[row]) and not torch.equal(fed[row], fed[row - 1])
            assert np.array_equal(fed[row, 0], layout.frame(observation))
            agent.reset()
        if name == "OnlyImage":
            with pytest.raises(UserError, match=r"from 0 to 0.9.*, but the agent was trained on bytes"):
                agent.act({"screen": observations["screen"][0] // 2 / 128})


@pytest.mark.parametrize(("id", "sentence"), REFUSED)
def test_others_are_refused_with_one_sentence(
    tmp_path: Path, monkeypatch: Any, capsys: Any, id: str, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)  # some leave files where they are
    assert main(["plan", "a2c-gym", "--env.id", id]) == 2
    told = capsys.readouterr().err
    assert re.search(sentence, told) and len(told.strip().splitlines()) == 1


RETURNS = r"5 values \(observation, reward, terminated, truncated, info\)"


@pytest.mark.parametrize("registered", [False, True], ids=["class", "registered"])  # there Gymnasium unpacks first
@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("shape", r"reset returned an observation of shape \(6, 12, 3\), but its observation_space has \(12, 12, 3\)"),
        ("later", r"step returned an observation of shape \(12, 12, 4\), but its observation_space has \(12, 12, 3\)"),
        ("keys", "reset returned an observation without 'a', which its observation_space has"),
        ("flat", r"reset returned {'c': array\(\[0., 0., 0.\]\)}, but its observation_space is Dict\("),
        ("reset", r"reset must return 2 values \(observation, info\), not "),
        ("old", f"step must return {RETURNS}, not 4"),
        ("alone", f"step must return {RETURNS}, not one float"),
    ],
)
def test_what_breaks_the_contract_of_gymnasium_is_told_in_its_terms(way: str, words: str, registered: bool) -> None:
    name = "odd_environments:Odd/Mistaken-v0" if registered else "odd_environments:Mistaken"
    env = GymnasiumEnv(GymnasiumConfig(name, kwargs=json.dumps({"way": way})), np.random.SeedSequence(0))
    frame = np.empty(env.spec.frame_shape, env.spec.frame_dtype)
    with pytest.raises(UserError, match=f"^Mistaken.{words}"):
        env.reset(frame)
        env.step(0, frame)


def test_an_error_of_the_environment_itself_stays_what_it_is() -> None:
    config = GymnasiumConfig("odd_environments:Mistaken", kwargs='{"way": "own"}')
    env = GymnasiumEnv(config, np.random.SeedSequence(0))
    frame = np.empty(env.spec.frame_shape, env.spec.frame_dtype)
    env.reset(frame)
    with pytest.raises(ValueError, match="too many values to unpack"):
        env.step(0, frame)
