"""Where a study keeps what it finds: figures, the data behind them, and what it was asked.

A book is written anew whenever there is more, so that an interrupted study leaves what it had found.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phalanx.errors import RunError, UserError, require, tell
from phalanx.figure import Panel, chart
from phalanx.files import write_whole

Row = dict[str, Any]


class Book:
    """The directory of a study."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            empty = not directory.exists() or not any(directory.iterdir())
        except OSError as error:
            raise UserError(f"cannot read {directory} ({error.strerror}); choose another --directory") from None
        require(empty, f"{directory} is not empty; choose another --directory")

    def asked(self, question: dict[str, Any]) -> None:
        """What the study was asked to do, so that it can be done again."""
        self._write("study.json", json.dumps(question, indent=2, default=str) + "\n")

    def data(self, name: str, rows: Sequence[Row]) -> None:
        """A table, one line a row."""
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: rounded(value) for key, value in row.items()} for row in rows)
        self._write(f"{name}.csv", text.getvalue())

    def figure(self, name: str, title: str, panels: Sequence[Panel], columns: int = 2) -> None:
        self._write(f"{name}.svg", chart(title, panels, columns))

    def say(self, sentence: str) -> None:
        """How far the study is."""
        tell(sentence)

    def _write(self, name: str, text: str) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            write_whole(self.directory / name, text)
        except OSError as error:
            raise RunError(f"cannot write {self.directory / name} ({error.strerror})") from None


def rounded(value: Any) -> Any:
    """More digits than these mean nothing in what was measured."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def mean(values: Sequence[float]) -> float:
    """NaN without values, which leaves a gap in a figure."""
    return sum(values) / len(values) if values else float("nan")
