"""Options of a command: a frozen dataclass whose fields are its flags, each with a sentence below it."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from phalanx.errors import require

if TYPE_CHECKING:
    Options = TypeVar("Options")


def parse(kind: type[Options], command: str, arguments: list[str]) -> Options:
    """The options of a command line. What has no default is given by its place; `--help` explains the rest."""
    import tyro

    settings = (tyro.conf.PositionalRequiredArgs, tyro.conf.FlagCreatePairsOff)
    return tyro.cli(kind, prog=f"phalanx {command}", args=arguments, config=settings)


def not_negative(value: int, name: str) -> int:
    require(0 <= value < 2**63, f"{name} is {value}, but must not be negative, and less than 2^63")
    return value


def positive(value: int, name: str) -> int:
    require(value > 0, f"{name} is {value}, but must be at least 1")
    return value
