"""Bounds of a number, written beside the field that holds it: `stack: int = number(4, least=1, most=254)`."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple


class Bounds(NamedTuple):
    """What a number may be: each end is reached (`least`, `most`) or not (`above`, `below`). NaN is always outside, and
    infinity is inside only where `most` is infinite."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def admit(self, value: float) -> bool:
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        ends = zip(("at least", "greater than", "at most", "less than"), self, strict=True)
        return " and ".join(f"{words} {plain(end)}" for words, end in ends if end is not None)


def number(
    default: float | None,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> Any:
    """A dataclass's field for a number, or none, with its bounds."""
    return dataclasses.field(default=default, metadata={"bounds": Bounds(least, above, most, below)})


def bounds_of(field: dataclasses.Field[Any]) -> Bounds | None:
    """The bounds beside a field, None for one that holds no number."""
    return field.metadata.get("bounds")


def plain(end: float) -> str:
    return f"{end:,}" if isinstance(end, int) else f"{end:g}"
