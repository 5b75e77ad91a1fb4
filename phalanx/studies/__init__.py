"""Studies: experiments about learning itself, each a command that writes figures and the data behind them.

A study is a module with `StudyOptions`, an `Options` whose fields become flags, and `run(options, flags, book)`. There
`flags` are what is left of the command line, flags of the preset, and the book keeps what is found. A row below makes
it a command, `phalanx study NAME`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Study:
    """What the command line must know of a study before it loads it."""

    module: str
    text: str


STUDIES: dict[str, Study] = {
    "gradients": Study("phalanx.studies.gradients", "cosine of half-batch and full-batch gradients by batch size"),
    "norms": Study(
        "phalanx.studies.norms", "norms of parameters, gradients and steps, Adam and RMSProp, by batch size"
    ),
    "secondary": Study("phalanx.studies.secondary", "a learner that learns from the replay memory of another one"),
    "lag": Study("phalanx.studies.lag", "policy lag and staleness by the number of asynchronous learners"),
    "cluster": Study(
        "phalanx.studies.cluster", "speed and staleness of Gorila and Distributed BA3C, predicted to 1,000 nodes"
    ),
}


@dataclass(frozen=True)
class Options:
    """What every study can be told; each adds its own."""

    directory: str = ""
    """Where figures and data go; empty means studies/NAME. It must be empty or new."""
