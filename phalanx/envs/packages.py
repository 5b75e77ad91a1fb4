"""Ids that Gymnasium does not know until the package they belong to is imported: found, or refused with its name.

Gymnasium registers its own environments only. `register` imports the package of an id that it has not heard of, where
it is installed; `unregistered` is the sentence for an id that stays unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from phalanx.config.kinds import game_of
from phalanx.errors import UserError, nearest


@dataclass(frozen=True)
class Package:
    """A package that brings environments."""

    begins: tuple[str, ...]  # how the ids begin
    module: str  # importing it registers them
    install: str  # its name for pip


PACKAGES = (
    Package(("MiniGrid-", "BabyAI-"), "minigrid", "minigrid"),
    Package(("MinAtar/",), "minatar", "minatar"),
    Package(("Vizdoom",), "vizdoom.gymnasium_wrapper", "vizdoom"),
    Package(("MiniWorld-",), "miniworld", "miniworld"),
    Package(("FlappyBird-",), "flappy_bird_gymnasium", "flappy-bird-gymnasium"),
    Package(
        ("highway-", "merge-", "roundabout-", "parking-", "intersection-", "racetrack-"), "highway_env", "highway-env"
    ),
    Package(("tetris_gymnasium/",), "tetris_gymnasium.envs", "tetris-gymnasium"),
    Package(("procgen",), "procgen", "procgen"),
    Package(
        ("FetchP", "FetchReach", "FetchSlide", "HandManipulate", "HandReach", "AntMaze_", "PointMaze_", "AdroitHand"),
        "gymnasium_robotics",
        "gymnasium-robotics",
    ),
    Package(("mo-", "deep-sea-", "resource-gathering-", "minecart-"), "mo_gymnasium", "mo-gymnasium"),
)
LIKENESS = 0.8  # from which on another id may be meant: most have few letters, and a version in common
ENTRY_POINTS = "gymnasium.envs"
"""The group under which packages name a function that registers their environments; its names are namespaces."""


def register(name: str) -> bool:
    """Import the package that registers an id, where it is known and installed; was there one?"""
    package = _package(name)
    if package is not None and _is_installed(package):
        import_module(package.module)
    named = [entry for entry in entry_points(group=ENTRY_POINTS) if entry.name == name.rpartition("/")[0]]
    for entry in named:
        entry.load()()
    return bool(named) or (package is not None and _is_installed(package))


def is_atari(name: str, registry: Mapping[str, Any]) -> bool:
    """Is it an id that ale_py has registered, with or without its version?"""
    specs = [registry[name]] if name in registry else [spec for spec in registry.values() if spec.name == name]
    return name.startswith("ALE/") or any(str(spec.entry_point).startswith("ale_py") for spec in specs)


def atari_game(name: str) -> UserError:
    """The error for an Atari game as an environment of Gymnasium, which would show raw frames."""
    return UserError(
        f"'{name}' is an Atari game; use a preset such as ppo and --env.game {game_of(name) or 'NAME'}, "
        "which is much faster"
    )


def unregistered(name: str, registered: Iterable[str]) -> UserError:
    """The error for an id that nobody has registered."""
    if game_of(name) or name.startswith("ALE/"):
        return atari_game(name)
    package = _package(name)
    if package is not None and not _is_installed(package):
        return UserError(f"{name} needs {package.install}; pip install {package.install}")
    module = name.removesuffix(".py")
    if module.isidentifier() and Path(f"{module}.py").is_file():
        return UserError(f"'{name}' is a file of yours; did you mean {name}:Class, with the name of what makes it?")
    known = [other for other in registered if not other.startswith("ALE/")]
    if near := nearest(name, _alike(name, known), LIKENESS):
        return UserError(f"unknown Gymnasium environment '{name}'; did you mean {' or '.join(near)}?")
    namespace, _, rest = name.rpartition("/")
    perhaps = f", perhaps {re.sub(r'[^0-9A-Za-z_]', '_', namespace).lower()}:{namespace}/{rest}" if namespace else ""
    return UserError(
        f"nobody has registered '{name}'; if a module of yours does, name it, too: --env.id module:{name}{perhaps}"
    )


def _package(name: str) -> Package | None:
    return next((package for package in PACKAGES if name.startswith(package.begins)), None)


def _is_installed(package: Package) -> bool:
    return find_spec(package.module.partition(".")[0]) is not None


def _alike(name: str, known: list[str]) -> list[str]:
    """Of the registered ids those that may be meant: of the same namespace, if there are any."""
    namespace = name.rpartition("/")[0]
    return [other for other in known if other.rpartition("/")[0] == namespace] or known
