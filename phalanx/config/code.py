"""Code of a user's own in an experiment, given from Python: an environment, a torso, an algorithm.

What is in no module travels by value (`phalanx/given.py`), and `config.json` keeps its name only. Within the process
that gave it, it is remembered for its run directory; another process has to give it again.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.config.experiment import AtariConfig, Experiment, GymnasiumConfig, ToyConfig
from phalanx.config.kinds import is_id, refuse_other_kind
from phalanx.config.own import with_algorithm
from phalanx.errors import UserError, require
from phalanx.given import (
    Given,
    by_name_or_value,
    by_value,
    do_not_look_in,
    file_in,
    files_of,
    is_code,
    is_found_again,
    is_lost,
    whole_path,
    without_folder,
)

FIELDS = ("env.id", "env.wrap", "model.torso", "algorithm.code")
"""Those that may stand for code."""
AGAIN = {"env": "env.id", "wrap": "env.wrap", "model": "model.torso", "algorithm": "algorithm.code"}
"""The same, by the arguments with which code is given again."""

_remembered: dict[Path, dict[str, Given]] = {}


def with_code(experiment: Experiment, env: Any = None, model: Any = None, algorithm: Any = None) -> Experiment:
    """The experiment on another environment, with another torso or algorithm: each by its name, or as it is."""
    if env is not None:
        experiment = _with_env(experiment, env)
    if model is not None:
        torso = dataclasses.replace(experiment.model, torso=_text(model, "model", "a function that makes a torso"))
        experiment = dataclasses.replace(experiment, model=torso)
    if algorithm is not None:
        text = _text(algorithm, "algorithm", "a class with batches and loss")
        if text != whole_path(experiment.algorithm.code):  # else its own settings stay
            experiment = with_algorithm(experiment, text)
    return experiment


def _with_env(experiment: Experiment, env: Any) -> Experiment:
    """On another environment of the preset's kind; code, and whatever it makes, is of Gymnasium."""
    text, present = _text(env, "env", "a function that makes an environment, such as lambda: MyEnv()"), experiment.env
    if isinstance(present, GymnasiumConfig):
        changed: Any = dataclasses.replace(present, id=text)
    elif is_code(text):
        changed = GymnasiumConfig(id=text, stack=present.stack)
    elif isinstance(present, AtariConfig):
        refuse_other_kind(experiment, "game", text)
        changed = dataclasses.replace(present, game=text)
    else:
        assert isinstance(present, ToyConfig)
        if is_id(text):
            refuse_other_kind(experiment, "id", text)
        changed = dataclasses.replace(present, name=text)  # type: ignore[arg-type]
    return dataclasses.replace(experiment, env=changed)


def _text(thing: str | Callable[..., Any], name: str, wanted: str) -> str:
    if isinstance(thing, str):
        return whole_path(known_everywhere(thing) if name == "env" else thing)
    if not callable(thing):
        raise UserError(f"{name}= is {_a(type(thing).__name__)}; give a name or {wanted}")
    return by_name_or_value(thing)


def _a(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiouAEIOU" else f"a {kind}"


def known_everywhere(id: str) -> str:
    """The text for an id of Gymnasium: what is registered with it, by value, where that is a class of a script or a
    notebook, of which worker processes know nothing."""
    registry = getattr(sys.modules.get("gymnasium"), "registry", {})
    made_by = getattr(registry.get(id), "entry_point", None)
    if not callable(made_by) or is_found_again(made_by):
        return id
    return by_value(registry[id], id, getattr(made_by, "__module__", "__main__"))


def code_of(experiment: Experiment) -> dict[str, str]:
    """The fields that may stand for code, of those that the experiment has."""
    found = {}
    for name in FIELDS:
        part, _, field = name.partition(".")
        if hasattr(getattr(experiment, part), field):
            found[name] = getattr(getattr(experiment, part), field)
    return found


def with_whole_paths(experiment: Experiment) -> Experiment:
    """The experiment with the whole paths of files with code, as its run directory keeps them."""
    return _with_code(experiment, whole_path)


def without_folders(experiment: Experiment) -> Experiment:
    """The experiment as it is given away: where its author keeps files with code is nobody else's business."""
    return _with_code(experiment, without_folder)


def _with_code(experiment: Experiment, change: Callable[[str], str]) -> Experiment:
    for name, text in code_of(experiment).items():
        part, _, field = name.partition(".")
        if (changed := change(text)) != text:
            values = dataclasses.replace(getattr(experiment, part), **{field: changed})
            experiment = dataclasses.replace(experiment, **{part: values})
    return experiment


def remember(experiment: Experiment, directory: Path) -> None:
    """For the rest of this process: the code that the run in a directory was given by value."""
    by_value = {name: text for name, text in code_of(experiment).items() if isinstance(text, Given)}
    if by_value:
        _remembered[directory.resolve()] = by_value


def given_again(saved: Experiment, directory: Path, **given: Any) -> Experiment:
    """The experiment of a run directory with the code back that was given to it by value: remembered, or given again
    by an argument of `AGAIN`. What else was said of them stays."""
    refuse_own_files(saved, directory)
    known = dict(_remembered.get(directory.resolve(), {}))
    for name, thing in given.items():
        if thing is not None:
            known[AGAIN[name]] = _text(thing, name, "the code again")  # type: ignore[assignment]
    for name, text in code_of(saved).items():
        if name in known and is_lost(text):
            part, _, field = name.partition(".")
            saved = dataclasses.replace(
                saved, **{part: dataclasses.replace(getattr(saved, part), **{field: known[name]})}
            )
    return saved


def refuse_in_vain(saved: Experiment, **given: Any) -> None:
    """Refuse code for an agent whose run names that part by itself: it would not be used."""
    for name, thing in given.items():
        present = code_of(saved).get(AGAIN[name], saved.env.name)
        require(
            thing is None or is_lost(present) or _text(thing, name, "the code again") == whole_path(present),
            f"{name}= gives code again that the run got as a Python object, but its {AGAIN[name]} is "
            f"{present or 'empty'}, which is found by its name; leave {name}= out",
        )


def refuse_own_files(saved: Experiment, directory: Path) -> None:
    """A run directory may come from anywhere: code that lies in it is not executed, whatever its `config.json` says."""
    do_not_look_in(directory)
    for name, text in code_of(saved).items():
        place = text.rpartition(":")[0]
        own = is_code(text) and not is_lost(text) and any(file_in(directory, file) for file in files_of(place))
        require(
            not own,
            f"{name} names {place}, a file in the run directory, of which nothing is executed; if you trust it, move "
            "it elsewhere and name it in the run's config.json",
        )
