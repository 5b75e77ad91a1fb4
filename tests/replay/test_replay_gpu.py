from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from phalanx.config import DQNConfig
from phalanx.learning.learner import materialise
from phalanx.replay import memory
from phalanx.replay.memory import RESERVE, Replay, make_replay
from phalanx.runtime import pages
from phalanx.runtime.pages import unlock_pages
from phalanx.types import EnvSpec, Rollout

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

STACK, ENVIRONMENTS, HORIZON = 3, 4, 16


def rollouts(count: int) -> Iterator[Rollout]:
    """Random rollouts with ends, truncations and cuts."""
    generator = torch.Generator().manual_seed(0)
    shape = (HORIZON, ENVIRONMENTS)
    for _ in range(count):
        kind = torch.rand(shape, generator=generator)
        truncated = (kind > 0.1) & (kind < 0.2)
        frames = torch.randint(256, (STACK + HORIZON, ENVIRONMENTS, 1, 8, 8), generator=generator, dtype=torch.uint8)
        yield Rollout(
            frames=frames,
            history=torch.randint(1, STACK + 1, (HORIZON + 1, ENVIRONMENTS), generator=generator, dtype=torch.uint8),
            action=torch.randint(5, shape, generator=generator),
            log_prob=torch.zeros(shape),
            value=torch.zeros(HORIZON + 1, ENVIRONMENTS),
            reward=torch.rand(shape, generator=generator),
            terminated=kind < 0.1,
            truncated=truncated,
            last_value=torch.zeros(shape),
            cut=(kind > 0.2) & (kind < 0.25),
            version=torch.zeros(shape, dtype=torch.int64),
            last_frames={(t, b): frames[t, b] + 1 for t, b in truncated.nonzero().tolist()},
        )


def on(rollout: Rollout, device: torch.device) -> Rollout:
    values = {name: value.to(device) for name, value in rollout.tensors().items()}
    values["version"] = rollout.version  # stays on the host
    return Rollout(**values, last_frames={key: frame.to(device) for key, frame in rollout.last_frames.items()})


def empty(device: torch.device, prioritized: bool) -> Replay:
    config = DQNConfig(replay_size=400, n_step=3, prioritized=prioritized, checkpoint_replay=True)
    return make_replay(config, EnvSpec((1, 8, 8), np.uint8, 5), STACK, ENVIRONMENTS, device)


def fill(device: torch.device, prioritized: bool) -> Replay:
    replay = empty(device, prioritized)
    for rollout in rollouts(11):
        replay.put(on(rollout, device))
    return replay


@pytest.mark.parametrize("prioritized", [False, True])
def test_a_gpu_reads_what_a_cpu_reads(prioritized: bool) -> None:
    host, card = fill(torch.device("cpu"), prioritized), fill(torch.device("cuda"), prioritized)
    assert len(host.index) == len(card.index)
    batch = host.draw(64, 0.5, torch.Generator().manual_seed(1))
    copy = card.storage.read(batch.ids.cuda(), batch.weight.cuda())
    for name, values in vars(batch).items():
        assert torch.allclose(getattr(copy, name).cpu().double(), values.double()), name
    drawn = materialise(card.draw(64, 0.5, torch.Generator("cuda").manual_seed(1))).ids.cpu()
    assert not host.storage.cut.view(-1)[drawn % host.storage.rows].any()
    host.feedback(batch.ids, batch.returns + 1)
    card.feedback(copy.ids, copy.returns + 1)
    if prioritized:
        difference = card.index.leaves.cpu() - host.index.leaves  # type: ignore[attr-defined]
        assert difference[:-1].abs().max() <= 4  # of 2^24: a power may be rounded differently


@pytest.mark.parametrize("prioritized", [False, True])
def test_nothing_between_draw_and_feedback_waits_for_the_gpu(prioritized: bool) -> None:
    replay = fill(torch.device("cuda"), prioritized)
    generator = torch.Generator("cuda").manual_seed(0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch = materialise(replay.draw(64, 0.5, generator))
        replay.feedback(batch.ids, batch.returns.abs())
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("prioritized", [False, True])
def test_frames_on_the_host_are_read_as_those_on_the_card(
    prioritized: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = torch.device("cuda")
    on_card = fill(cuda, prioritized)
    free = {"cuda": 400 * 64 - 1 + RESERVE, "cpu": 2 * RESERVE}  # nearly enough
    monkeypatch.setattr(memory, "free_bytes", lambda device: free[device.type])
    on_host = fill(cuda, prioritized)
    restored = empty(cuda, prioritized)
    assert [replay.storage.frames_on_host for replay in (on_card, on_host, restored)] == [False, True, True]
    saver = on_host.saver()
    assert saver is not None
    saver(tmp_path)
    restored.restore(on_host.state(), tmp_path)
    expected = materialise(on_card.draw(64, 0.5, torch.Generator(cuda).manual_seed(1)))
    for replay in (on_host, restored):
        batch = materialise(replay.draw(64, 0.5, torch.Generator(cuda).manual_seed(1)))
        for name, values in vars(batch).items():
            assert torch.equal(values, getattr(expected, name)), name


def test_frames_on_the_host_take_nothing_of_the_card_and_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    unlocked = []
    monkeypatch.setattr(pages, "unlock_pages", lambda array: unlocked.append(array) or unlock_pages(array))
    before = torch.cuda.memory_allocated()
    frames = pages.mapped_zeros((1000, 84, 84), np.dtype(np.uint8), torch.device("cuda"))
    assert torch.cuda.memory_allocated() == before
    frames += 1
    half = frames[500:]
    del frames
    gc.collect()
    assert int(half.sum()) == 500 * 84 * 84  # a view keeps the memory
    assert not unlocked
    del half
    gc.collect()
    (array,) = unlocked
    assert array.nbytes == 1000 * 84 * 84
