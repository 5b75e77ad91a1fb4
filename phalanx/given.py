"""Code that a user gives (an environment, a network, an algorithm) as the value of a configuration field.

A field holds text. `module:name` and `path/to/file.py:name` are found again by whoever reads it. What cannot be found
by name (a function of a notebook, of `__main__`, or within another function) travels by value instead: `Given` is the
text with the pickled object behind it. The text alone is what `config.json` keeps, so nothing that a run directory
holds is ever executed; such a run asks for its code again.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib import import_module
from importlib.machinery import all_suffixes
from pathlib import Path
from types import ModuleType
from typing import Any

from phalanx.errors import UserError, in_words, unknown

MARK = "given:"
LONGEST_NAME = 1_000  # letters of a name, with the path of its file

_originals: dict[bytes, Any] = {}
"""What this process pickled, by its pickle. To read that here would set up the user's own classes anew."""
_added: set[str] = set()  # directories that `look_here` put on the path
_closed: set[Path] = set()  # run directories, in which no module is looked for


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
    return f"{module}:{name}" if is_found_again(thing) else by_value(thing, name, module)


def is_found_again(thing: Any) -> bool:
    """Would another process find it by its name?"""
    module, name = getattr(thing, "__module__", "__main__"), getattr(thing, "__qualname__", "")
    return is_importable(module) and found_under(module, name) is thing


def by_value(thing: object, name: str, module: str) -> Given:
    """Any object, with what it refers to of a module."""
    import cloudpickle

    try:
        with taken_along(module):
            given = Given(name, cloudpickle.dumps(thing))
    except Exception as error:  # whatever its parts raise
        raise UserError(
            f"{name} cannot be sent to other processes ({in_words(error)}); create what it holds inside of it, or put "
            "it into a module and name it as module:name"
        ) from error
    _originals[given.pickled] = thing
    return given


def is_code(text: str) -> bool:
    """Does a field's text stand for a user's code, and not for something that is known by this name?"""
    return ":" in text and text.isprintable() and len(text) <= LONGEST_NAME


def whole_path(text: str) -> str:
    """The same with the whole path of a file, so that it is found from another directory, too."""
    place, _, name = text.rpartition(":")
    return f"{os.path.abspath(place)}:{name}" if place.endswith(".py") and not text.startswith(MARK) else text


def without_folder(text: str) -> str:
    """The same with the bare name of a file, for those who get it from somebody else."""
    place, _, name = text.rpartition(":")
    return f"{os.path.basename(place)}:{name}" if place.endswith(".py") and not text.startswith(MARK) else text


def is_lost(text: str) -> bool:
    """Was it given by value to a run that an earlier process made? Then only its name is left."""
    return text.startswith(MARK) and not isinstance(text, Given)


def spoken(text: str) -> str:
    """A short name for what a field's text stands for, as directories and sentences want it."""
    return text.rpartition(":")[2].rpartition("<locals>.")[2].strip("<>") if is_code(text) else text


def resolve(text: str, what: str) -> Any:
    """The object that a field's text stands for; `what` is its name in sentences, such as `env.id`."""
    if isinstance(text, Given):
        return _originals[text.pickled] if text.pickled in _originals else unpickled(text.pickled)
    if is_lost(text):
        raise UserError(
            f"{what} was given to this run as a Python object, {text.removeprefix(MARK)}, which is not stored with it; "
            "give it again from Python, or put it into a module and name it as module:name"
        )
    place, _, name = text.rpartition(":")
    module = module_at(place, what)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise unknown(f"name in {place}", name, [known for known in vars(module) if not known.startswith("_")])
        found = getattr(found, part)
    return found


def module_at(place: str, what: str) -> ModuleType:
    """The module of that name, or in that file."""
    return from_file(place, what) if place.endswith(".py") else from_module(place, what)


@lru_cache
def unpickled(pickled: bytes) -> Any:
    import cloudpickle

    return cloudpickle.loads(pickled)


def from_module(name: str, what: str) -> ModuleType:
    look_here()
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
    """The module in a file that is on nobody's path; imported once in a process. Its name is the same in all of them,
    so that what is pickled in one is found in another that has imported the file, too. It may import the files beside
    it, which come last on the path."""
    file = Path(path).resolve()
    name = f"phalanx_given_{file.stem}_{zlib.crc32(os.fsencode(file)):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise UserError(f"{what}: there is no file {path}; name one as path/to/file.py:name")
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # it is somebody else's code
        del sys.modules[name]
        raise UserError(f"{what}: {path} cannot be imported: {in_words(error)}") from error
    return module


def look_here() -> None:
    """A user's modules may be those of the current directory. It comes last, so that a file there never stands in for a
    module of phalanx, of Python or of a package; child processes do the same."""
    with contextlib.suppress(OSError):  # a directory that was removed holds none
        here = os.getcwd()
        if not {"", here} & set(sys.path) and not any(file_in(directory, Path(here)) for directory in _closed):
            sys.path.append(here)
            _added.add(here)


def do_not_look_in(directory: Path) -> None:
    """A run directory is no place for modules, not even while it is the current one."""
    _closed.add(directory.resolve())
    for added in {each for each in _added if file_in(directory, Path(each))}:
        _added.remove(added)
        sys.path.remove(added)


def files_of(place: str) -> Iterator[Path]:
    """The files that are executed when a module, or a file, of this name is imported: of a module also those of the
    packages around it, wherever Python looks."""
    if place.endswith(".py"):
        yield Path(place)
        return
    parts = place.split(".")
    for base in {*sys.path, ""}:
        for depth in range(1, len(parts) + 1):
            stem = Path(base, *parts[:depth])
            files = [f"{stem}{suffix}" for suffix in all_suffixes()]
            files += [f"{stem}/__init__{suffix}" for suffix in all_suffixes()]
            yield from (Path(file) for file in files if os.path.isfile(file))


def file_in(directory: Path, file: Path) -> bool:
    return file.resolve().is_relative_to(directory.resolve())


def found_under(module: str, name: str) -> Any:
    """The object that is importable by this name, None if none is."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def is_importable(module: str) -> bool:
    """Would another process that imports this name get what is known by it here?"""
    if module == "__main__" or module not in sys.modules:
        return False
    with contextlib.suppress(ImportError, ValueError, AttributeError):  # names that were made up have no specification
        parent = module.rpartition(".")[0]
        path = sys.modules[parent].__path__ if parent else None
        known = getattr(sys.modules[module], "__file__", None)
        found = next((spec for finder in sys.meta_path if (spec := finder.find_spec(module, path))), None)
        return module in sys.builtin_module_names or (found is not None and found.origin == known)
    return False


@contextlib.contextmanager
def taken_along(module: str) -> Iterator[None]:
    """Pickle what a module holds by value, if it is one that nobody else can import."""
    import cloudpickle

    known = sys.modules.get(module)
    if known is None or is_importable(module) or module in ("__main__", "builtins"):
        yield
        return
    cloudpickle.register_pickle_by_value(known)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(known)
