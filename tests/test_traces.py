"""Traces: what a run learns and collects, to the last bit, as it was when the trace was recorded.

A change that is not meant to change results must not change one bit here. Sums are rounded differently by different
processors, so traces are kept by kind of processor and skipped on others. A change that is meant to change results
records them anew, in a commit that says why:

    PHALANX_RECORD_TRACES=1 python -m pytest tests/test_traces.py
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.config import DQNConfig
from phalanx.config.presets import preset
from phalanx.replay.latest import LatestRollout
from phalanx.replay.memory import Replay
from phalanx.replica.build import make_replica
from phalanx.runtime.device import Compute
from phalanx.sampling.processes import ProcessEnvs
from phalanx.sampling.slot import SlotRules
from whole_runs import ATARI, FaultyFactory, newest, tensor_bytes

FILE = Path(__file__).parent / "traces.json"
RECORD = bool(os.environ.get("PHALANX_RECORD_TRACES"))

SERIAL = ("--topology", "serial")
PARALLEL = ("--topology", "synchronous", "--sampler.workers", 2)
MORE = (*PARALLEL, "--sampler.workers", 4, "--sampler.squads", 2, "--sampler.groups", 2)
OVERLAP = ("--sampler.overlap", True)
WAIT = ("--sampler.resets", "wait")
LEARNERS = {
    "a2c": ("a2c-catch", "--sampler.environments", 8),
    "ppo": ("ppo-catch", "--sampler.environments", 8, "--sampler.horizon", 16),
    "dqn": ("dqn-catch", "--sampler.environments", 8, "--algorithm.learning-starts", 100),
    "c51": ("c51-catch", "--sampler.environments", 8, "--algorithm.learning-starts", 100),
    "rainbow": ("eps-rainbow-catch", "--sampler.environments", 8, "--algorithm.learning-starts", 100),
}
WAYS = {
    "serial": ("float32", SERIAL),
    "serial, two groups, wait": ("bfloat16", (*SERIAL, "--sampler.groups", 2, *WAIT)),
    "synchronous": ("float32", PARALLEL),
    "synchronous, squads of two groups": ("bfloat16", MORE),
    "synchronous, two groups, wait": ("float32", (*PARALLEL, "--sampler.groups", 2, *WAIT)),
    "overlap": ("float32", (*PARALLEL, *OVERLAP)),
    "overlap, squads of two groups": ("bfloat16", (*MORE, *OVERLAP)),
    "overlap, wait": ("float32", (*PARALLEL, *OVERLAP, *WAIT)),
}
RESUMED = {"serial": ("float32", SERIAL), "overlap": ("bfloat16", (*PARALLEL, *OVERLAP))}
REPLAYED = ("dqn", "c51", "rainbow")  # they resume exactly with their memory
GAMES = {
    "a2c on breakout": ("a2c", *ATARI, *PARALLEL),
    "ppo on breakout, overlap": ("ppo", *ATARI, *PARALLEL, *OVERLAP, "--sampler.groups", 2),
    "rainbow on breakout": ("eps-rainbow", *ATARI, *PARALLEL, "--algorithm.learning-starts", 100),
}
FIELDS = ("frames", "history", "action", "log_prob", "value", "reward", "terminated", "truncated", "last_value", "cut")


def processor() -> str:
    """What decides about rounding: the instructions in use, who made the processor, and the release of torch."""
    text = Path("/proc/cpuinfo").read_text()
    vendor = next((line.split(":")[1].strip() for line in text.splitlines() if line.startswith("vendor_id")), "unknown")
    bfloat16 = [flag for flag in ("avx512_bf16", "amx_bf16") if f" {flag} " in text.replace("\n", " ")]
    release = torch.__version__.partition("+")[0]
    return " ".join([platform.machine(), vendor, torch.backends.cpu.get_cpu_capability(), *bfloat16, "torch", release])


class Rollouts:
    """A checksum of all rollouts that an experience was given."""

    def __init__(self) -> None:
        self.digest, self.count = hashlib.sha256(), 0

    def add(self, rollout: Any) -> None:
        self.count += 1
        for name in FIELDS:
            self.digest.update(tensor_bytes(getattr(rollout, name).contiguous()))
        for key, frame in sorted(rollout.last_frames.items()):
            self.digest.update(str(key).encode() + tensor_bytes(frame.contiguous()))


@pytest.fixture
def rollouts(monkeypatch):
    seen = Rollouts()
    for kind in (LatestRollout, Replay):

        def put(self: Any, rollout: Any, original: Any = kind.put) -> None:
            seen.add(rollout)
            original(self, rollout)

        monkeypatch.setattr(kind, "put", put)
    return seen


def digest(weights: dict[str, torch.Tensor]) -> str:
    total = hashlib.sha256()
    for name in sorted(weights):
        total.update(name.encode() + tensor_bytes(weights[name].contiguous()))
    return total.hexdigest()[:16]


def check(name: str, weights: dict[str, torch.Tensor], rollouts: Rollouts) -> None:
    """Compare with what was recorded, or record it."""
    traces = json.loads(FILE.read_text()) if FILE.exists() else {}
    trace = {"parameters": digest(weights), "rollouts": rollouts.digest.hexdigest()[:16], "count": rollouts.count}
    here = processor()
    if RECORD:
        traces.setdefault(here, {})[name] = trace
        FILE.write_text(json.dumps(traces, indent=1, sort_keys=True) + "\n")
        return
    if here not in traces:
        pytest.skip(f"no traces were recorded on {here}")
    assert trace == traces[here][name]


def options(precision: str) -> tuple[Any, ...]:
    return "--run.precision", precision, "--run.threads", 1, "--sampler.decorrelation", 10


def late(learner: str, way: str) -> tuple[Any, ...]:
    """A2C that learns one rollout late corrects for it."""
    return ("--algorithm.importance", True) if learner == "a2c" and way.startswith("overlap") else ()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("learner", LEARNERS)
def test_learns_the_same(train, tmp_path, rollouts, learner, way):
    precision, flags = WAYS[way]
    assert train(*LEARNERS[learner], *flags, *late(learner, way), *options(precision), steps=2048) == 0
    check(f"{learner}, {way}", newest(tmp_path / "run").weights, rollouts)


@pytest.mark.parametrize("way", RESUMED)
@pytest.mark.parametrize("learner", LEARNERS)
def test_learns_the_same_when_resumed(train, resume, tmp_path, rollouts, learner, way):
    precision, flags = RESUMED[way]
    memory = ("--algorithm.checkpoint-replay", True) if learner in REPLAYED else late(learner, way)
    assert train(*LEARNERS[learner], *flags, *memory, *options(precision), steps=1000) == 0
    assert resume("--run.steps", 2048) == 0
    check(f"{learner}, {way}, resumed", newest(tmp_path / "run").weights, rollouts)


LONG = ("rainbow on breakout", "float32")


@pytest.mark.parametrize(
    ("game", "precision"),
    [
        pytest.param(game, precision, marks=[pytest.mark.slow] * ((game, precision) == LONG))
        for game in GAMES
        for precision in ("float32", "bfloat16")
    ],
)
def test_learns_the_same_on_a_game(train, tmp_path, rollouts, game, precision):
    assert train(*GAMES[game], *options(precision), "--env.game", "breakout", steps=400) == 0
    check(f"{game}, {precision}", newest(tmp_path / "run").weights, rollouts)


@pytest.mark.parametrize("name", ["a2c-catch", "dqn-catch"])
def test_learns_the_same_when_a_worker_dies(rollouts, name):
    """At its fifth step environment 1 kills its worker, which holds environments 0 and 1."""
    weights = learn_with_a_death(name)
    check(f"{name}, a worker dies", weights, rollouts)


def learn_with_a_death(name: str) -> dict[str, torch.Tensor]:
    experiment = preset(name)
    sampler = dataclasses.replace(experiment.sampler, environments=4, horizon=8)
    algorithm = experiment.algorithm
    if isinstance(algorithm, DQNConfig):
        algorithm = dataclasses.replace(algorithm, learning_starts=64)
    experiment = dataclasses.replace(experiment, sampler=sampler, algorithm=algorithm)
    torch.set_num_threads(1)
    rules = SlotRules(0, 0, "swap", 8)
    with (
        ProcessEnvs(FaultyFactory("kill"), 2, 2, 1, rules, report=lambda _: None) as envs,
        make_replica(experiment, envs, Compute(torch.device("cpu")), print) as replica,
    ):
        while replica.progress.updates < 20:
            replica.iterate()
        return replica.weights()
