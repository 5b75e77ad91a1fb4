"""An algorithm of a user's own: the class behind `algorithm.code`, and the fields that it has beyond those of ours.

A user's class learns in the place of A2C, PPO, DQN or C51, whose configuration stays what it was: checks, replay memory
and network go by it. If the class has a `Config`, a dataclass (of its own, or a variant of ours), it gets one of these.
Fields of it that ours lack are kept as JSON in `algorithm.settings`, so that an experiment can be sent to processes,
and read from a file, that know nothing of the class.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import Any, get_type_hints

from phalanx.config.bounds import bounds_of
from phalanx.config.experiment import A2CConfig, AlgorithmConfig, C51Config, DQNConfig, Experiment, PPOConfig
from phalanx.config.stored import typed
from phalanx.errors import UserError, require, unknown
from phalanx.given import is_code, is_lost, resolve, spoken

OURS: tuple[type[AlgorithmConfig], ...] = (C51Config, DQNConfig, PPOConfig, A2CConfig)

LEARNS_BY: dict[str, type] = {config.__name__.removesuffix("Config"): config for config in OURS}
"""The configuration that each algorithm of ours reads."""

READ_AROUND_Q_LEARNING = {
    *("discount", "n_step", "replay_size", "learning_starts", "prioritized", "priority_exponent", "new_priority"),
    *("checkpoint_replay", "dueling", "atoms", "v_min", "v_max"),
    *(f"epsilon_{word}" for word in ("start", "final", "length", "clock", "spread", "eval")),
}
"""Fields of ours that the replay memory, the network or the policies read, whichever class learns."""


def with_algorithm(experiment: Experiment, text: str) -> Experiment:
    """The experiment with a user's class as its algorithm, on the values of ours that it builds upon: those that the
    preset has, if it is of that kind."""
    require(is_code(text), f"algorithm '{text}' names no class; give one as module:Class or file.py:Class")
    kind, present = _config_class(text), experiment.algorithm
    ours = next((one for one in OURS if kind is not None and issubclass(kind, one)), type(present))
    parent = _of_ours(text)
    require(
        kind is not None or isinstance(present, LEARNS_BY.get(parent, object)),
        f"{spoken(text)} learns by the settings of {parent}, but {experiment.preset} has those of "
        f"{type(present).__name__.removesuffix('Config')}; use a preset of {parent}, or give the class a Config",
    )
    values = {}
    if isinstance(present, ours):
        values = {field.name: getattr(present, field.name) for field in dataclasses.fields(ours)}
    if kind is not None:
        values |= _changed_defaults(kind, ours)
    algorithm = ours(**{**values, "code": text, "settings": ""})
    return dataclasses.replace(experiment, algorithm=with_own_values(algorithm, {}))


def _of_ours(text: str) -> str:
    """The name of the algorithm of ours that a user's class is, or inherits from; empty if it does from none."""
    kinds = learner_class(text).__mro__
    return next((kind.__name__ for kind in kinds if kind.__module__.startswith("phalanx.algorithms.")), "")


def learner_class(text: str) -> Any:
    """The class that a text stands for, if it can learn."""
    learner = resolve(text, "algorithm.code")
    able = isinstance(learner, type) and all(callable(getattr(learner, name, None)) for name in ("batches", "loss"))
    require(able, f"algorithm {text} must be a class with the methods batches and loss")
    return learner


def own_batches(algorithm: AlgorithmConfig) -> str | None:
    """The name of a user's class that makes its batches itself, None where they are those of one of ours."""
    if not algorithm.code:
        return None
    ours = learner_class(algorithm.code).batches.__module__.startswith("phalanx.algorithms.")
    return None if ours else spoken(algorithm.code)


def own_fields(algorithm: AlgorithmConfig) -> dict[str, dataclasses.Field[Any]]:
    """The fields that a user's class has beyond ours."""
    kind = _config_class(algorithm.code) if algorithm.code and not is_lost(algorithm.code) else None
    ours = {field.name for field in dataclasses.fields(algorithm)}
    return {} if kind is None else {field.name: field for field in dataclasses.fields(kind) if field.name not in ours}


def unread_fields(algorithm: AlgorithmConfig) -> set[str]:
    """The fields of ours that nobody reads: a user's class has a `Config` without them, and the pieces around it
    do not ask for them either."""
    kind = _config_class(algorithm.code) if algorithm.code and not is_lost(algorithm.code) else None
    if kind is None:
        return set()
    read = {field.name for field in dataclasses.fields(kind)} | {"code", "settings"}
    read |= READ_AROUND_Q_LEARNING if isinstance(algorithm, DQNConfig) else set()
    return {field.name for field in dataclasses.fields(algorithm)} - read


def refuse_unread(algorithm: AlgorithmConfig, names: Iterable[str]) -> None:
    """Refuse values, named as `algorithm.discount`, that would change nothing."""
    unread = {f"algorithm.{name}" for name in unread_fields(algorithm)}
    if found := next((name for name in names if name in unread), None):
        own = ", ".join(f"algorithm.{field.name}" for field in dataclasses.fields(_config_class(algorithm.code)))
        raise UserError(
            f"{spoken(algorithm.code)} does not read {found}: its Config has no such field; it has {own or 'none'}"
        )


def own_values(algorithm: AlgorithmConfig) -> dict[str, Any]:
    """The values of these fields."""
    return dict(json.loads(algorithm.settings or "{}"))


def own_hints(algorithm: AlgorithmConfig) -> dict[str, Any]:
    """The types of these fields, for whoever reads values of them."""
    names = own_fields(algorithm)
    try:
        hints = get_type_hints(_config_class(algorithm.code)) if names else {}
    except NameError:  # names that are known to a notebook only
        hints = {}
    return {name: hints.get(name, Any) for name in names}


def with_own_values(algorithm: AlgorithmConfig, changes: dict[str, Any]) -> AlgorithmConfig:
    """The same with some of these fields changed. All are written down, as a run depends on them."""
    fields, hints = own_fields(algorithm), own_hints(algorithm)
    values = {**{name: default_of(field) for name, field in fields.items()}, **own_values(algorithm), **changes}
    for name, value in values.items():
        if name not in fields:
            raise unknown("configuration key", f"algorithm.{name}", [f"algorithm.{known}" for known in fields])
        if hints[name] is not Any:
            typed(hints[name], value, f"algorithm.{name}")
        bounds = bounds_of(fields[name])
        admitted = bounds is None or value is None or bounds.admit(value)
        require(admitted, f"algorithm.{name} is {value}, but must be {bounds}")
    return dataclasses.replace(algorithm, settings=json.dumps(values) if values else "")


def own_config(algorithm: AlgorithmConfig) -> Any:
    """What a user's class is given: its `Config`, or ours where it has none."""
    kind = _config_class(algorithm.code)
    if kind is None:
        return algorithm
    values = {field.name: getattr(algorithm, field.name) for field in dataclasses.fields(algorithm)}
    values |= own_values(algorithm)
    return kind(**{field.name: values[field.name] for field in dataclasses.fields(kind) if field.name in values})


def default_of(field: dataclasses.Field[Any]) -> Any:
    require(not is_missing(field.default), f"give the field {field.name} of the algorithm's Config a plain default")
    return field.default


def is_missing(default: Any) -> bool:
    """A class that travels by value brings a mark of its own for what is missing."""
    return isinstance(default, type(dataclasses.MISSING))


def _config_class(text: str) -> Any:
    kind = getattr(learner_class(text), "Config", None)
    require(
        kind is None or (isinstance(kind, type) and dataclasses.is_dataclass(kind)),
        f"the Config of algorithm {text} must be a dataclass",
    )
    return kind


def _changed_defaults(kind: Any, ours: Any) -> dict[str, Any]:
    """Fields of ours for which a user's class has other defaults."""
    known = {field.name: field.default for field in dataclasses.fields(ours)}
    theirs = {field.name: field.default for field in dataclasses.fields(kind)}
    values = {name: value for name, value in theirs.items() if name in known and not is_missing(value)}
    return {name: value for name, value in values.items() if value != known[name]}
