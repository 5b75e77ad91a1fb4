"""From the words of a command line to an Experiment: a preset's name, then dotted flags that change its fields.

The commands of `cli/` and the benchmarks parse through these.
"""

from __future__ import annotations

import dataclasses

from phalanx.config.experiment import TOPOLOGIES, Experiment
from phalanx.config.overlay import take_files
from phalanx.config.presets import default_preset, preset
from phalanx.errors import UserError, unknown


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

    base, flags = choose_topology(base, flags)
    kind = tyro.conf.AvoidSubcommands[tyro.conf.FlagConversionOff[Experiment]]
    return tyro.cli(kind, prog=program, default=base, args=flags)


def choose_topology(base: Experiment, flags: list[str]) -> tuple[Experiment, list[str]]:
    """`--topology NAME` swaps the whole topology; what is left are flags of fields."""
    if "--topology" not in flags[:-1]:
        return base, flags
    at = flags.index("--topology")
    name = flags[at + 1]
    if name not in TOPOLOGIES:
        raise unknown("topology", name, TOPOLOGIES)
    return dataclasses.replace(base, topology=TOPOLOGIES[name]()), flags[:at] + flags[at + 2 :]
