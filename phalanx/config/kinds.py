"""Presets play environments of one kind: Atari games, or Gymnasium's. One of the other kind is refused with the preset
that plays it. Command line and Python ask here before they change `env`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from phalanx.config.experiment import AtariConfig, Experiment, GymnasiumConfig, SerialConfig, SynchronousConfig
from phalanx.errors import UserError
from phalanx.given import is_lost

SELECTS = {"game": AtariConfig, "id": GymnasiumConfig}
"""The fields of `env` that name an environment, and the kind that has them."""


def refuse_other_kind(base: Experiment, field: str, value: str) -> None:
    """Refuse `env.game` or `env.id` where the preset plays no environment of that kind, and a game that is an id of
    Gymnasium; `value` is what it was to be."""
    right = isinstance(base.env, SELECTS.get(field, object))
    if right and not (field == "game" and is_id(value)):
        return
    name = type(base.algorithm).__name__.removesuffix("Config").lower()
    game = game_of(value)  # not before: importing ale_py registers its ids with Gymnasium
    if game is not None and isinstance(base.env, AtariConfig):
        raise UserError(f"'{value}' is the Atari game {game}: {_both(base.preset, 'game', game)}")
    if field == "game" and not right:
        raise UserError(f"{base.preset} plays {_kind(base)}; for Atari: {_both(name, 'game', game or value)}")
    raise UserError(
        f"{base.preset} plays {_kind(base)}; for Gymnasium: {_both(f'{name}-gym', 'id', value, _further(base))}"
    )


def environments_named(flags: list[str]) -> Iterator[tuple[str, str]]:
    """Field and value of the flags that name an environment."""
    for at, word in enumerate(flags):
        flag, equals, value = word.partition("=")
        if flag in ("--env.game", "--env.id") and (equals or at + 1 < len(flags)):
            yield flag.removeprefix("--env."), value if equals else flags[at + 1]


def is_id(text: str) -> bool:
    """Does it look like an id of Gymnasium? Games have small letters and no version."""
    return "/" in text or re.search(r"-v\d+$", text) is not None


def game_of(text: str) -> str | None:
    """The game that an id of Gymnasium stands for (ALE/Pong-v5, PongNoFrameskip-v4, pong), None if it is not a game."""
    from ale_py import roms

    words = re.sub(r"-v\d+$", "", text.removeprefix("ALE/"))
    words = re.sub(r"(NoFrameskip|Deterministic)$", "", words).removesuffix("-ram")
    game = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", words).lower()
    return game if game in roms.get_all_rom_ids() else None


def _kind(base: Experiment) -> str:
    if isinstance(base.env, AtariConfig):
        return "Atari games"
    return "Gymnasium environments" if isinstance(base.env, GymnasiumConfig) else f"{base.env.name}, a toy"


def _further(base: Experiment) -> str:
    """The topology that a preset is named for, which the one for Gymnasium has not."""
    return "" if isinstance(base.topology, SerialConfig | SynchronousConfig) else base.topology.name


def _both(preset: str, field: str, value: str, topology: str = "") -> str:
    """How it is said on the command line and from Python; there alone for an object that has no name."""
    flag, override = (f" --topology {topology}", f', overrides={{"topology": "{topology}"}}') if topology else ("", "")
    if is_lost(value):
        return f'phalanx.train("{preset}", env=...{override})'
    command = f"phalanx train {preset} --env.{field} {value}{flag}"
    return f'{command}, or phalanx.train("{preset}", env="{value}"{override})'
