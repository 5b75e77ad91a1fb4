"""A parameter server: one shard in a process of its own, as Ray runs it.

Whoever is on the same host reads parameters from the shard's shared memory, without asking, and hands in gradients in
shared memory; others send and receive arrays.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.cluster.standby import Kept
from phalanx.config import OptimizerConfig
from phalanx.parameters.blocks import BlockAddress, SharedBlock
from phalanx.parameters.rules import make_rule
from phalanx.parameters.shards import COPY_TIMEOUT, SLOTS, ParameterShard, QuorumShard, Receipt, Verdict

RETRY = 0.2  # seconds between two tries to reach the standby


class NoParametersError(Exception):
    """The answer of a server that came back while its standby was gone, too: the supervisor brings it parameters. It
    lets nobody wait, as then no thread might be left to take them."""


@dataclass(frozen=True)
class ShardOrder:
    """What a server is told when it starts."""

    number: int
    size: int  # numbers
    optimizer: OptimizerConfig
    bound: int = 0  # updates that a gradient may be old
    quorum: int = 0  # 0: gradients are applied as they come
    snapshot_every: int = 100  # updates between two copies to the standby


@dataclass(frozen=True)
class Description:
    """What a client and a supervisor know of a server."""

    block: BlockAddress
    incarnation: int
    version: int
    began_with: int  # version of the copy it began with; -1 while there is none, and it knows nothing


@dataclass(frozen=True)
class InBlock:
    """A gradient that lies in a worker's block, from `start` on; the block's header holds its sequence number."""

    block: BlockAddress
    start: int


class ShardServer:
    """Calls come from several threads; the shard itself has one lock."""

    def __init__(
        self,
        order: ShardOrder,
        keep: Callable[[int, Kept], bool],
        kept: Callable[[int], Kept | None],
    ) -> None:
        """`keep` brings a copy to the standby, and says whether it is there; `kept` asks the standby for it."""
        torch.set_num_threads(1)
        self.order = order
        self.keep = keep
        self.block = SharedBlock.create(SLOTS * order.size)
        parts: dict[str, Any] = {
            "values": torch.zeros(order.size),
            "rule": make_rule(order.optimizer),
            "bound": order.bound,
            "slots": self.block.numbers.view(SLOTS, -1),
            "header": self.block.header,
        }
        self.shard = QuorumShard(**parts, quorum=order.quorum) if order.quorum else ParameterShard(**parts)
        self.shard.incarnation = time.time_ns()  # no two have the same
        self.blocks: dict[BlockAddress, SharedBlock] = {}  # of workers on this host
        self.keeping = threading.Lock()
        self.began_with = -1
        self.kept_version = 0
        self.without = False  # has it gone on without a copy?
        copy = kept(order.number)
        if copy is not None:
            self._begin(copy)

    def describe(self) -> Description:
        shard = self.shard
        return Description(self.block.address, shard.incarnation, shard.version, self.began_with)

    def push(
        self, worker: int, sequence: int, version: int, rate: float, patience: float, gradient: InBlock | np.ndarray
    ) -> Receipt | None:
        """None if the gradient is out of reach, or is another one by now: the worker sends it again, or has gone on."""
        self._need_parameters()
        found = self._find(gradient, sequence)
        if found is None:
            return None
        receipt = self.shard.push(worker, sequence, version, found, rate, patience)
        self._copy_if_due()
        return receipt

    def read(self, step: int | None, bfloat16: bool) -> tuple[int, np.ndarray | None]:
        """The newest parameters, or those of a step; -1 and none if it is gone."""
        self._need_parameters()
        found = self.shard.read(step)
        return (-1, None) if found is None else (found[0], packed(found[1], bfloat16))

    def version(self) -> int:
        self._need_parameters()
        return self.shard.version

    def state(self) -> Kept:
        self._need_parameters()
        return with_arrays(self.shard.state())

    def restore(self, state: Kept) -> None:
        self._begin(state)
        self.copy()

    def _begin(self, state: Kept) -> None:
        self.shard.restore(with_tensors(state))
        self.kept_version = state["version"]
        self.shard.allow(self.kept_version + self.order.snapshot_every)
        self.began_with = self.kept_version

    def _need_parameters(self) -> None:
        if self.began_with < 0:
            raise NoParametersError

    def set_quorum(self, quorum: int) -> None:
        assert isinstance(self.shard, QuorumShard)
        self.shard.set_quorum(quorum)
        self._copy_if_due()

    def _find(self, gradient: InBlock | np.ndarray, sequence: int) -> Tensor | None:
        if not isinstance(gradient, InBlock):
            return unpacked(gradient)
        block = self.blocks.get(gradient.block) or SharedBlock.open(gradient.block)
        if block is None:
            return None
        if gradient.block not in self.blocks:
            gone = [address for address in list(self.blocks) if not address.there()]
            for address in gone:  # of workers that have died, whose memory would stay
                self.blocks.pop(address, None)
            self.blocks[gradient.block] = block
        if int(block.header[0]) != sequence:
            return None
        return block.numbers[gradient.start : gradient.start + self.order.size]

    def _copy_if_due(self) -> None:
        """After whatever may have made a step: all pushes wait for this copy."""
        if self.shard.version >= self.shard.limit:
            self.copy(self.order.snapshot_every)

    def copy(self, least: int = 0) -> None:
        """Bring a copy to the standby if so many updates were made since the last one, and wait until it is there.
        Other threads wait as soon as their gradient would be one too many to lose. A standby that is out
        of reach is waited for; for long only once, then work goes on without copies until one arrives."""
        if self.began_with < 0:
            return
        with self.keeping:
            if self.shard.version - self.kept_version < least:
                return  # another thread did it meanwhile
            deadline = time.monotonic() + (0.0 if self.without else COPY_TIMEOUT)
            while True:
                state = self.shard.state()
                if self.keep(self.order.number, with_arrays(state)):
                    self.kept_version, self.without = state["version"], False
                    break
                if time.monotonic() > deadline:
                    self.without = True
                    break
                time.sleep(RETRY)
            self.shard.allow(state["version"] + self.order.snapshot_every)


def with_arrays(state: dict[str, Any]) -> Kept:
    """Arrays travel without a copy, tensors do not; and who keeps them needs no torch."""
    rule = {name: value.numpy() for name, value in state["rule"].items()}
    seen = {worker: (number, verdict.value) for worker, (number, verdict) in state.get("seen", {}).items()}
    return {**state, "values": state["values"].numpy(), "rule": rule, "seen": seen}


def with_tensors(state: Kept) -> dict[str, Any]:
    rule = {name: torch.from_numpy(np.array(value)) for name, value in state["rule"].items()}
    seen = {worker: (number, Verdict(verdict)) for worker, (number, verdict) in state.get("seen", {}).items()}
    return {**state, "values": torch.from_numpy(np.array(state["values"])), "rule": rule, "seen": seen}


def packed(numbers: Tensor, bfloat16: bool) -> np.ndarray:
    """As they travel between hosts."""
    if bfloat16:
        return numbers.bfloat16().view(torch.int16).numpy()
    return numbers.numpy()


def unpacked(array: np.ndarray) -> Tensor:
    """A copy that may be written to, in float32."""
    if array.dtype == np.int16:
        return torch.from_numpy(np.array(array)).view(torch.bfloat16).float()
    return torch.from_numpy(np.array(array))
