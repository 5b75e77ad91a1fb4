"""Fields of an experiment from a file: what `--from FILE` on a command line does.

The file has the shape of a run's `config.json`, or of a part of it; where that run is, and what it was made with, is
left out. `phalanx tune` writes such files.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, get_args, get_type_hints

from phalanx.config.code import refuse_own_files
from phalanx.config.experiment import Experiment
from phalanx.config.stored import CONFIG_BYTES, IN_FILE, ORIGIN, build
from phalanx.errors import UserError, require, unknown
from phalanx.files import read_plain

REMARKS = "measured"  # what a file may hold besides, for people
ITS_OWN = ("name", "directory")  # of a run, which no other one may have


def take_files(base: Experiment, flags: list[str]) -> tuple[Experiment, list[str]]:
    """The experiment with the fields of every `--from FILE`; what is left are other flags, which come after."""
    rest, words = [], iter(flags)
    for word in words:
        name, _, value = word.partition("=")
        if name != "--from":
            rest.append(word)
            continue
        value = value or next(words, "")
        require(bool(value) and not value.startswith("--"), "--from needs a file, such as the one phalanx tune writes")
        base = overlaid(base, Path(value))
    return base, rest


def overlaid(base: Experiment, path: Path) -> Experiment:
    """The experiment with the fields that a file names."""
    values = _read(path)
    for name in (REMARKS, ORIGIN):
        values.pop(name, None)
    if isinstance(run := values.get("run"), dict):
        values["run"] = {name: value for name, value in run.items() if name not in ITS_OWN}
    made_for = values.pop("preset", base.preset)
    require(
        made_for == base.preset,
        f"{path} was made for the preset {made_for}, not for {base.preset}; make one for that, or remove the line",
    )
    hints = get_type_hints(Experiment)
    parts = {field.name for field in dataclasses.fields(base)} - {"preset"}
    try:
        for part, given in values.items():
            if part not in parts:
                raise unknown("configuration key", part, parts)
            require(isinstance(given, dict), f"{part} must be an object with named values")
            base = dataclasses.replace(base, **{part: changed_part(hints[part], getattr(base, part), part, given)})
    except UserError as error:
        raise UserError(f"in {path}: {str(error).replace(IN_FILE, '')}") from None
    if path.name == "config.json" and (path.parent / "checkpoints").is_dir():
        refuse_own_files(base, path.parent)
    return base


def changed_part(hint: Any, present: Any, name: str, given: dict[str, Any]) -> Any:
    """A part with some fields changed, or one of another kind, which the file then describes whole."""
    known, names = get_type_hints(type(present)), get_args(get_type_hints(type(present)).get("name"))
    same = set(given) <= set(known) and (not names or given.get("name", names[0]) in names)
    if same or not get_args(hint):
        return build(type(present), {**dataclasses.asdict(present), **given}, f"{name}.")
    return build(hint, given, f"{name}.")


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(read_plain(path, CONFIG_BYTES))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; phalanx tune writes such a file") from None
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}); choose another file for --from") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error}); write it again with phalanx tune") from None
    require(isinstance(values, dict), f"{path} holds no object with named values; write it again with phalanx tune")
    return dict(values)
