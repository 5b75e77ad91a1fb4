"""The way from a learner to parameter servers on Ray: through shared memory on one host, in messages between two.

same host    push: gradient -> own block; a call of a few bytes to every shard, which reads the block
             pull: copy from each shard's block, without a call
elsewhere    arrays travel with the calls
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from torch import Tensor

from phalanx.cluster.server import Description, InBlock, NoParametersError, packed, unpacked, with_arrays, with_tensors
from phalanx.cluster.watched import DEAD, GONE, raise_if_hopeless
from phalanx.errors import RunError
from phalanx.parameters.blocks import SharedBlock
from phalanx.parameters.shards import SLOTS, Receipt, readable

CALL_TIMEOUT = 30.0  # seconds after which a server that does not answer is asked again
RECOVERY = 180.0  # seconds within which a server that died must be back, with parameters
RETRY = 0.1  # seconds between two tries to reach it
LOOK = 1.0  # seconds between two looks whether the block that is read is still that of the server


class RayShards:
    """All shards, as one process sees them. A server that dies is waited for: Ray brings it back."""

    def __init__(self, servers: Sequence[Any], parts: Sequence[slice], bfloat16: bool = False) -> None:
        self.meanwhile: Callable[[], None] = lambda: None  # what the supervisor does while it waits for a server
        self.servers = servers
        self.parts = parts
        self.bfloat16 = bfloat16
        self.outbox = SharedBlock.create(parts[-1].stop)
        self.known = [-1] * len(parts)  # versions that were heard last of shards elsewhere
        self.unread = set(range(len(parts)))  # shards that came back, whose versions say nothing until they are read
        self.blocks: list[SharedBlock | None] = [None for _ in parts]
        self.incarnations = [0] * len(parts)
        self.refused = [False] * len(parts)  # can the shard not map this process's block?
        self.came_back: dict[int, tuple[str, int]] = {}  # servers that died -> what became of them, updates lost
        self.gone: set[int] = set()  # servers that died, and of which no successor has answered yet
        self.ignorant: set[int] = set()  # those that came back without a copy, and wait for parameters
        self.looked = time.monotonic()
        self.looking: dict[Any, int] = {}
        for number, description in enumerate(self._ask_all(lambda server: server.describe.remote())):
            self._connect(number, description)

    def push(
        self, worker: int, sequence: int, versions: Sequence[int], gradient: Tensor, rate: float, patience: float
    ) -> list[Receipt]:
        self.outbox.numbers.copy_(gradient)
        self.outbox.header[0] = sequence
        numbers = list(range(len(self.parts)))
        receipts: dict[int, Receipt] = {}
        deadline = time.monotonic() + RECOVERY
        while numbers:
            calls = {
                number: self.servers[number].push.remote(
                    worker, sequence, versions[number], rate, patience, self._wrapped(number, gradient)
                )
                for number in numbers
            }
            again = []
            for number, call in calls.items():
                try:
                    receipt = ray.get(call, timeout=CALL_TIMEOUT + patience)
                except GONE as error:
                    raise_if_hopeless(error, f"parameter server {number}")
                    again.append(number)
                    continue
                except NoParametersError:
                    again.append(number)
                    continue
                if receipt is None:  # it cannot map the block: it is on another host, or in another container
                    self.refused[number] = True
                    again.append(number)
                    continue
                receipts[number] = receipt
                if receipt.incarnation != self.incarnations[number]:
                    self._connect_again(number)
            numbers = again
            if numbers:
                if time.monotonic() > deadline:
                    raise RunError(f"parameter server {numbers[0]} did not come back within {RECOVERY:g} s")
                self._wait()
        return [receipts[number] for number in range(len(self.parts))]

    def read(self, into: Tensor, steps: Sequence[int | None]) -> list[int]:
        self.look()
        versions = [-1] * len(self.parts)
        far = [number for number, block in enumerate(self.blocks) if block is None]
        answers = self._ask(far, lambda number: self.servers[number].read.remote(steps[number], self.bfloat16))
        for number, block in enumerate(self.blocks):
            if block is not None:
                versions[number] = read_block(block, into[self.parts[number]], steps[number])
        for number, (version, values) in zip(far, answers, strict=True):
            versions[number] = version
            if values is not None:
                into[self.parts[number]].copy_(unpacked(values))
                self.known[number] = max(self.known[number], version)
        self.unread -= {number for number, version in enumerate(versions) if version >= 0}
        return versions

    def versions(self) -> list[int]:
        self.look()
        far = [number for number, block in enumerate(self.blocks) if block is None]
        answers = self._ask(far, lambda number: self.servers[number].version.remote())
        versions = [-1 if block is None else int(block.header[0]) for block in self.blocks]
        for number, version in zip(far, answers, strict=True):
            versions[number] = self.known[number] = version
        return [-1 if number in self.unread else version for number, version in enumerate(versions)]

    def states(self) -> list[dict[str, Any]]:
        return [with_tensors(state) for state in self._ask_all(lambda server: server.state.remote())]

    def restore(self, states: Sequence[dict[str, Any]]) -> None:
        calls = [server.restore.remote(with_arrays(state)) for server, state in zip(self.servers, states, strict=True)]
        ray.get(calls, timeout=RECOVERY)

    def _wrapped(self, number: int, gradient: Tensor) -> Any:
        part = self.parts[number]
        if self.blocks[number] is not None and not self.refused[number]:
            return InBlock(self.outbox.address, part.start)
        return packed(gradient[part].cpu(), self.bfloat16)

    def _connect(self, number: int, description: Description) -> None:
        self.gone.discard(number)
        if description.incarnation == self.incarnations[number]:
            return
        if description.began_with < 0:  # what was read of its predecessor is better than nothing
            self.ignorant.add(number)
            return
        if self.incarnations[number]:
            self.came_back[number] = self._account(number, description.began_with)
        self.incarnations[number] = description.incarnation
        self.blocks[number] = SharedBlock.open(description.block)
        self.refused[number] = False
        self.known[number] = description.version
        self.unread.add(number)
        self.ignorant.discard(number)

    def _account(self, number: int, began_with: int) -> tuple[str, int]:
        """What the death of a server has cost. Its memory outlives it wherever it was mapped, and with it its last
        version; of one on another host we know the last that we heard."""
        block = self.blocks[number]
        least, died_at = ("", int(block.header[0])) if block is not None else ("at least ", self.known[number])
        lost = max(0, died_at - began_with)
        return (
            f"parameter server {number} died and came back with update {began_with:,}; {least}{lost:,} are lost",
            lost,
        )

    def _connect_again(self, number: int) -> None:
        self.looking = {call: other for call, other in self.looking.items() if other != number}  # may be out of date
        (description,) = self._ask([number], lambda number: self.servers[number].describe.remote())
        self._connect(number, description)

    def look(self) -> None:
        """The block of a server that died can still be read, and stands still; so ask now and then, without waiting."""
        if self.looking:
            ready, _ = ray.wait(list(self.looking), num_returns=len(self.looking), timeout=0)
            for call in ready:
                number = self.looking.pop(call)
                try:
                    self._connect(number, ray.get(call, timeout=CALL_TIMEOUT))
                except GONE as error:
                    if isinstance(error, DEAD):
                        self.gone.add(number)
        elif time.monotonic() - self.looked > LOOK:
            self.looked = time.monotonic()
            self.looking = {server.describe.remote(): number for number, server in enumerate(self.servers)}

    def _ask_all(self, call: Callable[[Any], Any]) -> list[Any]:
        return self._ask(range(len(self.servers)), lambda number: call(self.servers[number]))

    def _ask(self, numbers: Sequence[int], call: Callable[[int], Any]) -> list[Any]:
        """Ask servers at once; those that died again, until they are back and know parameters."""
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + RECOVERY
        while len(answers) < len(numbers):
            calls = {number: call(number) for number in numbers if number not in answers}
            for number, one in calls.items():
                try:
                    answers[number] = ray.get(one, timeout=CALL_TIMEOUT)
                except GONE as error:
                    raise_if_hopeless(error, f"parameter server {number}")
                except NoParametersError:
                    pass
            missing = [number for number in numbers if number not in answers]
            if missing and time.monotonic() > deadline:
                raise RunError(f"parameter server {missing[0]} did not come back within {RECOVERY:g} s")
            if missing:
                self._wait()
        return [answers[number] for number in numbers]

    def _wait(self) -> None:
        time.sleep(RETRY)
        self.meanwhile()


def read_block(block: SharedBlock, into: Tensor, step: int | None) -> int:
    """Copy the newest parameters of a shard, or those of a step, out of its block; -1 if that step is gone. A read
    that the shard has overtaken is repeated."""
    slots = block.numbers.view(SLOTS, -1)
    while True:
        newest = int(block.header[0])
        wanted = newest if step is None else step
        if not readable(wanted, newest, int(block.header[1])):
            return -1
        into.copy_(slots[wanted % SLOTS])
        if readable(wanted, int(block.header[0]), int(block.header[1])):
            return wanted
