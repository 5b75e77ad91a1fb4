"""What a tuner measured and decided, window by window: JSON lines in a run's directory, and a picture of them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from phalanx.figure import Line, Panel, chart
from phalanx.files import open_to_append, read_plain
from phalanx.topologies.tuner import Record

NAME = "tuner.jsonl"
MOST_DRAWN = 1000  # windows: a picture is drawn anew after each of them, and nobody sees more
MOST_BYTES = 1 << 28  # a window of a second each for a month is less


def append(path: Path, records: Iterable[Record]) -> None:
    """Write records behind those that are there; a run that is resumed goes on in the same file."""
    with open_to_append(path) as file:
        for record in records:
            file.write(json.dumps(record._asdict()) + "\n")


def read(path: Path) -> list[Record]:
    """Every whole record, none if nothing was written yet; the last line may be torn where a run was killed."""
    try:
        lines = read_plain(path, MOST_BYTES).splitlines()
    except FileNotFoundError:
        return []
    records = []
    for line in lines:
        try:
            record = Record(**json.loads(line))
        except (ValueError, TypeError):
            continue
        if is_sound(record):
            records.append(record)
    return records


def is_sound(record: Record) -> bool:
    """Are its values such as a tuner writes?"""
    numbers = [record.time, record.rate, record.expected, *([] if record.lag is None else [record.lag])]
    settings = record.setting, record.incumbent
    if not all(isinstance(setting, dict) for setting in settings):
        return False
    numbers += [value for setting in settings for value in setting.values()]
    return all(isinstance(number, int | float) for number in numbers)


def draw(records: Sequence[Record], title: str, rate: str) -> str:
    """An SVG picture: what was measured beside what is expected of the incumbent, every setting that was tried beside
    the incumbent's, and the lag. `rate` names what is counted per second. Of many records every so manieth is drawn."""
    records = records[:: -math.ceil(max(1, len(records) / MOST_DRAWN))][::-1]  # the newest one, too
    minutes = [record.time / 60 for record in records]

    def line(name: str, values: Iterable[float], dashed: bool = False) -> Line:
        return Line(name, list(zip(minutes, values, strict=True)), dashed)

    measured = line("measured", (r.rate for r in records))
    expected = line("expected of the incumbent", (r.expected for r in records), dashed=True)
    settings = [
        part
        for name in (records[0].setting if records else ())
        for part in (
            line(name, (r.setting.get(name, math.nan) for r in records)),
            line(f"{name}, incumbent", (r.incumbent.get(name, math.nan) for r in records), dashed=True),
        )
    ]
    panels = [
        Panel("rate", "minutes", rate, [measured, expected]),
        Panel("settings", "minutes", "value", settings, y_log=True),
    ]
    if any(record.lag is not None for record in records):
        lags = line("lag", (math.nan if r.lag is None else r.lag for r in records))
        panels.append(Panel("policy lag", "minutes", "versions", [lags]))
    return chart(title, panels, columns=3)
