"""Random streams: none is used twice, none depends on how a run is divided; and the shares of replicas."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config.presets import preset
from phalanx.errors import UserError
from phalanx.registry import MakeEnv
from phalanx.replica.build import make_replica
from phalanx.runtime.device import Compute
from phalanx.runtime.seeds import Role, number, stream
from phalanx.runtime.share import WHOLE, Share
from phalanx.topologies import serial

CPU = Compute(torch.device("cpu"))
PATHS = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 1)]


def with_environments(count):
    experiment = preset("a2c-catch")
    return dataclasses.replace(experiment, sampler=dataclasses.replace(experiment.sampler, environments=count))


def test_no_two_streams_are_alike():
    """Not those of neighbouring seeds, of other roles, or of paths that begin alike."""
    keys = list(itertools.product((0, 1, 2, 2**32, 2**63 - 1), Role, PATHS))
    drawn = {tuple(stream(seed, role, *path).generate_state(4)) for seed, role, path in keys}
    assert len(drawn) == len(keys)
    assert len({number(seed, role, *path) for seed, role, path in keys}) == len(keys)


@given(st.integers(0, 2**63 - 1), st.sampled_from(Role), st.integers(0, 10**6))
def test_a_number_is_a_seed_that_every_generator_takes(seed, role, index):
    value = number(seed, role, index)
    assert 0 <= value < 2**63
    assert value == number(seed, role, index)
    torch.Generator().manual_seed(value)
    np.random.default_rng(value)


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_shares_divide_the_environments(count):
    experiment = with_environments(12)
    parts = [Share(rank, count).part(experiment).sampler.environments for rank in range(count)]
    rows = [Share(rank, count).rows(part) for rank, part in enumerate(parts)]
    assert [index for part in rows for index in range(12)[part]] == list(range(12))


def test_shares_divide_the_replay_memory():
    algorithm = dataclasses.replace(preset("dqn-catch").algorithm, replay_size=1000, learning_starts=101)
    experiment = dataclasses.replace(with_environments(12), algorithm=algorithm)
    part = Share(1, 4).part(experiment).algorithm
    assert (part.replay_size, part.learning_starts) == (250, 26)


def test_environments_that_do_not_divide_are_refused():
    with pytest.raises(UserError, match=r"16 environments do not divide among 3 replicas; use .* 18$"):
        Share(0, 3).part(with_environments(16))


def test_a_share_collects_what_the_whole_collects_there():
    """With the same parameters: the same frames, actions and rewards, by the environment's number in the run."""
    experiment = preset("a2c-catch")

    def collected(share):
        part = share.part(experiment)
        with (
            serial.make_envs(part, CPU, print, share) as envs,
            make_replica(part, envs, CPU, print, share=share) as replica,
        ):
            rollouts = [replica.collector.collect() for _ in range(5)]
            return {name: value.clone() for name, value in rollouts[-1].tensors().items()}

    whole = collected(WHOLE)
    for share in (Share(0, 2), Share(1, 2)):
        part, rows = collected(share), share.rows(experiment.sampler.environments // 2)
        for name in ("frames", "history", "action", "reward", "terminated", "cut"):
            assert torch.equal(part[name], whole[name][:, rows]), name


def test_an_evaluation_plays_other_games_than_training():
    env = preset("a2c-catch").env
    frames = []
    for role in (Role.ENVIRONMENT, Role.EVALUATION):
        made = MakeEnv(env, 0, role=role)(0)
        frame = np.zeros(made.spec.frame_shape, made.spec.frame_dtype)
        games = []
        for _ in range(20):
            made.reset(frame)
            games.append(frame.tobytes())
        frames.append(games)
    assert frames[0] != frames[1]
