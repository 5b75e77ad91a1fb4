"""An experiment as plain values: written to `config.json` in the run directory, read again, and compared."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from phalanx.config import Experiment
from phalanx.errors import RunError, UserError, unknown


def save(experiment: Experiment, path: Path) -> None:
    """Write it whole or not at all: a run without its configuration is lost."""
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        with temporary.open("w") as file:
            file.write(json.dumps(dataclasses.asdict(experiment), indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RunError(f"cannot write {path} ({error.strerror}); make room there and start again") from None


def load(path: Path) -> Experiment:
    """The experiment a `config.json` describes; an unknown key or kind is refused by name."""
    if not path.is_file():
        raise UserError(f"{path} does not exist; give the directory of a run (the one that holds config.json)")
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}); ask its owner for permission") from None
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); restore it from the run's preset and flags") from None
    return _typed(Experiment, values, str(path))


def build(kind: Any, values: dict[str, Any], where: str = "") -> Any:
    """A dataclass of `kind` (or of the member of a union whose fields fit) from plain values."""
    members = get_args(kind) or (kind,)
    known = {member: {f.name for f in dataclasses.fields(member)} for member in members}
    matching = [member for member in members if set(values) <= known[member] and _literal_fits(member, values)]
    if not matching:
        names = set().union(*known.values())
        stranger = next((key for key in values if key not in names), None)
        if stranger is None:
            raise UserError(f"the values of {where.removesuffix('.')} belong to no one kind of it: {values}")
        raise unknown("configuration key", f"{where}{stranger}", [where + n for n in names])
    member = min(matching, key=lambda member: len(known[member]))
    hints = get_type_hints(member)
    return member(**{key: _typed(hints[key], value, where + key) for key, value in values.items()})


def _typed(hint: Any, value: Any, name: str) -> Any:
    """A value of the configuration, built or checked as its type wants."""
    if dataclasses.is_dataclass(hint) or any(dataclasses.is_dataclass(member) for member in get_args(hint)):
        if not isinstance(value, dict):
            raise UserError(f"{name} must be an object with named values, not {value!r}")
        return build(hint, value, "" if hint is Experiment else f"{name}.")
    require_choice(hint, value, name)
    _require_type(hint, value, name)
    return value


def _require_type(hint: Any, value: Any, name: str) -> None:
    """Refuse a value of another type than its field's; a whole number will do for a float."""
    types = tuple(kind for kind in get_args(hint) or (hint,) if isinstance(kind, type))
    fits = type(value) in types or (float in types and type(value) is int)
    if get_origin(hint) is not Literal and not fits:
        names = " or ".join("null" if kind is NoneType else kind.__name__ for kind in types)
        raise UserError(f"{name} must be of type {names}, not {value!r}; correct it in the run's config.json")


def require_choice(hint: Any, value: Any, name: str) -> None:
    """Refuse a value that is none of the words its type allows."""
    if get_origin(hint) is Literal and value not in get_args(hint):
        raise unknown(f"value of {name}", str(value), get_args(hint))


def _literal_fits(kind: Any, values: dict[str, Any]) -> bool:
    """Does the `name` (the tag of unions) fit the kind?"""
    allowed = get_args(get_type_hints(kind).get("name", str))
    return not allowed or values.get("name", allowed[0]) in allowed


def difference(experiment: Experiment, base: Experiment) -> dict[str, tuple[Any, Any]]:
    """Dotted fields whose values differ: name -> (base, experiment)."""
    ours, theirs = flat(dataclasses.asdict(experiment)), flat(dataclasses.asdict(base))
    return {key: (theirs.get(key), value) for key, value in ours.items() if theirs.get(key) != value}


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flattened: dict[str, Any] = {}
    for key, value in values.items():
        flattened.update(flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return flattened
