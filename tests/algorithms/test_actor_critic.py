"""A2C and PPO are the same step where they must be: on fresh rollouts, before the policy has moved."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.algorithms.a2c import A2C, log_probabilities, over_the_batch
from phalanx.algorithms.ppo import PPO
from phalanx.algorithms.returns import vtrace
from phalanx.config import A2CConfig, ModelConfig, PPOConfig
from phalanx.models.heads import make_model
from phalanx.parameters.flat import FlatParameters
from phalanx.replay.latest import LatestRollout
from phalanx.runtime.clocks import Clocks
from phalanx.sampling.answers import allocate_rollout
from phalanx.sampling.segments import Segment, merged
from phalanx.types import EnvSpec, PolicyBatch, Progress, Rollout

ROWS = 32
CPU = torch.device("cpu")


@pytest.fixture
def setting():
    torch.manual_seed(0)
    model = make_model(ModelConfig(torso="mlp", init="fan-in"), EnvSpec((6,), np.float32, 4), 1)
    stacks, history = torch.randn(ROWS, 1, 6), torch.ones(ROWS, dtype=torch.uint8)
    action = torch.randint(4, (ROWS,))
    with torch.no_grad():
        logits, value = model(stacks, history)
    log_prob = torch.log_softmax(logits, 1).gather(1, action[:, None]).squeeze(1)
    advantage, weight = torch.randn(ROWS), (torch.rand(ROWS) > 0.2).float()
    _, share = over_the_batch(advantage, weight, normalize=False)
    batch = PolicyBatch(stacks, history, action, log_prob, value, value + advantage, advantage, share)
    return model, FlatParameters(model), batch


def gradient(algorithm, model, parameters, batch):
    parameters.grad.zero_()
    algorithm.loss(model, batch, {"clip": torch.tensor(0.1)}).total.backward()
    return parameters.grad.clone()


def test_a_first_step_of_ppo_is_one_of_a2c(setting):
    ppo = PPO(PPOConfig(normalize_advantage=False, value_coef=1.0, entropy_coef=0.02), total_steps=1)
    a2c = A2C(A2CConfig(value_coef=0.5, entropy_coef=0.02))
    assert torch.allclose(gradient(ppo, *setting), gradient(a2c, *setting), atol=1e-6)


@given(seed=st.integers(0, 2**32 - 1), spread=st.floats(0.01, 1.0), clip=st.floats(0.02, 0.4))
@settings(max_examples=50, deadline=None)
def test_the_policy_loss_is_the_papers_clipped_objective(seed, spread, clip):
    """And so are its gradient and the share of rows that are clipped, with rows far from the old policy."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(64, 4, generator=generator, requires_grad=True)
    action = torch.randint(4, (64,), generator=generator)
    log_prob = torch.log_softmax(logits, 1).gather(1, action[:, None]).squeeze(1)
    old = log_prob.detach() + spread * torch.randn(64, generator=generator) * (torch.arange(64) % 4 > 0)
    advantage, nothing = torch.randn(64, generator=generator), torch.zeros(64)
    batch = PolicyBatch(nothing, nothing, action, old, nothing, nothing, advantage, torch.full((64,), 1 / 64))
    config = PPOConfig(normalize_advantage=False, value_coef=0.0, entropy_coef=0.0)
    loss = PPO(config, total_steps=1).loss(lambda *_: (logits, nothing), batch, {"clip": torch.tensor(clip)})
    (ours,) = torch.autograd.grad(loss.total, logits, retain_graph=True)
    ratio = (log_prob - old).exp()
    limited = ratio.clamp(1 - torch.tensor(clip), 1 + torch.tensor(clip))
    objective = torch.minimum(ratio * advantage, limited * advantage)
    (theirs,) = torch.autograd.grad(-objective.mean(), logits)
    torch.testing.assert_close(loss.total, -objective.mean())
    torch.testing.assert_close(ours, theirs)
    outside = ((ratio < 1 - clip) | (ratio > 1 + clip)).float().mean()
    torch.testing.assert_close(loss.metrics["loss/clipped"], outside, atol=1 / 64 + 1e-6, rtol=0)


def test_importance_changes_nothing_on_a_fresh_rollout(setting):
    plain, corrected = A2C(A2CConfig()), A2C(A2CConfig(importance=True))
    assert torch.allclose(gradient(plain, *setting), gradient(corrected, *setting), atol=1e-6)


def test_importance_shrinks_what_the_policy_would_hardly_do_any_more(setting):
    model, parameters, batch = setting
    batch.log_prob = batch.log_prob + 1.0  # the collecting policy liked these actions e times as much
    halved = A2C(A2CConfig(importance=True, value_coef=0.0, entropy_coef=0.0))
    plain = A2C(A2CConfig(value_coef=0.0, entropy_coef=0.0))
    ours, theirs = gradient(halved, model, parameters, batch), gradient(plain, model, parameters, batch)
    assert torch.allclose(ours * np.e, theirs, atol=1e-5)


def test_the_policy_moves_towards_what_turned_out_well(setting):
    """One step down the loss makes actions with a positive advantage likelier."""
    model, parameters, batch = setting
    a2c = A2C(A2CConfig(value_coef=0.0, entropy_coef=0.0))
    parameters.flat -= 0.01 * gradient(a2c, model, parameters, batch)
    with torch.no_grad():
        log_prob = (
            torch.log_softmax(model(batch.stacks, batch.history)[0], 1).gather(1, batch.action[:, None]).squeeze(1)
        )
    assert float(((log_prob - batch.log_prob) * batch.advantage * batch.weight).sum()) > 0


def test_rows_of_weight_zero_count_for_nothing(setting):
    model, parameters, batch = setting
    kept = batch[batch.weight > 0]
    for algorithm in (A2C(A2CConfig()), PPO(PPOConfig(), total_steps=1)):
        whole, part = gradient(algorithm, model, parameters, batch), gradient(algorithm, model, parameters, kept)
        assert torch.allclose(whole, part, atol=1e-6)


def test_normalised_advantages_have_no_mean_and_unit_deviation_over_the_rows_that_count():
    advantage, weight = torch.tensor([1.0, 5.0, 3.0, 100.0]), torch.tensor([1.0, 1.0, 1.0, 0.0])
    rows, share = over_the_batch(advantage, weight, normalize=True)
    assert torch.allclose(rows[:3], torch.tensor([-1.0, 1.0, 0.0]) * (1.5**0.5))
    assert torch.allclose(share, weight / 3)


def test_minibatches_are_normalised_each_by_itself():
    advantage, weight = torch.randn(3, 16), (torch.rand(3, 16) > 0.3).float()
    together = over_the_batch(advantage, weight, normalize=True)
    for number in range(3):
        alone = over_the_batch(advantage[number], weight[number], normalize=True)
        torch.testing.assert_close([both[number] for both in together], list(alone), rtol=0, atol=0)


def test_the_discount_moves_on_the_clock_of_steps():
    """From `discount` to `final_discount`: what the rows of a batch return tells which one was used."""
    rollout = allocate_rollout(EnvSpec((6,), np.float32, 4), environments=1, stack=1, horizon=2, device=CPU)
    rollout.reward[1] = 1.0
    rollout.terminated[1] = True
    experience = LatestRollout()
    experience.put(rollout)
    ppo = PPO(PPOConfig(discount=0.5, final_discount=0.9, discount_length=100, gae_lambda=1.0, minibatches=1), 10_000)
    clocks = Clocks()
    for steps, discount in ((0, 0.5), (50, 0.7), (100, 0.9), (5_000, 0.9)):
        clocks.restore(Progress(steps=steps))
        batch = next(ppo.batches(experience, clocks.now, torch.Generator()))
        torch.testing.assert_close(batch.rows.returns, torch.tensor([discount, 1.0]))
    assert PPO(PPOConfig(discount=0.5), 100).discount(Progress(steps=70)) == 0.5


@pytest.mark.parametrize("guard", ["add", "max"])
def test_the_guard_of_ga3c_bounds_the_gradient_of_what_has_become_improbable(guard):
    """Of log(pi + eps) it is pi (1 - pi) / (pi + eps); of log(max(pi, eps)) it is 1 - pi, and nothing below eps."""
    floor = 1e-3
    for logit in (-12.0, -7.5, -2.0, 0.0, 3.0):
        logits = torch.tensor([[0.0, logit]], dtype=torch.float64, requires_grad=True)
        guarded, probs = log_probabilities(logits, floor, guard)
        (slope,) = torch.autograd.grad(guarded[0, 1], logits)
        pi = float(probs[0, 1].detach())
        if guard == "add":
            assert guarded[0, 1].item() == pytest.approx(math.log(pi + floor))
            assert float(slope[0, 1]) == pytest.approx(pi * (1 - pi) / (pi + floor))
        else:
            assert guarded[0, 1].item() == pytest.approx(math.log(max(pi, floor)))
            assert float(slope[0, 1]) == pytest.approx(1 - pi if pi > floor else 0.0)
    assert torch.equal(log_probabilities(logits)[0], torch.log_softmax(logits, 1))


@pytest.mark.parametrize("importance", [False, True])
@pytest.mark.parametrize(("guard", "guarded"), [("add", lambda pi: pi + 0.1), ("max", lambda pi: max(pi, 0.1))])
def test_the_loss_of_ga3c_in_closed_form(guard, guarded, importance):
    """Policy and entropy terms have the same guard, the entropy's outer probability none."""
    probs = [[0.7, 0.2, 0.1], [0.05, 0.05, 0.9], [0.02, 0.5, 0.48]]
    action, advantage, weight = [1, 0, 2], [2.0, -1.5, 0.5], [1.0, 2.0, 0.5]
    returns, value, old = [1.0, -2.0, 0.5], [0.5, 1.0, 0.5], [0.4, 0.01, 0.5]
    policy = value_loss = entropy = 0.0
    for pi, a, gain, w, target, v, before in zip(probs, action, advantage, weight, returns, value, old, strict=True):
        ratio = min(1.0, guarded(pi[a]) / before) if importance else 1.0
        policy -= w * math.log(guarded(pi[a])) * gain * ratio
        value_loss += w * (target - v) ** 2
        entropy -= w * sum(p * math.log(guarded(p)) for p in pi)
    rows = {"log_prob": torch.tensor(old).log(), "value": torch.zeros(3), "returns": torch.tensor(returns)}
    batch = PolicyBatch(
        stacks=torch.zeros(3),
        history=torch.zeros(3),
        action=torch.tensor(action),
        advantage=torch.tensor(advantage),
        weight=torch.tensor(weight),
        **rows,
    )
    config = A2CConfig(
        value_coef=0.5, entropy_coef=0.3, loss_scale=2.0, log_floor=0.1, log_guard=guard, importance=importance
    )
    loss = A2C(config).loss(lambda *_: (torch.tensor(probs).log(), torch.tensor(value)), batch, {})
    metrics = {name.removeprefix("loss/"): float(metric) for name, metric in loss.metrics.items()}
    assert metrics == pytest.approx({"policy": policy, "value": value_loss, "entropy": entropy}, rel=1e-5)
    assert float(loss.total) == pytest.approx(2.0 * (policy + 0.5 * value_loss - 0.3 * entropy), rel=1e-5)


@pytest.mark.parametrize("floor", [0.0, 0.3])
def test_v_trace_of_merged_segments_is_that_of_each_by_itself(setting, floor):
    """One of full length, one that terminated early, and one that was truncated with its first step."""
    model, horizon = setting[0], 4
    config = A2CConfig(vtrace=True, discount=0.9, gae_lambda=0.8, log_floor=floor, reduction="sum")
    segments, generator = [], np.random.default_rng(0)
    for steps in (4, 2, 1):
        empty = allocate_rollout(EnvSpec((6,), np.float32, 4), 1, 1, horizon, CPU)
        columns = {name: part[:, 0].numpy() for name, part in empty.tensors().items() if name != "frames"}
        columns["history"][:] = 1
        columns["action"][:] = generator.integers(4, size=horizon)
        columns["log_prob"][:] = np.log(generator.uniform(0.1, 0.9, horizon))
        columns["reward"][:steps] = generator.standard_normal(steps)
        columns["value"][:] = 1e3  # of collection time, which counts for nothing
        columns["cut"][steps:] = True
        columns["terminated"][1], columns["truncated"][0] = steps == 2, steps == 1
        columns["last_value"][0] = 3.0 * (steps == 1)
        frames = torch.from_numpy(generator.standard_normal((horizon + 1, 6)).astype(np.float32))
        segments.append(Segment(frames, columns, steps, steps))
    a2c, experience = A2C(config, model), LatestRollout()
    experience.put(merged(segments))
    (rows,) = a2c.batches(experience, Progress, torch.Generator())
    returns, advantage, weight = (part.view(horizon, 3) for part in (rows.returns, rows.advantage, rows.weight))
    for b, segment in enumerate(segments):
        now, own = slice(segment.steps), {name: torch.from_numpy(part) for name, part in segment.columns.items()}
        with torch.no_grad():
            logits, value = model(segment.frames[: segment.steps + 1, None], own["history"][: segment.steps + 1])
        log_probs = (torch.softmax(logits, 1) + floor).log()
        chosen = log_probs[:-1].gather(1, own["action"][now, None])[:, 0]
        column = [own[name][now, None] for name in ("terminated", "truncated", "last_value", "cut")]
        ratio, reward = (chosen - own["log_prob"][now])[:, None], own["reward"][now, None]
        target, gain = vtrace(ratio, reward, value[:, None], *column, 0.9, 0.8)
        torch.testing.assert_close(returns[now, b], target[:, 0])
        torch.testing.assert_close(advantage[now, b], gain[:, 0])
        assert weight[:, b].tolist() == [1.0] * segment.steps + [0.0] * (horizon - segment.steps)


def test_a_sum_grows_with_the_batch_and_a_mean_does_not(setting):
    """Each row of GA3C's loss counts in full, however many are merged."""
    model = setting[0]
    rollout = allocate_rollout(EnvSpec((6,), np.float32, 4), 2, 1, 3, CPU)
    rollout.reward[:] = torch.randn(3, 2)
    rollout.frames[:] = torch.randn(4, 2, 6)
    rollout.history[:] = 1
    twice = Rollout(**{name: torch.cat([part, part], 1) for name, part in rollout.tensors().items()})
    for reduction, factor in (("sum", 2.0), ("mean", 1.0)):
        losses = []
        for one in (rollout, twice):
            a2c, experience = A2C(A2CConfig(reduction=reduction)), LatestRollout()
            experience.put(one)
            (rows,) = a2c.batches(experience, Progress, torch.Generator())
            losses.append(a2c.loss(model, rows, {}).total.item())
        assert losses[1] == pytest.approx(factor * losses[0], rel=1e-5)
