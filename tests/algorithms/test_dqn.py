from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from phalanx.algorithms.dqn import DQN, value_of_best
from phalanx.algorithms.schedules import Schedule
from phalanx.config import C51Config, DQNConfig, ModelConfig
from phalanx.models.q_heads import ScaledGradient, make_q_model
from phalanx.models.q_policies import EpsilonGreedyPolicy, random_action
from phalanx.replay.memory import Replay, make_replay
from phalanx.runtime.clocks import Clocks
from phalanx.runtime.device import Compute
from phalanx.types import AheadBatch, EnvSpec, Progress, ReplayBatch, Rollout

CPU = Compute(torch.device("cpu"))


class Table(nn.Module):
    """Q-values looked up by the number in the newest frame."""

    def __init__(self, values: list[list[float]]) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.tensor(values))

    def forward(self, stacks: Tensor, history: Tensor) -> Tensor:
        return self.values[stacks[:, -1, 0].long()]


def batch_of(state: list[int], action: list[int], returns: list[float], following: list[int], discount: list[float],
             weight: list[float]) -> ReplayBatch:  # fmt: skip
    ones = torch.ones(len(state), dtype=torch.uint8)
    return ReplayBatch(
        stacks=torch.tensor(state).view(-1, 1, 1),
        history=ones,
        action=torch.tensor(action),
        returns=torch.tensor(returns),
        next_stacks=torch.tensor(following).view(-1, 1, 1),
        next_history=ones,
        next_discount=torch.tensor(discount),
        weight=torch.tensor(weight),
        ids=torch.arange(len(state)),
    )


def make_dqn(values: list[list[float]], target: list[list[float]], **flags: object) -> tuple[DQN, Table]:
    model = Table(values)
    algorithm = DQN(dataclasses.replace(DQNConfig(), **flags), model, rollout_steps=32)  # type: ignore[arg-type]
    algorithm.target = Table(target)
    return algorithm, model


@pytest.mark.parametrize(("double", "bootstrap"), [(False, 5.0), (True, 3.0)])
def test_loss_in_closed_form(double: bool, bootstrap: float) -> None:
    """The target network likes action 1 of state 1 best (5), the learnt one action 0, which the target values at 3."""
    values, target = [[0.5, 1.0], [9.0, 2.0]], [[0.0, 0.0], [3.0, 5.0]]
    algorithm, model = make_dqn(values, target, double=double, huber=1.0)
    batch = batch_of([0, 0], [0, 1], [0.4, 0.7], [1, 1], [0.1, 0.0], [1.0, 0.5])
    loss = algorithm.loss(model, batch, {})
    first = 0.4 + 0.1 * bootstrap - 0.5  # below 1: quadratic
    second = 0.7 - 1.0  # terminated: no bootstrap
    assert loss.total.item() == pytest.approx((0.5 * first**2 + 0.5 * 0.5 * second**2) / 2)
    assert loss.priorities is not None
    assert loss.priorities.tolist() == pytest.approx([abs(first), abs(second)])
    loss.total.backward()
    assert model.values.grad is not None
    expected = torch.tensor([[-first / 2, -0.5 * second / 2], [0.0, 0.0]])
    assert torch.allclose(model.values.grad, expected)


def test_large_errors_count_linearly_and_their_priority_is_clipped() -> None:
    algorithm, model = make_dqn([[0.0, 0.0]], [[0.0, 0.0]], huber=2.0)
    loss = algorithm.loss(model, batch_of([0, 0], [0, 1], [10.0, 0.0], [0, 0], [0.0, 0.0], [1.0, 1.0]), {})
    assert loss.total.item() == pytest.approx(2.0 * (10.0 - 1.0) / 2)
    assert loss.priorities is not None
    assert loss.priorities.tolist() == pytest.approx([2.0, 1e-6])


def test_value_of_best() -> None:
    values, chooser = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), torch.tensor([[0.0, 9.0, 0.0], [7.0, 0.0, 0.0]])
    assert value_of_best(values, chooser).tolist() == [2.0, 4.0]


class Memory:
    """Says when it is ready and counts what is drawn."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.exponents: list[float] = []
        self.drawn: list[ReplayBatch] = []

    def ready(self, rows: int) -> bool:
        return self.rows >= rows

    def draw(self, batch_size: int, importance_exponent: float, generator: torch.Generator) -> ReplayBatch:
        self.exponents.append(importance_exponent)
        state = torch.randint(2, (2, batch_size), generator=generator).tolist()
        some = [0.5] * batch_size
        self.drawn.append(batch_of(state[0], [0] * batch_size, some, state[1], some, some))
        return self.drawn[-1]


def at(steps: int) -> Clocks:
    """The clocks of a run that has collected so many steps."""
    clocks = Clocks()
    clocks.count(steps=steps)
    return clocks


def count_batches(algorithm: DQN, rows: int, steps: int) -> int:
    return len(list(algorithm.batches(Memory(rows), at(steps).now, torch.Generator())))  # type: ignore[arg-type]


def test_learning_starts_when_due_and_keeps_its_intensity() -> None:
    config = DQNConfig(learning_starts=100, batch_size=16, intensity=8.0)
    algorithm = DQN(config, Table([[0.0], [1.0]]), rollout_steps=32)
    assert count_batches(algorithm, rows=100, steps=99) == 0
    assert count_batches(algorithm, rows=100, steps=100) == 16
    assert count_batches(algorithm, rows=40, steps=500) == 0, "resumed with an empty memory"


@pytest.mark.parametrize("flags", [{}, {"prioritized": True}, {"target_clock": "updates"}])
def test_batches_drawn_ahead_are_those_of_single_draws(flags: dict[str, Any]) -> None:
    config = DQNConfig(learning_starts=0, batch_size=64, intensity=20.0, **flags)  # 10 batches
    algorithm, memory = DQN(config, Table([[0.0, 3.0], [1.0, 0.5]]), rollout_steps=32), Memory(1)
    batches = list(algorithm.batches(memory, at(0).now, torch.Generator()))  # type: ignore[arg-type]
    ahead = not flags  # priorities, or the target network, may change between two updates
    assert [len(drawn.ids) for drawn in memory.drawn] == ([256, 256, 128] if ahead else [64] * 10)
    assert [len(batch.ids) for batch in batches] == [64] * 10
    assert all(isinstance(batch, AheadBatch) == ahead for batch in batches)
    plain = [drawn[start : start + 64] for drawn in memory.drawn for start in range(0, len(drawn.ids), 64)]
    for batch, alone in zip(batches, plain, strict=True):
        assert torch.equal(algorithm.target_values(batch), algorithm.target_values(alone))
        assert torch.equal(
            algorithm.loss(algorithm.model, batch, {}).total, algorithm.loss(algorithm.model, alone, {}).total
        )


def test_importance_exponent_grows_to_one() -> None:
    config = DQNConfig(learning_starts=0, batch_size=32, intensity=1.0, importance_start=0.4, importance_length=200)
    algorithm, memory = DQN(config, Table([[0.0], [1.0]]), rollout_steps=32), Memory(1)
    for steps in (0, 100, 400):
        list(algorithm.batches(memory, at(steps).now, torch.Generator()))  # type: ignore[arg-type]
    assert memory.exponents == pytest.approx([0.4, 0.7, 1.0])


@pytest.mark.parametrize("clock", ["steps", "updates"])
def test_target_is_refreshed_by_its_clock(clock: str) -> None:
    model = Table([[1.0]])
    algorithm = DQN(DQNConfig(target_every=10, target_clock=clock), model, rollout_steps=32)  # type: ignore[arg-type]
    seen = []
    for tick in (3, 9, 10, 19, 35, 39):
        model.values.data.fill_(float(tick))
        algorithm.refresh_target(Progress(**{clock: tick}))
        seen.append(algorithm.target.values.item())  # type: ignore[union-attr, operator]
    assert seen == [3.0, 3.0, 10.0, 10.0, 35.0, 35.0]
    assert not any(parameter.requires_grad for parameter in algorithm.target.parameters())


def test_a_target_whose_copy_was_interrupted_is_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Table([[1.0, 2.0]])
    algorithm = DQN(DQNConfig(target_every=10), model, rollout_steps=32)
    model.values.data.fill_(5.0)

    def interrupted() -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(algorithm.target, "parameters", interrupted)
        algorithm.refresh_target(Progress(steps=25))
    algorithm.refresh_target(Progress(steps=25))
    assert algorithm.target.values.tolist() == [[5.0, 5.0]]  # type: ignore[union-attr, operator]


def test_target_survives_a_checkpoint() -> None:
    model = Table([[1.0, 2.0]])
    algorithm = DQN(DQNConfig(target_every=10), model, rollout_steps=32)
    algorithm.refresh_target(Progress(steps=25))
    restored = DQN(DQNConfig(target_every=10), Table([[7.0, 7.0]]), rollout_steps=32)
    restored.restore(algorithm.state())
    restored.refresh_target(Progress(steps=29))
    assert restored.target.values.tolist() == [[1.0, 2.0]]  # type: ignore[union-attr, operator]


def corridor(steps: int, seed: int) -> Rollout:
    """Random walks on 4 states: action 1 goes right, 0 left; right of state 3 ends the episode with reward 1."""
    random = np.random.default_rng(seed)
    frames, history, action, reward, ended = np.zeros((steps + 1, 1, 1)), [], [], [], []
    state, age = 0, 0
    for t in range(steps):
        frames[t], age = state, min(age + 1, 1)
        history.append(age)
        move = int(random.integers(2))
        done = move == 1 and state == 3
        action.append(move)
        reward.append(float(done))
        ended.append(done)
        state = 0 if done else max(state + (1 if move else -1), 0)
    frames[steps] = state

    def column(values: list[float] | list[int] | list[bool], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype)[:, None]

    zeros = torch.zeros(steps, 1)
    return Rollout(
        frames=torch.from_numpy(frames).float(),
        history=column([*history, 1], torch.uint8),
        action=column(action, torch.int64),
        log_prob=zeros,
        value=torch.zeros(steps + 1, 1),
        reward=column(reward, torch.float32),
        terminated=column(ended, torch.bool),
        truncated=zeros.bool(),
        last_value=zeros,
        cut=zeros.bool(),
        version=torch.zeros(steps, 1, dtype=torch.int64),
    )


@pytest.mark.parametrize("flags", [{}, {"double": True, "prioritized": True}])
def test_it_learns_the_corridor(flags: dict[str, bool]) -> None:
    config = DQNConfig(
        discount=0.5, batch_size=64, intensity=64.0, learning_starts=100, replay_size=400, target_every=10,
        target_clock="updates", **flags,
    )  # fmt: skip
    spec = EnvSpec((1,), np.float32, actions=2)
    memory: Replay = make_replay(config, spec, 1, 1, CPU.device)
    model = Table([[0.0, 0.0] for _ in range(4)])
    algorithm = DQN(config, model, rollout_steps=400)
    memory.put(corridor(400, seed=0))
    optimizer = torch.optim.SGD(model.parameters(), lr=8.0)
    clocks = at(400)
    for batch in algorithm.batches(memory, clocks.now, torch.Generator().manual_seed(0)):
        loss = algorithm.loss(model, batch, {})
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
        assert loss.priorities is not None
        memory.feedback(batch.ids, loss.priorities)
        clocks.count(updates=1)
    expected = torch.tensor([[1 / 16, 1 / 8], [1 / 16, 1 / 4], [1 / 8, 1 / 2], [1 / 4, 1.0]])
    assert torch.allclose(model.values.detach(), expected, atol=0.01)


SPEC = EnvSpec((1, 36, 36), np.uint8, actions=3)


def test_dueling_values_are_value_plus_centred_advantage() -> None:
    torch.manual_seed(0)
    model = make_q_model(ModelConfig(torso="nips", hidden=16), DQNConfig(dueling=True), SPEC, stack=2)
    stacks, history = torch.randint(256, (5, 2, *SPEC.frame_shape), dtype=torch.uint8), torch.full((5,), 2)
    features = model.head.torso(stacks, history)
    value, advantage = (
        model.head.output[name](torch.relu(model.head.hidden[name](features)))  # type: ignore[union-attr, index]
        for name in ("value", "advantage")
    )
    expected = value + advantage - advantage.mean(1, keepdim=True)
    assert torch.allclose(model(stacks, history), expected, atol=1e-6)
    assert torch.allclose(model(stacks, history).mean(1), value.squeeze(1), atol=1e-6)


@pytest.mark.parametrize("torso", ["nips", "mlp"])
def test_dueling_scales_the_gradient_of_the_trunk_alone(torso: str) -> None:
    spec = SPEC if torso == "nips" else EnvSpec((4,), np.float32, actions=3)
    torch.manual_seed(0)
    model = make_q_model(ModelConfig(torso=torso, hidden=16), DQNConfig(dueling=True), spec, stack=2)  # type: ignore[arg-type]
    stacks = torch.randint(256, (5, 2, *spec.frame_shape)).to(torch.uint8 if torso == "nips" else torch.float32)
    gradients = []
    for factor in (1.0, 1 / math.sqrt(2)):
        scales = [module for module in model.modules() if isinstance(module, ScaledGradient)]
        assert len(scales) == 1 and scales[0].factor in (1.0, 1 / math.sqrt(2))
        scales[0].factor = factor
        model.zero_grad()
        model(stacks, torch.full((5,), 2)).square().sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == dict(model.named_parameters()).keys()
    for name, plain in gradients[0].items():
        factor = 1 / math.sqrt(2) if "torso" in name else 1.0
        assert torch.allclose(gradients[1][name], factor * plain, atol=1e-6, rtol=1e-4), name


def test_the_scale_of_a_new_dueling_model_is_one_over_root_two() -> None:
    model = make_q_model(ModelConfig(torso="nips"), DQNConfig(dueling=True), SPEC, stack=2)
    assert [m.factor for m in model.modules() if isinstance(m, ScaledGradient)] == [1 / math.sqrt(2)]


@pytest.mark.parametrize("config", [DQNConfig(), DQNConfig(dueling=True), C51Config(), C51Config(dueling=True)])
def test_models_give_one_value_per_action_and_ignore_old_frames(config: DQNConfig) -> None:
    model = make_q_model(ModelConfig(torso="nips", hidden=16), config, SPEC, stack=3)
    stacks = torch.randint(256, (2, 3, *SPEC.frame_shape), dtype=torch.uint8)
    history = torch.tensor([1, 3], dtype=torch.uint8)
    q = model(stacks, history)
    assert q.shape == (2, 3)
    stacks[0, :2] = 0
    assert torch.equal(model(stacks, history), q)
    stacks[1, :2] = 0
    assert not torch.equal(model(stacks, history)[1], q[1])


ALL = slice(None)


def begun(policy: EpsilonGreedyPolicy, steps: int = 0) -> EpsilonGreedyPolicy:
    policy.begin(Progress(steps=steps))
    return policy


def policy_of(epsilon: float, spread: float = 0.0, environments: int = 1) -> EpsilonGreedyPolicy:
    model = Table([[0.0, 3.0, 1.0, 2.0]])
    return EpsilonGreedyPolicy(model, CPU, Schedule(epsilon, epsilon, 0), spread, environments)


def states(count: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(count, 1, 1), torch.ones(count, dtype=torch.uint8)


def test_numbers_below_epsilon_is_spread_evenly_over_the_actions() -> None:
    uniform = torch.tensor([0.0, 0.09, 0.1, 0.19, 0.2, 0.29, 0.3, 0.3999, 0.4, 0.41, 0.999])
    output = begun(policy_of(0.4)).act(*states(11), uniform, ALL)
    assert output.action.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 1, 1, 1]
    assert output.value.tolist() == [3.0] * 11
    assert output.log_prob.tolist() == [0.0] * 11
    assert policy_of(0.4).value(*states(2)).tolist() == [0.0, 0.0], "nothing is asked of the network"


def test_random_actions_are_uniform_for_any_epsilon() -> None:
    for epsilon in (1.0, 0.1, 0.001):
        uniform = torch.arange(1000) / 1000 * epsilon
        actions = random_action(uniform, torch.full_like(uniform, epsilon), 4)
        assert torch.bincount(actions, minlength=4).sub(250).abs().max() <= 1


def test_without_epsilon_every_action_is_greedy() -> None:
    uniform = torch.rand(100, generator=torch.Generator().manual_seed(0))
    uniform[0] = 0.0
    assert begun(policy_of(0.0)).act(*states(100), uniform, ALL).action.unique().tolist() == [1]


def test_a_schedule_without_length_has_ended() -> None:
    assert Schedule(1.0, 0.1, 0)(Progress()) == 0.1
    assert Schedule(1.0, 0.5, 1)(Progress(steps=1)) == 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_scaled_gradient_is_the_identity_before_it_is_scaled(dtype: torch.dtype) -> None:
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    y = ScaledGradient(1 / math.sqrt(2))(x)
    assert torch.equal(y, x)
    y.sum().backward()
    assert x.grad is not None and (x.grad == torch.tensor(1 / math.sqrt(2), dtype=dtype)).all()


def test_epsilon_follows_its_schedule_but_not_in_evaluation() -> None:
    model, uniform = Table([[0.0, 1.0]]), torch.tensor([0.2])
    policy = EpsilonGreedyPolicy(model, CPU, Schedule(1.0, 0.0, 100))
    assert begun(policy, 0).act(*states(1), uniform, ALL).action.tolist() == [0]
    assert begun(policy, 90).act(*states(1), uniform, ALL).action.tolist() == [1]
    judged = EpsilonGreedyPolicy.evaluation(model, CPU, 0.05)
    assert begun(judged).act(*states(1), uniform, ALL).action.tolist() == [1]
    assert begun(judged).act(*states(1), torch.tensor([0.01]), ALL).action.tolist() == [0]


def test_spread_gives_each_environment_its_own_epsilon() -> None:
    """Of three environments the epsilons are .5, .5 ** 2 and .5 ** 3."""
    policy = policy_of(0.5, spread=2.0, environments=3)
    act = [
        begun(policy).act(*states(3), torch.full((3,), number), ALL).action.tolist() for number in (0.49, 0.24, 0.12)
    ]
    assert act == [[3, 1, 1], [1, 3, 1], [0, 1, 3]]
    part = begun(policy).act(*states(2), torch.full((2,), 0.24), slice(1, 3))
    assert part.action.tolist() == [3, 1]
