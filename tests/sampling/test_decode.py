"""Frames decoded from raw screens equal those the environments make themselves, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from phalanx.config import AtariConfig
from phalanx.envs import frames as plain
from phalanx.envs.frames import compiled
from phalanx.envs.screen import palette
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


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=60, deadline=None)
@given(
    arrays(np.uint8, (2, 210, 20), elements=st.integers(0, 255), fill=st.integers(0, 255)),
    st.integers(1, 8),
    st.integers(1, 2),
)
def test_104x80_frames_of_any_screens_are_the_same_from_all_implementations(device, tiles, width, depth):
    screens = np.ascontiguousarray(np.resize(tiles.repeat(width, 2), (2, 210, 160)))[:depth]
    decode = ScreenDecoder(AtariConfig(frame="104x80"), 210, torch.device(device))
    decoded = decode(torch.from_numpy(screens)[None].to(device)).cpu().numpy()
    for frames in filter(None, (plain, compiled())):
        frame = np.zeros((1, 104, 80), np.uint8)
        frames.half_frame(screens[0], screens[-1], palette(210).grey.tobytes(), frame)
        assert np.array_equal(decoded[0], frame)
