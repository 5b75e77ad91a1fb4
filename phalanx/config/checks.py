"""What an experiment must not be: each check refuses values that do not fit together, in one sentence that says what to
do. `Experiment.validate` runs them before anything else happens. The bounds of a number stand beside it in `config`."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, get_type_hints

from phalanx.config.bounds import bounds_of
from phalanx.config.experiment import (
    A2CConfig,
    AsynchronousConfig,
    AtariConfig,
    C51Config,
    DBA3CConfig,
    DQNConfig,
    Experiment,
    GA3CConfig,
    GorilaConfig,
    GymnasiumConfig,
    PPOConfig,
    SynchronousConfig,
    nearest_divisor,
)
from phalanx.config.own import unread_fields
from phalanx.config.stored import require_choice
from phalanx.errors import require
from phalanx.given import is_code

LEAST_EPSILON = 1e-30  # beside any gradient nothing, but float32 does not take it, or its square root, for zero


def check(experiment: Experiment, learns: bool = True) -> None:
    """Every check of values that are within their bounds, or a UserError from the first that fails. What a user's own
    algorithm reads, only its code can tell, which need not be there for an agent that only plays."""
    _choices(experiment)
    learning = (_algorithm, _overlap, _asynchronous, _ga3c, _cluster, _replicas)
    asked = learning if learns or not experiment.algorithm.code else (_grid,)
    for one in (_atari, _gymnasium, _sampler, *asked, _optimizer, _model):
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


def check_bounds(part: Any, prefix: str = "") -> None:
    """Every number is within the bounds beside its field; none, where a field may be empty, is."""
    for field in dataclasses.fields(part):
        value, bounds, name = getattr(part, field.name), bounds_of(field), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            check_bounds(value, f"{name}.")
        elif bounds is not None and value is not None:
            require(bounds.admit(value), f"{name} is {value}, but must be {bounds}")


def _atari(experiment: Experiment) -> None:
    env = experiment.env
    if not isinstance(env, AtariConfig):
        return
    require(env.skip_min <= env.skip, f"env.skip_min is {env.skip_min}: choose 1..env.skip ({env.skip})")
    require(env.noop_min <= env.noop_max, "env.noop_min must lie in 0..env.noop_max")
    require(env.color == "gray" or env.frame == "84x84", "env.color rgb needs env.frame 84x84")


def _gymnasium(experiment: Experiment) -> None:
    env = experiment.env
    if not isinstance(env, GymnasiumConfig):
        return
    require(is_object(env.kwargs), f'env.kwargs is {env.kwargs}, but must be a JSON object, such as {{"size": 5}}')
    require(
        not env.wrap or is_code(env.wrap),
        f"env.wrap is {env.wrap}, but must name a function as module:function or file.py:function",
    )


def is_object(text: str) -> bool:
    """Is it a JSON object, or nothing?"""
    try:
        return not text or isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _sampler(experiment: Experiment) -> None:
    sampler = experiment.sampler
    require(sampler.horizon > 0, "sampler.horizon is 0, which needs sampler.batch; give one of them")
    require(
        sampler.environments % sampler.groups == 0,
        f"{sampler.environments} environments do not divide into {sampler.groups} groups; "
        f"use sampler.environments {round_up(sampler.environments, sampler.groups)}",
    )


def _algorithm(experiment: Experiment) -> None:
    replicas = getattr(experiment.topology, "replicas", 1) or 1  # each collects rollouts, and has a memory, of its own
    environments, groups = experiment.sampler.environments, experiment.sampler.groups
    require(
        environments >= replicas,
        f"{environments} environments do not divide among {replicas} replicas with {groups} groups each; "
        f"use sampler.environments {replicas * groups}",
    )
    algorithm, rows = experiment.algorithm, experiment.sampler.rollout_steps // replicas
    of_a_batch = experiment.sampler.rollout_steps if isinstance(experiment.topology, SynchronousConfig) else rows
    if isinstance(algorithm, PPOConfig) and "minibatches" not in unread_fields(algorithm):
        require(
            rows % algorithm.minibatches == 0,
            f"a rollout of {rows} steps ({experiment.sampler.environments} environments x "
            f"{experiment.sampler.horizon}) does not divide into {algorithm.minibatches} minibatches; "
            f"choose a divisor of {rows}, such as {nearest_divisor(rows, algorithm.minibatches)}",
        )
    if isinstance(algorithm, A2CConfig):
        require(
            not (algorithm.importance and algorithm.vtrace),
            "algorithm.importance and algorithm.vtrace correct for the same; use one of them",
        )
        require(
            algorithm.log_floor == 0 or algorithm.log_floor >= LEAST_EPSILON,
            f"algorithm.log_floor is {algorithm.log_floor}, too little for float32; use 0 or at least {LEAST_EPSILON}",
        )
    _grid(experiment)
    if isinstance(algorithm, DQNConfig):
        _replay(algorithm, of_a_batch, experiment.sampler.environments, experiment.env.stack)


def _grid(experiment: Experiment) -> None:
    algorithm = experiment.algorithm
    if not isinstance(algorithm, C51Config):
        return
    low, high, atoms = algorithm.v_min, algorithm.v_max, algorithm.atoms
    require(low < high, "algorithm.v_min must be less than algorithm.v_max")
    # float32 has 24 bits: with fewer than 4 of them for a step, points would be far from even, or fall together
    apart = (high - low) / (atoms - 1) >= max(abs(low), abs(high)) * 2**-20
    require(apart, f"{atoms} points from {low:g} to {high:g} are too close for float32; lower algorithm.atoms")


def _replay(algorithm: DQNConfig, rows: int, environments: int, stack: int) -> None:
    updates = algorithm.updates_per_rollout(rows)
    whole = sorted({max(1, int(updates)), int(updates) + 1})
    require(
        bool({"intensity", "batch_size"} & unread_fields(algorithm)) or (updates >= 1 and updates == int(updates)),
        f"algorithm.intensity {algorithm.intensity:g} gives {updates:g} updates per rollout of {rows} steps with "
        f"batches of {algorithm.batch_size}, which is not a whole number; nearest intensities that work: "
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
    if not experiment.sampler.overlap or "importance" in unread_fields(experiment.algorithm):
        return
    if isinstance(experiment.algorithm, A2CConfig):
        require(
            experiment.algorithm.importance or experiment.algorithm.vtrace,
            "sampler.overlap makes A2C learn one rollout late; add --algorithm.importance True to correct for it, or "
            "--algorithm.vtrace True",
        )


def _asynchronous(experiment: Experiment) -> None:
    topology, sampler = experiment.topology, experiment.sampler
    if not isinstance(topology, AsynchronousConfig):
        return
    require(not sampler.overlap, "sampler.overlap is for one replica; asynchronous ones overlap each other")
    require(
        topology.local_steps == 1 or experiment.optimizer.rule in ("adam", "adam-tf"),
        f"topology.local_steps {topology.local_steps} needs optimizer.rule adam, not {experiment.optimizer.rule}",
    )


def _ga3c(experiment: Experiment) -> None:
    topology, sampler, algorithm = experiment.topology, experiment.sampler, experiment.algorithm
    if not isinstance(topology, GA3CConfig):
        return
    require(
        isinstance(algorithm, A2CConfig | PPOConfig),
        "topology ga3c learns from short segments, which is for A2C and PPO; use another topology for "
        f"{type(algorithm).__name__.removesuffix('Config')}",
    )
    require(not sampler.overlap, "sampler.overlap is for replicas; the threads of ga3c overlap each other")
    require(sampler.resets == "swap", "sampler.resets wait is for lock step; use --sampler.resets swap with ga3c")
    require(
        sampler.environments % topology.agents == 0,
        f"{sampler.environments} environments do not divide among {topology.agents} agents; use --sampler.environments "
        f"{round_up(sampler.environments, topology.agents)}",
    )
    require(
        topology.min_batch <= topology.queue * sampler.horizon,
        f"topology.min_batch {topology.min_batch} is more than {topology.queue} segments of {sampler.horizon} steps "
        f"hold; use --topology.queue {-(-topology.min_batch // sampler.horizon)} or more",
    )
    _minibatches_of_segments(experiment)


def _minibatches_of_segments(experiment: Experiment) -> None:
    """Where as many segments are merged as make a batch."""
    horizon, algorithm, name = experiment.sampler.horizon, experiment.algorithm, experiment.topology.name
    if isinstance(algorithm, PPOConfig) and "minibatches" not in unread_fields(algorithm):
        require(
            horizon % algorithm.minibatches == 0,
            f"batches of {name} have a varying number of segments of {horizon} steps; choose algorithm.minibatches "
            f"that divide {horizon}, such as {nearest_divisor(horizon, algorithm.minibatches)}",
        )


def _cluster(experiment: Experiment) -> None:
    """What holds for runs around parameter servers."""
    topology, algorithm, sampler = experiment.topology, experiment.algorithm, experiment.sampler
    if isinstance(topology, GorilaConfig):
        require(
            isinstance(algorithm, DQNConfig),
            "topology gorila learns from replay memories; use it with dqn, c51 or eps-rainbow, or take dba3c or "
            "asynchronous for an actor-critic",
        )
        require(not sampler.overlap, "sampler.overlap is for one replica; bundles overlap each other")
        require(
            not experiment.run.eval_every,
            "run.eval_every is not for gorila: the process that would play looks after all others; play games with "
            "the checkpoints of the run, by `phalanx eval`",
        )
    if isinstance(topology, DBA3CConfig):
        require(
            not isinstance(algorithm, DQNConfig),
            "topology dba3c learns from short segments; use it with a2c or ppo, or take gorila for Q-learning",
        )
        require(not sampler.overlap, "sampler.overlap is for replicas; the threads of a worker of dba3c overlap anyway")
        require(
            not experiment.run.eval_every,
            "run.eval_every is not for dba3c, whose evaluator is a process of its own; use --topology.evaluate-every",
        )
        require(sampler.resets == "swap", "sampler.resets wait is for lock step; use --sampler.resets swap with dba3c")
        simulators = topology.workers * topology.agents
        require(
            sampler.environments % simulators == 0,
            f"{sampler.environments} environments do not divide among {topology.workers} workers with "
            f"{topology.agents} simulators each; use --sampler.environments "
            f"{round_up(sampler.environments, simulators)}",
        )
        _minibatches_of_segments(experiment)


def _replicas(experiment: Experiment) -> None:
    """What holds for several replicas, whatever they share."""
    topology, sampler = experiment.topology, experiment.sampler
    count = getattr(topology, "replicas", 1)
    if count <= 1 and not isinstance(topology, AsynchronousConfig):
        return
    require(
        not getattr(experiment.algorithm, "checkpoint_replay", False),
        "algorithm.checkpoint_replay is for one replica; several fill their memories again when resumed",
    )
    if isinstance(topology, SynchronousConfig):
        require(not sampler.overlap, "sampler.overlap is for one replica; use --topology.replicas 1 or leave it out")
        if isinstance(experiment.algorithm, DQNConfig) and "batch_size" not in unread_fields(experiment.algorithm):
            batch = experiment.algorithm.batch_size
            require(
                batch % count == 0,
                f"a batch of {batch} does not divide among {count} replicas; use --algorithm.batch-size "
                f"{round_up(batch, count)}",
            )
    require(
        sampler.environments % (count * sampler.groups) == 0,
        f"{sampler.environments} environments do not divide among {count} replicas with {sampler.groups} groups each; "
        f"use sampler.environments {round_up(sampler.environments, count * sampler.groups)}",
    )


def _optimizer(experiment: Experiment) -> None:
    optimizer = experiment.optimizer
    adds_up = optimizer.rule == "adagrad" and optimizer.initial_accumulator > 0  # what it begins with never fades
    require(
        optimizer.epsilon >= LEAST_EPSILON or optimizer.rule == "sgd" or adds_up,
        f"optimizer.epsilon is {optimizer.epsilon}, but {optimizer.rule} divides by it where a gradient is 0; use at "
        f"least {LEAST_EPSILON}, such as 1e-8",
    )
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


def round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
