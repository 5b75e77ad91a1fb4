"""Frames decoded from raw screens equal those the environments make themselves, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from phalanx.config import AtariConfig
from phalanx.registry import MakeEnv
from phalanx.sampling.decode import ScreenDecoder

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("frame", ["84x84", "104x80"])
@pytest.mark.parametrize("game", ["breakout", "space_invaders"])
def test_decoded_frames_equal_ready_ones(game, frame, device):
    config = AtariConfig(game, frame=frame, episodic_life=True)
    ready, raw = MakeEnv(config, 5)(0), MakeEnv(config, 5, raw=True)(0)
    assert raw.spec.seen == ready.spec
    decode = ScreenDecoder(config, raw.spec.frame_shape[1], torch.device(device))
    frames = np.zeros((60, *ready.spec.frame_shape), np.uint8)
    screens = np.zeros((60, *raw.spec.frame_shape), np.uint8)
    ready.reset(frames[0])
    raw.reset(screens[0])
    actions = np.random.default_rng(0).integers(ready.spec.actions, size=60)
    for t in range(1, 60):
        ours, theirs = ready.step(actions[t], frames[t]), raw.step(actions[t], screens[t])
        assert (ours.reward, ours.terminated, ours.truncated) == (theirs.reward, theirs.terminated, theirs.truncated)
        if ours.terminated or ours.truncated:
            ready.reset(frames[t])
            raw.reset(screens[t])
    decoded = decode(torch.from_numpy(screens).to(device)).cpu().numpy()
    assert np.array_equal(decoded, frames)
