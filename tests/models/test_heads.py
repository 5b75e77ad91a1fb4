from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch

from phalanx.config import ModelConfig
from phalanx.models.heads import make_model
from phalanx.types import EnvSpec

GRAY = EnvSpec(frame_shape=(1, 84, 84), frame_dtype=np.uint8, actions=6)
RGB = EnvSpec(frame_shape=(3, 84, 84), frame_dtype=np.uint8, actions=6)


@pytest.mark.parametrize(
    ("config", "spec", "size"),
    [
        (ModelConfig(torso="nips"), GRAY, 677_943),
        (ModelConfig(torso="nature"), GRAY, 1_687_719),
        (ModelConfig(torso="ga3c"), GRAY, 1_005_623),
        (ModelConfig(torso="ba3c", hidden=256), RGB, 538_119),
        (ModelConfig(torso="ba3c"), RGB, 332_295),
        (ModelConfig(torso="ba3c", hidden=64), RGB, 229_383),
        (ModelConfig(torso="ba3c", hidden=32), RGB, 177_927),
        (ModelConfig(torso="ba3c", hidden=16), RGB, 152_199),
    ],
)
def test_parameter_counts_are_the_published_ones(config: ModelConfig, spec: EnvSpec, size: int) -> None:
    model = make_model(config, spec, stack=4)
    assert sum(p.numel() for p in model.parameters()) == size
    assert model.torso.features == model.policy.in_features


@pytest.mark.parametrize("bfloat16", [False, True])
def test_outputs_are_float32_and_depend_on_the_newest_frame(bfloat16: bool) -> None:
    torch.manual_seed(0)
    model = make_model(ModelConfig(torso="nips", init="fan-in"), GRAY, stack=4)
    stacks = torch.randint(0, 256, (3, 4, 1, 84, 84), dtype=torch.uint8)
    history = torch.tensor([4, 2, 1], dtype=torch.uint8)
    other = stacks.clone()
    other[:, 3] = 255 - other[:, 3]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        logits, value = model(stacks, history)
        others, _ = model(other, history)
    assert logits.dtype == value.dtype == torch.float32
    assert logits.shape == (3, 6) and value.shape == (3,)
    assert (logits != others).any(dim=1).all()


def test_heads_are_not_rounded_under_autocast() -> None:
    torch.manual_seed(0)
    model = make_model(ModelConfig(torso="nips", hidden=32), GRAY, stack=4)
    stacks, history = (
        torch.randint(0, 256, (3, 4, 1, 84, 84), dtype=torch.uint8),
        torch.full((3,), 4, dtype=torch.uint8),
    )
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            features, (logits, value) = model.torso(stacks, history), model(stacks, history)
        assert torch.equal(logits, model.policy(features.float()))
        assert torch.equal(value, model.value(features.float()).squeeze(1))


def test_the_seed_of_torch_decides_the_initialisation() -> None:
    for scheme in ("orthogonal", "normc", "fan-in", "ba3c"):
        made = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            model = make_model(ModelConfig(torso="nips", hidden=16, init=cast(Any, scheme)), GRAY, stack=4)
            made.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        assert torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2])
