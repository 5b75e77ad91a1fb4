"""From the words of a command line to an Experiment: a preset's name, then dotted flags that change its fields.

The commands of `cli/` and the benchmarks parse through these.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from phalanx.config.experiment import TOPOLOGIES, Experiment
from phalanx.config.kinds import environments_named, refuse_other_kind
from phalanx.config.overlay import take_files
from phalanx.config.own import own_fields, own_hints, own_values, refuse_unread, with_algorithm, with_own_values
from phalanx.config.presets import default_preset, preset
from phalanx.errors import UserError, unknown

Options = TypeVar("Options")

POWER = re.compile(r"\d+(\.\d+)?[eE]\+?\d{1,2}")
"""A number such as 1e6 or 2.5e5."""


def parse_experiment(command: str, arguments: list[str]) -> Experiment:
    """The validated experiment a preset and flags describe."""
    if not arguments or arguments[0].startswith("-"):
        raise UserError(f"name a preset: phalanx {command} PRESET; `phalanx presets` lists them")
    name = arguments[0]
    if name == "default":
        name = default_preset()
    return parse_flags(f"phalanx {command} {name}", preset(name), arguments[1:]).validate()


def parse_flags(program: str, base: Experiment, flags: list[str]) -> Experiment:
    """An experiment with fields changed by files (`--from`), then by dotted flags; tyro names the nearest flag for an
    unknown one."""
    base, flags = take_files(base, flags)
    if not flags:
        return base
    import tyro

    for field, value in environments_named(flags):
        refuse_other_kind(base, field, value)
    base, flags = choose_topology(base, flags)
    base, flags = choose_algorithm(base, flags)
    refuse_unread(base.algorithm, (_dotted(word) for word in flags))
    base, flags = change_own_fields(program, base, flags)
    flags = whole_numbers(base, flags)
    kind = tyro.conf.AvoidSubcommands[tyro.conf.FlagConversionOff[Experiment]]
    return tyro.cli(kind, prog=program, default=base, args=flags)


def _dotted(word: str) -> str:
    """The field that a flag is of: `algorithm.gae_lambda` of `--algorithm.gae-lambda=1`."""
    return word.partition("=")[0].removeprefix("--").replace("-", "_")


def parse_options(kind: type[Options], command: str, arguments: list[str]) -> Options:
    """The options of a command, of which each is a field with a sentence below it. What has no default is given by its
    place; `--help` explains the rest."""
    import tyro

    return tyro.cli(_named_places(kind), prog=f"phalanx {command}", args=arguments, config=_as_words())


def _named_places(kind: type[Options]) -> type[Options]:
    """The same options; what is given by its place is shown by its name, such as PRESET, not by its type: STR. One of a
    few words is shown as these."""
    import tyro

    hints = get_type_hints(kind)
    places = [field for field in dataclasses.fields(cast(Any, kind)) if field.default is dataclasses.MISSING]
    places = [field for field in places if get_origin(hints[field.name]) is not Literal]
    named: Any = [(each.name, Annotated[hints[each.name], tyro.conf.arg(metavar=each.name.upper())]) for each in places]
    made: Any = dataclasses.make_dataclass(kind.__name__, named, bases=(kind,), frozen=True)
    made.__doc__ = kind.__doc__
    return made


def parse_known(kind: type[Options], command: str, arguments: list[str]) -> tuple[Options, list[str]]:
    """The same, and the flags that are none of them: those of an experiment."""
    import tyro

    settings = _as_words()
    return tyro.cli(kind, prog=f"phalanx {command}", args=arguments, config=settings, return_unknown_args=True)


def _as_words() -> tuple[Any, ...]:
    import tyro

    return (tyro.conf.PositionalRequiredArgs, tyro.conf.FlagCreatePairsOff)


def choose_topology(base: Experiment, flags: list[str]) -> tuple[Experiment, list[str]]:
    """`--topology NAME` swaps the whole topology; what is left are flags of fields."""
    name, rest = take(flags, "--topology")
    if name is None:
        return base, flags
    if name not in TOPOLOGIES:
        raise unknown("topology", name, TOPOLOGIES)
    return dataclasses.replace(base, topology=TOPOLOGIES[name]()), rest


def choose_algorithm(base: Experiment, flags: list[str]) -> tuple[Experiment, list[str]]:
    """`--algorithm module:Class` has a user's class learn; what is left are flags of fields."""
    text, rest = take(flags, "--algorithm")
    return (base, flags) if text is None else (with_algorithm(base, text), rest)


def change_own_fields(program: str, base: Experiment, flags: list[str]) -> tuple[Experiment, list[str]]:
    """Flags of fields that a user's own algorithm has beyond ours; what is left are those of the experiment."""
    own = own_fields(base.algorithm)
    names = {f"--algorithm.{name}".replace("_", "-"): name for name in own}
    hints, present, theirs, words = (
        own_hints(base.algorithm) if own else {},
        own_values(base.algorithm),
        [],
        iter(flags),
    )
    rest = []
    for word in words:
        flag, equals, _ = word.partition("=")
        if flag.replace("_", "-") not in names:
            rest.append(word)
            continue
        theirs += [word] if equals else [word, *itertools.islice(words, 1)]
    if not theirs:
        return base, rest
    import tyro

    fields = [(name, hints[name], dataclasses.field(default=present[name])) for name in own]
    inner = dataclasses.make_dataclass("Own", fields, frozen=True)
    outer: Any = dataclasses.make_dataclass("Flags", [("algorithm", inner, dataclasses.field(default=inner()))])
    parsed = tyro.cli(outer, prog=program, args=theirs, config=(tyro.conf.FlagConversionOff,))
    return dataclasses.replace(base, algorithm=with_own_values(base.algorithm, vars(parsed.algorithm))), rest


def whole_numbers(base: Experiment, flags: list[str]) -> list[str]:
    """The same flags with 1e6 written out where a field takes whole numbers."""
    words, flag = [], ""
    for word in flags:
        name, equals, value = word.partition("=") if word.startswith("--") else (flag, "", word)
        part, _, field = name.removeprefix("--").replace("-", "_").partition(".")
        owner = getattr(base, part, None)
        hint = get_type_hints(type(owner)).get(field) if dataclasses.is_dataclass(owner) else None
        if int in (hint, *get_args(hint)) and POWER.fullmatch(value) and float(value).is_integer():
            word = f"{name}={int(float(value))}" if equals else str(int(float(value)))
        words.append(word)
        flag = name if word.startswith("--") and not equals else ""
    return words


def take(flags: list[str], name: str) -> tuple[str | None, list[str]]:
    """The value of a flag, None if it is not there, and the other flags."""
    for at, word in enumerate(flags):
        flag, equals, value = word.partition("=")
        if flag == name and (equals or at + 1 < len(flags)):
            return (value, flags[:at] + flags[at + 1 :]) if equals else (flags[at + 1], flags[:at] + flags[at + 2 :])
    return None, flags
