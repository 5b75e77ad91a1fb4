"""`phalanx completion bash|zsh`: what a shell needs to complete phalanx's commands, presets, flags and their values.

The script that is printed asks `phalanx completion words ...` at each Tab. So the flags are those of the preset that is
on the line, with no list of them to grow old. Heavy packages are not imported: an answer takes a tenth of a second.
"""

from __future__ import annotations

import contextlib
import dataclasses
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from phalanx.cli.help import names
from phalanx.cli.options import PRESET_COMMANDS, CompletionOptions
from phalanx.config import TOPOLOGIES, AtariConfig, Experiment
from phalanx.config.flags import choose_topology, parse_options
from phalanx.config.presets import PRESETS, default_preset, preset
from phalanx.errors import UserError
from phalanx.studies import STUDIES

SCRIPTS = {
    "bash": r"""_phalanx() {
  local IFS=$'\n'
  COMPREPLY=($(phalanx completion words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _phalanx phalanx""",
    "zsh": r"""#compdef phalanx
_phalanx() {
  local -a found
  found=(${(f)"$(phalanx completion words "${(@)words[2,CURRENT]}" 2>/dev/null)"})
  compadd -a found || _files
}
compdef _phalanx phalanx""",
}
OPTIONS = {
    "eval": "phalanx.cli.play:EvalOptions",
    "play": "phalanx.cli.play:PlayOptions",
    "export": "phalanx.cli.export:ExportOptions",
    "tune": "phalanx.bench.tune:TuneOptions",
    "bench": "phalanx.bench.machine:BenchOptions",
}
"""Commands whose options are the fields of a class."""


def command(arguments: list[str]) -> int:
    """Print the script of a shell, or the words that may stand where the cursor is."""
    if arguments[:1] == ["words"]:
        with contextlib.suppress(UserError):  # nothing completes what is wrong already
            print("\n".join(candidates(arguments[1:])))
        return 0
    print(SCRIPTS[parse_options(CompletionOptions, "completion", arguments).shell])
    return 0


def candidates(words: list[str]) -> list[str]:
    """What may stand in the place of the last word, which is only begun; nothing where a file may."""
    *before, begun = words or [""]
    return [word for word in _all(before) if word.startswith(begun)]


def _all(before: list[str]) -> list[str]:
    if not before:
        return [*_commands(), "--help", "--version"]
    name, rest = before[0], before[1:]
    if not rest:
        first = {
            **{command: ["default", *PRESETS] for command in PRESET_COMMANDS},
            "study": list(STUDIES),
            "bench": ["sampling", "training", "gpu"],
            "completion": list(SCRIPTS),
        }
        return first.get(name, [])
    if name in PRESET_COMMANDS:
        chosen = default_preset() if rest[0] == "default" else rest[0]
        base, _ = choose_topology(preset(chosen), rest[1:])
        values = _values(base, rest[-1])
        own = [] if values or name not in OPTIONS else _own_flags(name)
        return values or [*own, *_flags(base)]
    return _own_flags(name) if name in OPTIONS else []


def _commands() -> list[str]:
    from phalanx.cli.main import COMMANDS

    return list(COMMANDS)


def _own_flags(command: str) -> list[str]:
    module, _, name = OPTIONS[command].partition(":")
    kind = getattr(import_module(module), name)
    optional = [field for field in dataclasses.fields(kind) if field.default is not dataclasses.MISSING]
    return [_flag(field.name) for field in optional]


def _flags(base: Experiment) -> list[str]:
    return ["--topology", "--from", "--help", "--help-all", *(_flag(name) for name in names(base))]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _values(base: Experiment, flag: str) -> list[str]:
    """The values that a flag may have, where they are few."""
    if flag == "--topology":
        return list(TOPOLOGIES)
    if flag == "--env.game" and isinstance(base.env, AtariConfig):
        return _games()
    where, _, field = flag.removeprefix("--").replace("-", "_").rpartition(".")
    owner = getattr(base, where, None)
    hint: Any = get_type_hints(type(owner)).get(field) if dataclasses.is_dataclass(owner) else None
    if get_origin(hint) is tuple:
        hint = get_args(hint)[0]
    if hint is bool:
        return ["True", "False"]
    return [str(value) for value in get_args(hint)] if get_origin(hint) is Literal else []


def _games() -> list[str]:
    """The ROMs beside the emulator, which is not imported for it."""
    found = find_spec("ale_py")
    if found is None or found.origin is None:
        return []
    return sorted(path.stem for path in (Path(found.origin).parent / "roms").glob("*.bin"))
