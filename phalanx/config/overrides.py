"""Fields of an experiment by their dotted names, as the flags of the command line have them: from Python.

`phalanx.train(..., overrides={"run.steps": 100_000})` goes through it; types and names are checked as those of a file
are, and everything else by `Experiment.validate`, as for flags.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from typing import Any, get_args, get_type_hints

from phalanx.config.experiment import TOPOLOGIES, Experiment
from phalanx.config.kinds import refuse_other_kind
from phalanx.config.overlay import changed_part
from phalanx.config.own import own_fields, own_hints, refuse_unread, with_algorithm, with_own_values
from phalanx.config.stored import IN_FILE
from phalanx.errors import UserError, require, unknown
from phalanx.given import by_name_or_value


def with_overrides(experiment: Experiment, overrides: Mapping[str, Any]) -> Experiment:
    """The experiment with some fields changed. `topology` and `algorithm` without a dot swap the whole part."""
    for name, value in overrides.items():
        is_part = dotted(name) in {field.name for field in dataclasses.fields(experiment)}
        require(
            not (is_part and isinstance(value, Mapping)),
            f"overrides[{name!r}] is an object; write dotted names, such as overrides={{'run.steps': 100_000}}",
        )
    values = {dotted(name): plain(name, value) for name, value in overrides.items()}
    if (name := values.pop("topology", None)) is not None:
        if name not in TOPOLOGIES:
            raise unknown("topology", str(name), TOPOLOGIES)
        experiment = dataclasses.replace(experiment, topology=TOPOLOGIES[name]())
    if (text := values.pop("algorithm", None)) is not None:
        require(isinstance(text, str), f"algorithm is {text!r}; name a class as module:Class, or use algorithm=")
        experiment = with_algorithm(experiment, text)
    try:
        for part, changes in by_part(experiment, values).items():
            experiment = with_part(experiment, part, changes)
    except UserError as error:
        raise UserError(str(error).replace(IN_FILE, "")) from None
    return experiment


def dotted(name: str) -> str:
    """The name of a field, which may be given as that of its flag."""
    return name.removeprefix("--").replace("-", "_")


def with_part(experiment: Experiment, part: str, changes: dict[str, Any]) -> Experiment:
    """The same with some fields of one part changed, of which some may be those of a user's own algorithm."""
    own = own_fields(experiment.algorithm) if part == "algorithm" else {}
    ours = {name: value for name, value in changes.items() if name not in own}
    hint = get_type_hints(Experiment)[part]
    present = changed_part(hint, getattr(experiment, part), part, ours) if ours else getattr(experiment, part)
    if theirs := {name: value for name, value in changes.items() if name in own}:
        present = with_own_values(present, theirs)
    return dataclasses.replace(experiment, **{part: present})


def by_part(experiment: Experiment, values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Dotted names as the names within each part."""
    parts = [field.name for field in dataclasses.fields(experiment) if field.name != "preset"]
    known = [f"{part}.{field.name}" for part in parts for field in dataclasses.fields(getattr(experiment, part))]
    known += [f"algorithm.{name}" for name in own_fields(experiment.algorithm)]
    refuse_unread(experiment.algorithm, values)
    own = own_hints(experiment.algorithm)
    found: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        if name.startswith("env."):
            refuse_other_kind(experiment, name.removeprefix("env."), str(value))
        if name not in known:
            raise unknown("configuration key", name, known)
        part, _, field = name.partition(".")
        hints = {**get_type_hints(type(getattr(experiment, part))), **(own if part == "algorithm" else {})}
        found.setdefault(part, {})[field] = whole(hints.get(field), value)
    return found


def whole(hint: Any, value: Any) -> Any:
    """1e6 as the whole number that it is, where a field takes these alone."""
    kinds = get_args(hint) or (hint,)
    is_whole = type(value) is float and value.is_integer() and int in kinds and float not in kinds
    return int(value) if is_whole else value


def plain(name: str, value: Any) -> Any:
    """A value as a field holds it: a number of numpy or torch as Python's own, code by its name or by value, and an
    object with named values as JSON, a path as text."""
    if isinstance(value, dict):
        try:
            return json.dumps(value)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{name} holds what JSON cannot ({error}); pass a callable that makes it, instead"
            ) from None
    if callable(value):
        return by_name_or_value(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if not hasattr(value, "item"):
        return value
    size = math.prod(value.shape)
    require(size == 1, f"{name} is an array of {size} numbers; give one number, or a list where it takes several")
    return value.item()
