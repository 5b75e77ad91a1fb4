"""A stand-in for CUDA graphs on the CPU: what is captured is written down, operation by operation, and played again.

As with a real graph, numbers that Python had when it was captured stay as they were, tensors are read and written where
they lay, and what would have to wait for the device is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WARM_UPS = 2
aten = torch.ops.aten
WAITS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.lift_fresh.default}


class Tape(TorchDispatchMode):
    """Everything that happens while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        masks = [leaf for leaf in tree_leaves(args[1:2]) if isinstance(leaf, Tensor) and leaf.dtype == torch.bool]
        if func in WAITS or (func in (aten.index.Tensor, aten.index_put_.default) and masks):
            raise RuntimeError(f"{func} is not permitted while a stream is capturing")
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        return out

    @torch.no_grad()
    def play(self) -> None:
        for func, args, kwargs, out in self.calls:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class TapeCapturer:
    """As `Capturer`, and a capture that fails is an error."""

    def __init__(self, what: str, report: Any) -> None: ...

    def capture(self, work: Any, undo: Any, stream: Any) -> Any:
        for _ in range(WARM_UPS):
            work()
            undo()
        with Tape() as tape:
            work()
        undo()
        return tape.play
