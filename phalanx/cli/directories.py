"""Run directories that a command line names."""

from __future__ import annotations

from pathlib import Path

from phalanx.config.stored import existing_run
from phalanx.errors import UserError


def named_run(command: str, arguments: list[str]) -> tuple[Path, list[str]]:
    if not arguments or arguments[0].startswith("-"):
        raise UserError(f"name a run directory: phalanx {command} runs/NAME")
    return existing_run(Path(arguments[0])), arguments[1:]
