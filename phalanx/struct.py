"""A dataclass of arrays that can be sliced, copied and mapped as one value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

S = TypeVar("S", bound="Struct")


class Struct:
    """Mixin for dataclasses whose fields are arrays or tensors that share their leading dimensions."""

    def map(self: S, function: Callable[[Any], Any]) -> S:
        """The same struct with `function` applied to each field."""
        return type(self)(**{f.name: function(getattr(self, f.name)) for f in fields(self)})  # type: ignore[arg-type]

    def __getitem__(self: S, index: Any) -> S:
        """The same rows of every field."""
        return self.map(lambda array: array[index])
