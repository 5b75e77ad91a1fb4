"""What an experiment must not be: each check refuses values that do not fit together, in one sentence that says what to
do. `Experiment.validate` runs them before anything else happens."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, get_type_hints

from phalanx.config import (
    A2CConfig,
    AtariConfig,
    C51Config,
    DQNConfig,
    Experiment,
    PPOConfig,
    SynchronousConfig,
    nearest_divisor,
)
from phalanx.errors import require
from phalanx.stored import flat, require_choice

POSITIVE = (
    *("sampler.environments", "sampler.horizon", "sampler.groups", "sampler.step_timeout"),
    *("env.stack", "env.skip", "env.length", "model.width", "optimizer.learning_rate", "optimizer.clip_norm"),
    *("algorithm.epochs", "algorithm.minibatches", "algorithm.batch_size", "algorithm.n_step"),
    *("algorithm.target_every", "algorithm.intensity", "algorithm.replay_size", "algorithm.huber", "algorithm.clip"),
    *("model.first_stride", "sampler.workers_per_core"),
    *("run.steps", "run.log_every", "run.keep_checkpoints", "run.eval_games"),
)
NOT_NEGATIVE = (
    *(
        "sampler.batch",
        "sampler.balance",
        "sampler.workers",
        "sampler.squads",
        "sampler.decorrelation",
        "sampler.max_deaths",
    ),
    *("env.max_steps", "model.hidden", "optimizer.schedule_length", "algorithm.learning_starts"),
    "algorithm.discount_length",
    *("algorithm.epsilon_length", "algorithm.importance_length"),
    *("run.seed", "run.seconds", "run.threads", "run.checkpoint_every", "run.checkpoint_updates", "run.eval_every"),
)


SHARES = (
    *(
        "algorithm.epsilon_start",
        "algorithm.epsilon_final",
        "algorithm.priority_exponent",
        "algorithm.importance_start",
    ),
    *("algorithm.gae_lambda", "optimizer.decay", "optimizer.beta1", "optimizer.beta2", "optimizer.momentum"),
)
MAY_BE_INFINITE = ("run.seconds", "run.checkpoint_every", "sampler.step_timeout", "optimizer.clip_norm")
MOST_THREADS = 4096
MOST_NOOPS = 10_000  # each takes a state of the emulator


def check(experiment: Experiment) -> None:
    """Every check, or a UserError from the first that fails."""
    _choices(experiment)
    for one in (_numbers, _atari, _sampler, _algorithm, _overlap, _schedules, _model):
        one(experiment)


def _choices(part: Any, prefix: str = "") -> None:
    """Values that are one of a few words; files and flags are checked as they are read, but not values made in code."""
    hints = get_type_hints(type(part))
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if dataclasses.is_dataclass(value):
            _choices(value, f"{prefix}{field.name}.")
        else:
            require_choice(hints[field.name], value, f"{prefix}{field.name}")


def _numbers(experiment: Experiment) -> None:
    values = flat(dataclasses.asdict(experiment))
    for name, value in values.items():
        known = not isinstance(value, float) or math.isfinite(value) or (value > 0 and name in MAY_BE_INFINITE)
        require(known, f"{name} is {value}, but must be a finite number")
    for name in POSITIVE:
        require(values.get(name, 1) > 0, f"{name} is {values.get(name)}, but must be greater than 0")
    for name in NOT_NEGATIVE:
        require(values.get(name, 0) >= 0, f"{name} is {values.get(name)}, but must not be negative")
    require(experiment.env.stack < 255, f"env.stack is {experiment.env.stack}, but at most 254 frames can be stacked")
    for name in ("algorithm.discount", "algorithm.final_discount"):
        value = values.get(name)
        require(value is None or 0 < value <= 1, f"{name} is {value}, but must lie in (0, 1]")
    for name in SHARES:
        require(0 <= values.get(name, 0) <= 1, f"{name} is {values.get(name)}, but must lie in [0, 1]")
    run = experiment.run
    require(run.seed < 2**63, f"run.seed is {run.seed}, but must be less than 2^63")
    require(run.threads <= MOST_THREADS, f"run.threads is {run.threads}, but at most {MOST_THREADS} can be used")


def _atari(experiment: Experiment) -> None:
    env = experiment.env
    if not isinstance(env, AtariConfig):
        return
    require(1 <= env.skip_min <= env.skip, f"env.skip_min is {env.skip_min}: choose 1..env.skip ({env.skip})")
    require(0 <= env.noop_min <= env.noop_max, "env.noop_min must lie in 0..env.noop_max")
    require(env.noop_max <= MOST_NOOPS, f"env.noop_max is {env.noop_max}, but must be at most {MOST_NOOPS}")
    require(0 <= env.sticky < 1, f"env.sticky is {env.sticky}: a probability in [0, 1) is needed")
    require(env.color == "gray" or env.frame == "84x84", "env.color rgb needs env.frame 84x84")


def _sampler(experiment: Experiment) -> None:
    sampler = experiment.sampler
    require(
        sampler.environments % sampler.groups == 0,
        f"{sampler.environments} environments do not divide into {sampler.groups} groups; "
        f"use sampler.environments {_round_up(sampler.environments, sampler.groups)}",
    )


def _algorithm(experiment: Experiment) -> None:
    algorithm, rows = experiment.algorithm, experiment.sampler.rollout_steps
    if isinstance(algorithm, PPOConfig):
        require(
            rows % algorithm.minibatches == 0,
            f"a rollout of {rows} steps ({experiment.sampler.environments} environments x "
            f"{experiment.sampler.horizon}) does not divide into {algorithm.minibatches} minibatches; "
            f"choose a divisor of {rows}, such as {nearest_divisor(rows, algorithm.minibatches)}",
        )
    if isinstance(algorithm, C51Config):
        require(algorithm.atoms > 1, f"algorithm.atoms is {algorithm.atoms}, but a grid needs at least 2 points")
        require(algorithm.v_min < algorithm.v_max, "algorithm.v_min must be less than algorithm.v_max")
    if isinstance(algorithm, DQNConfig):
        _replay(algorithm, rows, experiment.sampler.environments, experiment.env.stack)


def _replay(algorithm: DQNConfig, rows: int, environments: int, stack: int) -> None:
    updates = algorithm.updates_per_rollout(rows)
    whole = sorted({max(1, int(updates)), int(updates) + 1})
    require(
        updates >= 1 and updates == int(updates),
        f"algorithm.intensity {algorithm.intensity:g} gives {updates:g} updates per rollout of {rows} steps with "
        f"batches of {algorithm.batch_size}, which is no whole number; nearest intensities that work: "
        f"{' and '.join(f'{count * algorithm.batch_size / rows:.9g}' for count in whole)}",
    )
    least = max(rows // environments, algorithm.n_step + max(stack, 8) + 1)
    require(
        algorithm.replay_size // environments >= least,
        f"algorithm.replay_size {algorithm.replay_size} leaves too little history for each of {environments} "
        f"environments; use at least {environments * max(least, 64)}",
    )
    require(
        algorithm.learning_starts <= algorithm.replay_size,
        "algorithm.learning_starts must not exceed algorithm.replay_size",
    )


def _overlap(experiment: Experiment) -> None:
    overlap = isinstance(experiment.topology, SynchronousConfig) and experiment.topology.overlap
    if overlap and isinstance(experiment.algorithm, A2CConfig):
        require(
            experiment.algorithm.importance,
            "topology.overlap makes A2C learn one rollout late; add --algorithm.importance True to correct for it",
        )


def _schedules(experiment: Experiment) -> None:
    optimizer = experiment.optimizer
    require(
        optimizer.batch_scaling == "none" or optimizer.reference_batch > 0,
        f"optimizer.batch_scaling {optimizer.batch_scaling} needs optimizer.reference_batch greater than 0",
    )
    if optimizer.final_learning_rate is not None and optimizer.schedule_length == 0:
        require(
            optimizer.schedule_clock == "steps",
            f"optimizer.schedule_clock {optimizer.schedule_clock} needs optimizer.schedule_length greater than 0",
        )


def _model(experiment: Experiment) -> None:
    env, model = experiment.env, experiment.model
    if isinstance(env, AtariConfig):
        require(model.torso != "mlp", "model.torso mlp takes vectors, but Atari gives images; use nips or nature")


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
