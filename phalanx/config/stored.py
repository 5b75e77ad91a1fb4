"""An experiment as plain values: written to `config.json` in the run directory, read again, and compared."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from phalanx.config.experiment import Experiment
from phalanx.errors import RunError, UserError, tell, unknown
from phalanx.files import read_plain, write_whole
from phalanx.given import is_code

CONFIG_BYTES = 1 << 20  # no configuration is larger
LARGEST = 2**63  # whole numbers stay below
IN_FILE = "; correct it in the run's config.json"


ORIGIN = "made_with"
"""Key beside the experiment's own: versions and the machine, which tell where a run comes from and change nothing."""


def save(experiment: Experiment, path: Path, origin: dict[str, Any] | None = None) -> None:
    """Write it whole or not at all: a run without its configuration is lost."""
    values = dataclasses.asdict(experiment) | ({} if origin is None else {ORIGIN: origin})
    try:
        write_whole(path, json.dumps(values, indent=2) + "\n")
    except OSError as error:
        raise RunError(f"cannot write {path} ({error.strerror}); make room there and start again") from None


def existing_run(directory: Path) -> Path:
    """The directory, if there is a run in it."""
    try:
        found = (directory / "config.json").is_file()
    except OSError as error:
        raise UserError(f"cannot read {directory} ({error.strerror}); ask its owner for permission") from None
    if not found:
        raise UserError(
            f"{directory} is not a run directory: it has no config.json; give the one `phalanx train` named"
        )
    return directory


def load(path: Path, report: Callable[[str], None] = tell) -> Experiment:
    """The experiment a `config.json` describes; an unknown key or kind is refused by name, one that is not there is
    reported."""
    if not path.is_file():
        raise UserError(f"{path} does not exist; give the directory of a run (the one that holds config.json)")
    try:
        values = json.loads(read_plain(path, CONFIG_BYTES))
    except PermissionError as error:
        raise UserError(f"cannot read {path} ({error.strerror}); ask its owner for permission") from None
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}); put the run's own config.json there") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error}); restore it from the run's preset and flags") from None
    if isinstance(values, dict):
        values.pop(ORIGIN, None)
    experiment: Experiment = typed(Experiment, values := moved(values), str(path))
    for name, default in missing(experiment, values).items():
        if default not in ("", ()):  # what is empty by default changes nothing
            report(f"{path} lacks {name}; taking the default {default}")
    return experiment


def load_origin(path: Path) -> Any:
    """What a run was made with, as its `config.json` tells it: of any shape, since anybody may have written it. None if
    it does not tell, as those of earlier versions."""
    try:
        return json.loads(read_plain(path, CONFIG_BYTES))[ORIGIN]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None


def moved(values: Any) -> Any:
    """The same values with keys where they are now: `overlap` and `raw_screens` were those of one topology."""
    try:
        topology, sampler = dict(values["topology"]), values["sampler"]
        found = {"overlap": topology.pop("overlap", False), "raw_screens": topology.pop("raw_screens", True)}
        return {**values, "topology": topology, "sampler": {**found, **sampler}}
    except (KeyError, TypeError, AttributeError):
        return values  # what is wrong with it is said by whoever reads it


def missing(built: Any, values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """What a dataclass built from plain values did not find in them: dotted name -> the default it has instead."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(built):
        name, value = prefix + field.name, getattr(built, field.name)
        if dataclasses.is_dataclass(value):
            found.update(missing(value, values.get(field.name, {}), f"{name}."))
        elif field.name not in values:
            found[name] = value
    return found


def build(kind: Any, values: dict[str, Any], where: str = "") -> Any:
    """A dataclass of `kind` (or of the member of a union whose fields fit) from plain values."""
    members = get_args(kind) or (kind,)
    known = {member: {f.name for f in dataclasses.fields(member)} for member in members}
    matching = [member for member in members if set(values) <= known[member] and _literal_fits(member, values)]
    if not matching:
        names = set().union(*known.values())
        stranger = next((key for key in values if key not in names), None)
        if stranger is None:
            raise UserError(f"the values of {where.removesuffix('.')} belong to no one kind of it: {_short(values)}")
        raise unknown("configuration key", f"{where}{_short(stranger)[1:-1]}", [where + n for n in names])
    member = min(matching, key=lambda member: len(known[member]))
    hints = get_type_hints(member)
    return member(**{key: typed(hints[key], value, where + key) for key, value in values.items()})


def typed(hint: Any, value: Any, name: str) -> Any:
    """A value of the configuration, built or checked as its type wants."""
    if dataclasses.is_dataclass(hint) or any(dataclasses.is_dataclass(member) for member in get_args(hint)):
        if not isinstance(value, dict):
            raise UserError(f"{name} must be an object with named values, not {_short(value)}")
        return build(hint, value, "" if hint is Experiment else f"{name}.")
    if get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise UserError(f"{name} must be a list, not {_short(value)}; correct it in the run's config.json")
        return tuple(typed(get_args(hint)[0], each, name) for each in value)
    require_choice(hint, value, name)
    _require_type(hint, value, name)
    return value


def _require_type(hint: Any, value: Any, name: str) -> None:
    """Refuse a value of another type than its field's; a whole number will do for a float."""
    types = tuple(kind for kind in get_args(hint) or (hint,) if isinstance(kind, type))
    fits = type(value) in types or (float in types and type(value) is int) or (str in types and isinstance(value, str))
    if type(value) is int and abs(value) >= LARGEST:
        raise UserError(f"{name} is {_short(value)}, but must be less than 2^63{IN_FILE}")
    if get_origin(hint) is not Literal and not fits:
        names = " or ".join("null" if kind is NoneType else kind.__name__ for kind in types)
        raise UserError(f"{name} must be of type {names}, not {_short(value)}{IN_FILE}")


def require_choice(hint: Any, value: Any, name: str) -> None:
    """Refuse a value that is none of the words its type allows, nor code where its type also allows text."""
    if get_origin(hint) is tuple:
        for each in value:
            require_choice(get_args(hint)[0], each, name)
        return
    words = next((member for member in (hint, *get_args(hint)) if get_origin(member) is Literal), None)
    if words is None or value in get_args(words) or (words is not hint and (value is None or is_code(str(value)))):
        return
    raise unknown(f"value of {name}", _short(value).strip("'"), get_args(words))


def _short(value: Any) -> str:
    """A value as one line of a sentence shows it."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deep, or a number of too many digits
        return f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _literal_fits(kind: Any, values: dict[str, Any]) -> bool:
    """Does the `name` (the tag of unions) fit the kind?"""
    allowed = get_args(get_type_hints(kind).get("name", str))
    return not allowed or values.get("name", allowed[0]) in allowed


def difference(experiment: Experiment, base: Experiment) -> dict[str, tuple[Any, Any]]:
    """Dotted fields whose values differ: name -> (base, experiment)."""
    ours, theirs = flat(dataclasses.asdict(experiment)), flat(dataclasses.asdict(base))
    return {key: (theirs.get(key), value) for key, value in ours.items() if theirs.get(key) != value}


def changed_fields(experiment: Experiment, base: Experiment) -> list[str]:
    """In words: `algorithm.clip 0.2 -> 0.3`. Fields of a part that the base had none of are of its new kind."""
    known = flat(dataclasses.asdict(base))
    return [f"{name} {old} -> {new}" for name, (old, new) in difference(experiment, base).items() if name in known]


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flattened: dict[str, Any] = {}
    for key, value in values.items():
        flattened.update(flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return flattened
