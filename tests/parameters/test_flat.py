from __future__ import annotations

import contextlib
import copy

import numpy as np
import pytest
import torch
from torch import nn

from phalanx.config import ModelConfig
from phalanx.errors import UserError
from phalanx.models.heads import ActorCritic, make_model
from phalanx.models.torsos import large_layers
from phalanx.parameters.flat import FlatParameters
from phalanx.types import EnvSpec

SPEC = EnvSpec(frame_shape=(1, 84, 84), frame_dtype=np.uint8, actions=6)


def small_model() -> ActorCritic:
    torch.manual_seed(0)
    return make_model(ModelConfig(torso="nature", hidden=32, init="fan-in"), SPEC, stack=2)


def run(model: nn.Module, bfloat16: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of a fixed batch, with the gradients of a loss added to the model's."""
    generator = torch.Generator().manual_seed(1)
    stacks = torch.randint(0, 256, (6, 2, 1, 84, 84), dtype=torch.uint8, generator=generator)
    history = torch.tensor([2, 1, 2, 2, 1, 2], dtype=torch.uint8)
    context = torch.autocast("cpu", torch.bfloat16) if bfloat16 else contextlib.nullcontext()
    with context:
        logits, value = model(stacks, history)
        loss = logits.log_softmax(1)[:, 0].mean() + value.square().mean()
    torch.autograd.backward(loss)
    return logits.detach(), value.detach()


@pytest.mark.parametrize("channels_last", [False, True])
def test_parameters_and_gradients_are_views_of_the_two_vectors(channels_last: bool) -> None:
    model = small_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    flat = FlatParameters(model, channels_last)
    covered = torch.zeros_like(flat.flat)
    for name, parameter in model.named_parameters():
        part = flat.slices[name]
        assert torch.equal(parameter, before[name])
        assert part.stop - part.start == parameter.numel()
        assert parameter.grad is not None and parameter.grad.stride() == parameter.stride()
        assert parameter.data_ptr() == flat.flat[part].data_ptr()
        assert parameter.grad.data_ptr() == flat.grad[part].data_ptr()
        if parameter.dim() == 4:
            assert parameter.is_contiguous(memory_format=torch.channels_last) == channels_last
        covered[part] += 1
    assert torch.equal(covered, torch.ones_like(covered))
    flat.flat.fill_(3.0)
    assert all((p == 3).all() for p in model.parameters())


@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
def test_backward_keeps_adding_in_place(channels_last: bool, bfloat16: bool) -> None:
    model = small_model()
    flat = FlatParameters(model, channels_last)
    places = [p.grad.data_ptr() for p in model.parameters() if p.grad is not None]
    run(model, bfloat16)
    once = flat.grad.clone()
    assert all(once[part].abs().max() > 0 for part in flat.slices.values())
    run(model, bfloat16)
    torch.testing.assert_close(flat.grad, 2 * once)
    flat.grad.zero_()
    run(model, bfloat16)
    assert torch.equal(flat.grad, once)
    assert [p.grad.data_ptr() for p in model.parameters() if p.grad is not None] == places


def test_channels_last_vector_gives_outputs_and_gradients_of_the_plain_model() -> None:
    plain = small_model()
    model = copy.deepcopy(plain)
    FlatParameters(model)
    for ours, theirs in zip(run(model), run(plain), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, atol=1e-5, rtol=1e-4)


def test_named_tensors_move_between_layouts() -> None:
    source = FlatParameters(small_model(), channels_last=True)
    model = small_model()
    target = FlatParameters(model, channels_last=False)
    target.flat.zero_()
    saved = source.named_tensors()
    assert all(tensor.is_contiguous() for tensor in saved.values())
    target.load(saved)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, saved[name])
    saved["policy.bias"].add_(1)
    assert not torch.equal(source.named_tensors()["policy.bias"], saved["policy.bias"])


def test_load_refuses_what_does_not_fit_and_changes_nothing() -> None:
    flat = FlatParameters(small_model())
    before = flat.flat.clone()
    saved = {name: tensor + 1 for name, tensor in flat.named_tensors().items()}
    with pytest.raises(UserError, match=r"policy\.bias"):
        flat.load({name: tensor for name, tensor in saved.items() if name != "policy.bias"})
    with pytest.raises(UserError, match=r"value\.weight has shape \(2, 32\)"):
        flat.load(saved | {"value.weight": torch.zeros(2, 32)})
    assert torch.equal(flat.flat, before)


def test_rounded_copies_give_the_gradients_of_autocast_and_follow_the_vector() -> None:
    plain, model = small_model(), small_model()
    reference = FlatParameters(plain)
    flat = FlatParameters(model, rounded=large_layers(model))
    assert model.torso.dense.weight.dtype == torch.bfloat16 and model.policy.weight.dtype == torch.float32
    for _ in range(2):  # nothing of the first gradient is left in the second
        flat.clear()
        reference.clear()
        for ours, theirs in zip(run(model, bfloat16=True), run(plain, bfloat16=True), strict=True):
            assert torch.equal(ours, theirs)
        flat.gather()
        assert torch.equal(flat.grad, reference.grad)
        for vector in (flat, reference):
            vector.flat.sub_(vector.grad)
            vector.refresh()
    assert torch.equal(model.torso.dense.weight, plain.torso.dense.weight.bfloat16())
    assert torch.equal(flat.named_tensors()["torso.dense.weight"], plain.torso.dense.weight)


def test_rounded_copies_follow_loaded_parameters() -> None:
    saved = {name: tensor + 1 for name, tensor in FlatParameters(small_model()).named_tensors().items()}
    model = small_model()
    FlatParameters(model, rounded=large_layers(model)).load(saved)
    assert torch.equal(model.torso.dense.weight, saved["torso.dense.weight"].bfloat16())


@pytest.mark.parametrize("change", ["refresh", "load"])
def test_parameters_that_change_within_autocast_are_seen_at_once(change: str) -> None:
    """Autocast keeps what it has rounded until its end; a poll within a rollout comes before that."""
    model, fresh = small_model(), small_model()
    flat, other = FlatParameters(model, rounded=large_layers(model)), FlatParameters(fresh)
    with torch.autocast("cpu", torch.bfloat16):
        before = run(model)
        other.flat.add_(torch.randn(len(other.flat), generator=torch.Generator().manual_seed(2)), alpha=0.05)
        if change == "load":
            flat.load(other.named_tensors())
        else:
            flat.flat.copy_(other.flat)
            flat.refresh()
        after = run(model)
    for was, ours, theirs in zip(before, after, run(fresh, bfloat16=True), strict=True):
        assert torch.equal(ours, theirs) and not torch.equal(ours, was)
