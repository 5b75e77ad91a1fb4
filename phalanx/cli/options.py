"""Options of the small commands, and which commands name a preset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PRESET_COMMANDS = ("train", "plan", "tune")


@dataclass(frozen=True)
class PresetsOptions:
    """List the presets, one line each. `phalanx train PRESET --help` shows the flags of one."""


@dataclass(frozen=True)
class CompletionOptions:
    """Print what a shell needs to complete commands, presets and flags:
    eval "$(phalanx completion bash)" in ~/.bashrc, or the same with zsh in ~/.zshrc, after compinit."""

    shell: Literal["bash", "zsh"]
    """Which shell."""


@dataclass(frozen=True)
class StudyOptions:
    """Run an experiment about learning itself; it writes a figure and the data behind it. Flags without a dot are the
    study's own, which `phalanx study NAME --help` explains; those with a dot are the preset's."""

    name: Literal["gradients", "norms", "secondary", "lag", "cluster"]
    """gradients: cosine of half-batch and full-batch gradients. norms: norms of parameters, gradients and steps.
    secondary: a learner on another one's replay memory. lag: lag and staleness. cluster: speed and staleness on many
    nodes, predicted. Without a name they are listed."""
