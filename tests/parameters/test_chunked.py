"""Many learners around central parameters: nothing is lost, and who dies in the middle breaks nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from phalanx.config import OptimizerConfig
from phalanx.errors import RunError
from phalanx.parameters import chunked
from phalanx.parameters.chunked import CentralLayout, CentralParameters, ChunkLockedStore
from phalanx.parameters.flat import FlatParameters
from phalanx.parameters.rules import make_clip, make_rule
from phalanx.types import Gradient

SGD = OptimizerConfig(rule="sgd", clip="none")
ADAM = OptimizerConfig(rule="adam", clip="none", epsilon=1e-5)


def flat_model(size: int = 100) -> FlatParameters:
    torch.manual_seed(0)
    return FlatParameters(nn.Linear(size - 1, 1))


def central_of(config: OptimizerConfig, chunks: int = 3, size: int = 100) -> CentralParameters:
    flat = flat_model(size).flat
    return CentralParameters.create(flat, make_rule(config).init(len(flat)), chunks)


def learner(central: CentralParameters, config: OptimizerConfig, local_steps: int = 1) -> ChunkLockedStore:
    parameters = flat_model(central.layout.size)
    clip = make_clip(config, parameters.slices.values())
    return ChunkLockedStore(central, parameters, make_rule(config), clip, local_steps)


def push(store: ChunkLockedStore, flat: Tensor, rate: float = 1e-2) -> int:
    return store.push(Gradient(flat.clone(), torch.zeros(()), store.version), rate)


@given(size=st.integers(1, 5000), chunks=st.integers(1, 40))
def test_chunks_cover_everything_and_are_cut_at_multiples_of_16(size, chunks):
    bounds = CentralLayout(size, (), chunks).bounds
    assert len(bounds) == chunks
    assert [index for part in bounds for index in range(size)[part]] == list(range(size))
    assert all(part.start % 16 == 0 or part.start == size for part in bounds)


PUSHER = """
import pickle, sys
sys.path[:0] = sys.argv[3:]
import torch
from test_chunked import SGD, learner, push
from phalanx.parameters.chunked import CentralParameters
central = CentralParameters(pickle.loads(bytes.fromhex(sys.argv[1])))
store, size = learner(central, SGD), central.layout.size
for number in range(int(sys.argv[2])):
    push(store, torch.full((size,), 1.0), 2.0**-20)
"""


def start_pusher(central: CentralParameters, pushes: int, program: str = PUSHER) -> subprocess.Popen[bytes]:
    import pickle

    layout = central.layout
    arguments = [pickle.dumps(layout).hex(), str(pushes), str(Path(__file__).parent), *filter(None, sys.path)]
    return subprocess.Popen([sys.executable, "-c", program, *arguments], pass_fds=[layout.descriptor, layout.locks])


def test_ten_thousand_pushes_of_four_learners_are_all_there():
    """Under plain SGD with numbers that add up exactly: nobody writes over what another has written."""
    central = central_of(SGD, size=1000)
    central.begin(torch.zeros(1000), {})
    pushers = [start_pusher(central, 2500) for _ in range(4)]
    assert [pusher.wait(timeout=120) for pusher in pushers] == [0] * 4
    assert central.pushes.tolist() == [10_000] * 3
    assert torch.equal(central.vectors()[0], torch.full((1000,), -10_000 * 2.0**-20))


KILLED_INSIDE = PUSHER.replace(
    "for number",
    """
import os, signal
publish, count = CentralParameters.publish, [0]
def dying(self, chunk):
    count[0] += 1
    if count[0] == 100:
        self.other(chunk)[:] = float("nan")  # what it was writing is torn
        os.kill(os.getpid(), signal.SIGKILL)
    publish(self, chunk)
CentralParameters.publish = dying
for number""",
)


def test_a_learner_killed_within_a_locked_section_stops_nobody_and_tears_nothing():
    central = central_of(SGD, size=1000)
    central.begin(torch.zeros(1000), {})
    dying, others = start_pusher(central, 1000, KILLED_INSIDE), [start_pusher(central, 500) for _ in range(2)]
    assert dying.wait(timeout=120) == -signal.SIGKILL
    assert [other.wait(timeout=120) for other in others] == [0, 0]
    assert central.pushes.sum() == 3 * 2 * 500 + 99
    flat = central.vectors()[0]
    for part, pushes in zip(central.bounds, central.pushes.tolist(), strict=True):
        assert torch.equal(flat[part], torch.full_like(flat[part], -pushes * 2.0**-20))


HOLDER = PUSHER.replace(
    "for number", "central.lock(0); central.lock(1); central.lock(2); print('held', flush=True)\nfor number"
)


def test_a_lock_that_is_held_for_ever_is_an_error_and_free_when_its_owner_dies():
    central = central_of(SGD)
    program = HOLDER.replace("    push(", "    import time; time.sleep(60); push(")
    import pickle

    layout = central.layout
    arguments = [pickle.dumps(layout).hex(), "1", str(Path(__file__).parent), *filter(None, sys.path)]
    holder = subprocess.Popen(
        [sys.executable, "-c", program, *arguments], pass_fds=[layout.descriptor, layout.locks], stdout=subprocess.PIPE
    )
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    store = learner(central, SGD)
    store.lock_timeout = 0.2
    assert [central.holder(chunk) for chunk in range(3)] == [holder.pid] * 3
    before = store.parameters.flat.clone()
    with pytest.raises(RunError, match="no chunk of the central parameters came free within"):
        push(store, torch.ones(100))
    assert torch.equal(central.vectors()[0], before)
    holder.kill()
    holder.wait(60)
    assert central.holder(0) is None
    assert push(store, torch.ones(100)) == 1


def test_a_learner_that_was_stopped_with_the_rest_of_the_run_has_not_waited(monkeypatch):
    store, now, looks = learner(central_of(SGD), SGD), [0.0], iter([False] * 30 + [True] * 30)
    monkeypatch.setattr(chunked.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(chunked.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + 1000.0 * (now[0] < 5000)))
    monkeypatch.setattr(CentralParameters, "lock", lambda central, chunk: next(looks))
    assert push(store, torch.ones(100)) == 1


@settings(max_examples=30, deadline=None)
@given(
    local_steps=st.integers(1, 4),
    rounds=st.lists(st.integers(0, 7), min_size=1, max_size=5),
    chunks=st.integers(1, 7),
    seed=st.integers(0, 2**32 - 1),
)
def test_one_learner_with_local_steps_is_adam(local_steps, rounds, chunks, seed):
    """To the last bit, whether or not the updates of a round divide by the local steps."""
    central = central_of(ADAM, chunks)
    store, plain, rule = learner(central, ADAM, local_steps), flat_model(), make_rule(ADAM)
    state, generator = rule.init(100), torch.Generator().manual_seed(seed)
    for updates in rounds:
        for _ in range(updates):
            gradient = torch.randn(100, generator=generator)
            push(store, gradient)
            rule.apply(plain.flat, gradient.clone(), state, 1e-2)
        store.pull(store.parameters)
        assert torch.equal(store.parameters.flat, plain.flat)
        flat, vectors = central.vectors()
        assert torch.equal(flat, plain.flat)
        assert all(torch.equal(vectors[name], state[name]) for name in vectors)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_what_others_did_meanwhile_stays(count):
    """Appendix B, in float64: theta - sum of steps, and the moments as if the gradients came now."""
    central = central_of(ADAM)
    store, other = learner(central, ADAM, local_steps=count), learner(central, ADAM)
    generator = torch.Generator().manual_seed(1)
    theta, first = central.vectors()[0].double().numpy(), torch.randn(100, generator=generator)
    beta1, beta2, rate, epsilon = ADAM.beta1, ADAM.beta2, 1e-2, ADAM.epsilon
    push(other, first)  # one step of the other learner, which this one has not seen
    theta_central = central.vectors()[0].double().numpy()
    assert not np.allclose(theta, theta_central)
    m_central, v_central = (central.vectors()[1][name].double().numpy() for name in ("mean", "square"))
    m, v, steps, sums, squares = (np.zeros(100) for _ in range(5))
    for t in range(1, count + 1):
        gradient = torch.randn(100, generator=generator)
        push(store, gradient)
        g = gradient.double().numpy()
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        steps += rate * (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + epsilon)
        sums, squares = beta1 * sums + g, beta2 * squares + g * g
    flat, vectors = central.vectors()
    np.testing.assert_allclose(flat.numpy(), theta_central - steps, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(
        vectors["mean"].numpy(), beta1**count * m_central + (1 - beta1) * sums, rtol=1e-4, atol=1e-6
    )
    np.testing.assert_allclose(
        vectors["square"].numpy(), beta2**count * v_central + (1 - beta2) * squares, rtol=1e-4, atol=1e-7
    )


def test_staleness_counts_the_pushes_of_others():
    central = central_of(SGD)
    first, second = learner(central, SGD), learner(central, SGD)
    for _ in range(3):
        push(first, torch.ones(100))
    assert first.take_staleness() == {0: 9}
    push(second, torch.ones(100))
    assert second.take_staleness() == {3: 3}
    assert second.take_staleness() == {}
    assert second.version == 4 and first.version == 3
    first.pull(first.parameters)
    assert first.version == 4


def test_seconds_in_updates_and_behind_locks_of_others_are_told_apart(monkeypatch):
    """By a clock that counts the looks at it: the first look at the locks finds none free."""
    central = central_of(SGD, chunks=1)
    store, looks, locks = learner(central, SGD), iter(range(1000)), iter([False, False, True])
    monkeypatch.setattr(chunked.time, "perf_counter", lambda: float(next(looks)))
    monkeypatch.setattr(CentralParameters, "lock", lambda self, chunk: next(locks))
    push(store, torch.ones(100))
    seconds = store.take_seconds()
    assert seconds["blocked"] == 3  # two looks in vain, and that at the end
    assert seconds["updating"] == 2
    assert store.take_seconds() == {"blocked": 0.0, "updating": 0.0}


def test_a_reader_sees_whole_chunks_while_others_write():
    central = central_of(SGD, chunks=1, size=20_000)
    central.begin(torch.zeros(20_000), {})
    pusher = start_pusher(central, 400)
    deadline = time.monotonic() + 120
    while pusher.poll() is None and time.monotonic() < deadline:
        flat = central.vectors()[0]
        assert bool((flat == flat[0]).all())
    assert pusher.returncode == 0
    assert float(central.vectors()[0][0]) == -400 * 2.0**-20
