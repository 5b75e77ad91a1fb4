"""`--help` of the commands that take a preset: the flags people change first, and none that the preset does not use.

`--help-all` shows every flag. Both print what tyro makes of a dataclass that holds the fields to be shown.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

from phalanx.config import (
    TOPOLOGIES,
    AlgorithmConfig,
    AtariConfig,
    C51Config,
    DQNConfig,
    Experiment,
    GA3CConfig,
    SerialConfig,
    experiment,
)
from phalanx.config.flags import parse_flags, parse_options
from phalanx.config.own import own_hints, own_values, unread_fields
from phalanx.config.presets import PRESETS, default_preset, preset
from phalanx.given import spoken

USUAL = (
    *("env.game", "env.id", "env.name", "model.torso", "algorithm.discount", "algorithm.entropy_coef"),
    *("algorithm.epsilon_final", "optimizer.learning_rate", "sampler.environments", "sampler.horizon"),
    *("sampler.workers", "run.name", "run.steps", "run.seconds", "run.target_score", "run.seed", "run.device"),
)
"""What people change, by the fields that a preset has of them."""


def _is_atari(experiment: Experiment) -> bool:
    return isinstance(experiment.env, AtariConfig)


UNUSED: dict[str, Callable[[Experiment], bool]] = {
    **dict.fromkeys(("optimizer.beta1", "optimizer.beta2"), lambda e: not e.optimizer.rule.startswith("adam")),
    "optimizer.decay": lambda e: not e.optimizer.rule.startswith("rmsprop"),
    "optimizer.initial_accumulator": lambda e: not e.optimizer.rule.startswith(("rmsprop", "adagrad")),
    "optimizer.momentum": lambda e: e.optimizer.rule != "sgd",
    "optimizer.clip_norm": lambda e: e.optimizer.clip == "none",
    "optimizer.reference_batch": lambda e: e.optimizer.batch_scaling == "none",
    **dict.fromkeys(
        ("optimizer.schedule_length", "optimizer.schedule_clock"), lambda e: e.optimizer.final_learning_rate is None
    ),
    "model.first_stride": lambda e: e.model.torso != "ga3c-large",
    **dict.fromkeys(("model.width", "model.padding", "model.scale"), lambda e: e.model.torso == "mlp"),
    "sampler.batch": lambda e: not e.sampler.batch,
    **dict.fromkeys(
        ("sampler.workers", "sampler.workers_per_core", "sampler.pin", "sampler.squads"),
        lambda e: isinstance(e.topology, SerialConfig | GA3CConfig),  # whose agents are its workers
    ),
    "sampler.balance": lambda e: isinstance(e.topology, SerialConfig | GA3CConfig) or not _is_atari(e),
    "sampler.raw_screens": lambda e: isinstance(e.topology, SerialConfig) or not _is_atari(e),
    **dict.fromkeys(
        ("step_timeout", "max_deaths", "max_deaths_in_a_row"), lambda e: isinstance(e.topology, SerialConfig)
    ),
    "algorithm.discount_length": lambda e: getattr(e.algorithm, "final_discount", None) is None,
    "algorithm.code": lambda e: True,  # what --algorithm sets,
    "algorithm.settings": lambda e: True,  # and the flags of its own fields
    "algorithm.huber": lambda e: isinstance(e.algorithm, C51Config),
    **dict.fromkeys(
        ("priority_exponent", "importance_start", "importance_length", "new_priority"),
        lambda e: isinstance(e.algorithm, DQNConfig) and not e.algorithm.prioritized,
    ),
}
"""Fields that change nothing unless another one is changed, too; without a dot, of whichever part has them."""


@dataclass(frozen=True)
class PresetOptions:
    """Name a preset, then flags that change what it says: phalanx train ppo --env.game breakout.
    `phalanx presets` lists the presets, and `phalanx train PRESET --help` the flags of one."""

    preset: str
    """Name of a preset; `default` is the one for this kind of machine."""
    topology: str | None = None
    """Another way to run the pieces: serial, synchronous, asynchronous, ga3c, gorila or dba3c."""
    debug: bool = False
    """Show the whole traceback of an error."""


@dataclass(frozen=True)
class ResumeOptions:
    """Continue a run where it stopped. Flags change its values from there on (--run.steps 20000000), which is told;
    schedules stretch to the new run.steps. A run keeps its env.*, model.*, sampler.environments, sampler.batch,
    optimizer.rule, run.seed, run.name and run.directory; with sampler.overlap also sampler.horizon, and with
    algorithm.checkpoint_replay also algorithm.prioritized."""

    run: str
    """Directory of the run."""


def command(name: str, arguments: list[str]) -> int:
    """Print the help of `train`, `plan` or `resume`, for the preset or run that is named, if one is."""
    everything = "--help-all" in arguments
    flags = [argument for argument in arguments if argument not in ("-h", "--help", "--help-all")]
    named = flags[0] if flags and not flags[0].startswith("-") else None
    if name == "resume":
        parse_options(ResumeOptions, name, ["--help"])
    elif named is None:
        parse_options(PresetOptions, name, ["--help"])
    else:
        named = default_preset() if named == "default" else named
        program = f"phalanx {name} {named}"
        show(
            program,
            PRESETS[named][0] if named in PRESETS else "",
            parse_flags(program, preset(named), flags[1:]),
            everything,
        )
    return 0


def show(program: str, text: str, base: Experiment, everything: bool) -> None:
    """The flags of an experiment, with its values as defaults."""
    import tyro

    unused = set() if everything else {name for name in names(base) if is_unused(name, base)}
    usual = [name for name in USUAL if name in names(base) and name not in unused]
    documents = field_documents()
    shown = [flag(base, name, documents) for name in usual]
    words = tyro.conf.arg(name="topology", help=f"Another way to run the pieces: {', '.join(TOPOLOGIES)}.")
    shown.append(("topology_", Annotated[str, words], dataclasses.field(default=base.topology.name)))
    words = tyro.conf.arg(
        name="algorithm", help="A class of your own in this one's place: module:Class, file.py:Class."
    )
    shown.append(("algorithm_", Annotated[str, words], dataclasses.field(default=base.algorithm.code)))
    parts = [part(base, name, {*usual, *unused}, documents) for name in ("env", "model", "algorithm", "optimizer")]
    parts += [part(base, name, {*usual, *unused}, documents) for name in ("sampler", "topology", "run")]
    kind = dataclasses.make_dataclass("Flags", [*shown, *(found for found in parts if found is not None)])
    kind.__doc__ = text + (
        f".\n{len(unused)} flags that have no effect here are hidden; --help-all shows them." if unused else "."
    )
    with contextlib.suppress(SystemExit):  # how a parser ends that was asked for help
        tyro.cli(tyro.conf.FlagConversionOff[kind], prog=program, args=["--help"])  # type: ignore[valid-type, misc]


def names(base: Experiment) -> list[str]:
    """Dotted names of all fields but those that another way changes (a preset is named, and so is a topology), and
    those of ours that a user's own algorithm does not read."""
    without = {"topology.name", *(f"algorithm.{name}" for name in unread_fields(base.algorithm))}
    found = []
    for field in dataclasses.fields(base):
        value = getattr(base, field.name)
        inner = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
        found += [f"{field.name}.{each.name}" for each in inner]
    return [name for name in found if name not in without]


def is_unused(name: str, base: Experiment) -> bool:
    rule = UNUSED.get(name) or UNUSED.get(name.rpartition(".")[2])
    return rule is not None and rule(base)


def part(base: Experiment, name: str, without: set[str], documents: dict[tuple[str, str], str]) -> Any:
    """A field that holds what is left of a part of the experiment; None if nothing is."""
    value = getattr(base, name)
    left = [each.partition(".")[2] for each in names(base) if each.startswith(f"{name}.") and each not in without]
    fields = [flag(base, f"{name}.{each}", documents, each) for each in left]
    fields += own_flags(base.algorithm) if name == "algorithm" else []
    if not fields:
        return None
    kind = dataclasses.make_dataclass(type(value).__name__, fields, frozen=True)
    is_theirs = name == "algorithm" and unread_fields(value)
    kind.__doc__ = f"What {spoken(value.code)} reads." if is_theirs else type(value).__doc__
    return name, kind, dataclasses.field(default_factory=kind)


def own_flags(algorithm: AlgorithmConfig) -> list[Any]:
    """Of the fields that a user's own algorithm has beyond ours."""
    hints, values = own_hints(algorithm), own_values(algorithm)
    return [(name, hint, dataclasses.field(default=values[name])) for name, hint in hints.items()]


def flag(base: Experiment, name: str, documents: dict[tuple[str, str], str], shown: str | None = None) -> Any:
    """A field of the dotted name, with the value that it has as its default."""
    import tyro

    where, _, field = name.rpartition(".")
    owner = getattr(base, where)
    hint = get_type_hints(type(owner))[field]
    setting = tyro.conf.arg(
        name=(shown or name).replace("_", "-"), help=documents.get((type(owner).__name__, field), "")
    )
    return name.replace(".", "_"), Annotated[hint, setting], dataclasses.field(default=getattr(owner, field))


def field_documents() -> dict[tuple[str, str], str]:
    """The sentence below each field of the configuration, by class and name; inherited ones, too."""
    found: dict[tuple[str, str], str] = {}
    for node in ast.parse(inspect.getsource(experiment)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for base in node.bases:
            found |= {(node.name, field): text for (owner, field), text in found.items() if owner == ast.unparse(base)}
        for above, below in zip(node.body, node.body[1:], strict=False):
            if isinstance(above, ast.AnnAssign) and isinstance(below, ast.Expr):
                found[node.name, ast.unparse(above.target)] = " ".join(ast.literal_eval(below.value).split())
    return found
