"""Run directories that a command line names."""

from __future__ import annotations

from pathlib import Path

from phalanx.errors import UserError


def named_run(command: str, arguments: list[str]) -> tuple[Path, list[str]]:
    if not arguments or arguments[0].startswith("-"):
        raise UserError(f"name a run directory: phalanx {command} runs/NAME")
    return existing_run(Path(arguments[0])), arguments[1:]


def existing_run(directory: Path) -> Path:
    try:
        found = (directory / "config.json").is_file()
    except OSError as error:
        raise UserError(f"cannot read {directory} ({error.strerror}); ask its owner for permission") from None
    if not found:
        raise UserError(f"{directory} is no run directory: it has no config.json; give the one `phalanx train` named")
    return directory
