"""Code that a user gives (an environment, a network, an algorithm) as the value of a configuration field.

A field holds text. `module:name` and `path/to/file.py:name` are found again by whoever reads it. What cannot be found
by name (a function of a notebook, of `__main__`, or within another function) travels by value instead: `Given` is the
text with the pickled object behind it. The text alone is what `config.json` keeps, so nothing that a run directory
holds is ever executed; such a run asks for its code again.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from phalanx.errors import UserError, in_words, unknown

MARK = "given:"


class Given(str):
    """The name of an object that is in no module, and the object, pickled by value."""

    pickled: bytes

    def __new__(cls, name: str, pickled: bytes) -> Given:
        given = super().__new__(cls, f"{MARK}{name}")
        given.pickled = pickled
        return given

    def __reduce__(self) -> tuple[Any, ...]:
        return Given, (str(self).removeprefix(MARK), self.pickled)


def by_name_or_value(thing: Callable[..., Any]) -> str:
    """The text for a configuration field that stands for a callable."""
    module, name = getattr(thing, "__module__", "__main__"), getattr(thing, "__qualname__", type(thing).__name__)
    if module != "__main__" and found_under(module, name) is thing:
        return f"{module}:{name}"
    import cloudpickle

    try:
        return Given(name, cloudpickle.dumps(thing))
    except Exception as error:  # whatever its parts raise
        raise UserError(
            f"{name} cannot be sent to other processes ({in_words(error)}); create what it holds inside of it, or put "
            "it into a module and name it as module:name"
        ) from error


def is_code(text: str) -> bool:
    """Does a field's text stand for a user's code, and not for something that is known by this name?"""
    return text.startswith(MARK) or ":" in text


def resolve(text: str, what: str) -> Any:
    """The object that a field's text stands for; `what` is its name in sentences, such as `env.id`."""
    if isinstance(text, Given):
        return unpickled(text.pickled)
    if text.startswith(MARK):
        raise UserError(
            f"{what} was given to this run as a Python object, {text.removeprefix(MARK)}, which is not stored with it; "
            "give it again from Python, or put it into a module and name it as module:name"
        )
    place, _, name = text.rpartition(":")
    module = from_file(place, what) if place.endswith(".py") else from_module(place, what)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise unknown(f"name in {place}", name, [known for known in vars(module) if not known.startswith("_")])
        found = getattr(found, part)
    return found


@lru_cache
def unpickled(pickled: bytes) -> Any:
    import cloudpickle

    return cloudpickle.loads(pickled)


def from_module(name: str, what: str) -> ModuleType:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise UserError(f"{what}: the module {name} cannot be imported: {in_words(error)}") from error
        raise UserError(
            f"{what}: there is no module {error.name}; start phalanx where it is, install it, or name a file as "
            "path/to/file.py:name"
        ) from None
    except Exception as error:  # it is somebody else's code
        raise UserError(f"{what}: the module {name} cannot be imported: {in_words(error)}") from error


def from_file(path: str, what: str) -> ModuleType:
    """The module in a file that is on nobody's path; imported once in a process."""
    file = Path(path).resolve()
    name = f"phalanx_given_{file.stem}_{abs(hash(str(file))):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise UserError(f"{what}: there is no file {path}; name one as path/to/file.py:name")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # it is somebody else's code
        del sys.modules[name]
        raise UserError(f"{what}: {path} cannot be imported: {in_words(error)}") from error
    return module


def found_under(module: str, name: str) -> Any:
    """The object that is importable by this name, None if none is."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found
