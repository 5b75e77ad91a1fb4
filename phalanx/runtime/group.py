"""A group of processes that exchange tensors in lock step, on `torch.distributed`: gloo on a CPU, NCCL between GPUs.

Everybody calls the same operations in the same order. When a member dies, the connections to it close, and whoever
waits for it gets a `PeerLost`; whoever gets one closes its group, so that those who waited for that one get it too. A
group is formed anew under the next number, with the same members or with successors.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.errors import UserError

LOOPBACK = "127.0.0.1"
FORMING_TIMEOUT = 20.0  # seconds for which members wait for each other when a group is formed
LOOK = 1.0  # seconds of waiting after which a member looks whether the others are alive


class PeerLost(Exception):  # noqa: N818
    """Another member of the group died, left it, or did not come for too long."""


class Group:
    """The members' exchange. `store` is where they find each other; `address` is this member's own, for the others.

    They wait `forming` seconds for each other at first, and `timeout` seconds in every exchange. A member that vanished
    without closing its connections is not noticed by the system: `watch` is called every second of a wait, and raises a
    `PeerLost` to give it up.
    """

    def __init__(
        self,
        store: Any,
        number: int,
        rank: int,
        size: int,
        timeout: float,
        nccl: bool = False,
        address: str = LOOPBACK,
        forming: float | None = None,
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        dist = torch_distributed()
        if not dist.is_available():
            raise UserError("this build of torch has no torch.distributed; use --topology.replicas 1")
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.watch = watch
        self._dist = dist
        self._on_host: dict[tuple[int, torch.dtype], Tensor] = {}  # page-locked copies of tensors of a GPU, by size
        self._numbers: Any = None  # exchanges tensors of the host
        self._tensors: Any = None  # exchanges those of GPUs, where NCCL does
        self._sockets: dict[int, str] = {}  # the connections to the others: descriptor -> what the system calls it
        self._in_flight: Any = None  # the exchange that is waited for
        forming_timeout = timedelta(seconds=FORMING_TIMEOUT if forming is None else forming)
        before = open_sockets()
        try:
            with losses():
                options = dist.ProcessGroupGloo._Options()
                options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
                options._timeout = forming_timeout
                place = dist.PrefixStore(f"group-{number}", store)
                self._numbers = dist.ProcessGroupGloo(place, rank, size, options)
                self._numbers.barrier().wait(forming_timeout)
                self._sockets = {number: name for number, name in open_sockets().items() if before.get(number) != name}
                # What forming may take would limit every exchange; how long those may take is for `_finish` to say.
                self._numbers._set_default_timeout(timedelta(seconds=timeout + 2 * LOOK))
                self.capturable = False  # may a CUDA graph hold an exchange?
                self._nccl_place = dist.PrefixStore(f"nccl-{number}", store)
            if nccl:
                self.use_nccl()
        except PeerLost:
            self.close()
            raise

    def use_nccl(self) -> None:
        """From now on tensors of GPUs are exchanged by NCCL; every member must call it."""
        nccl = self._dist.ProcessGroupNCCL
        with losses():
            self._tensors = nccl(self._nccl_place, self.rank, self.size, nccl.Options())
        self.capturable = True

    def average(self, tensor: Tensor) -> None:
        """The mean over all members, in place; the same bits in each of them."""
        with losses():
            if tensor.is_cuda and not self.capturable:
                host = self._host_copy(tensor)
                self._sum(self._numbers, host)
                tensor.copy_(host.view(tensor.shape))
            else:
                self._sum(self._tensors if tensor.is_cuda else self._numbers, tensor)
        tensor.div_(self.size)

    def gather(self, row: np.ndarray) -> np.ndarray:
        """[members, *row]: everybody's row of integers."""
        own = torch.from_numpy(np.ascontiguousarray(row))
        rows = [torch.empty_like(own) for _ in range(self.size)]
        with losses():
            self._finish(self._numbers.allgather([rows], [own]))
        return torch.stack(rows).numpy()

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Everybody's becomes that of the member `source`."""
        options = self._dist.BroadcastOptions()
        options.rootRank = source
        host = tensor.cpu()
        with losses():
            self._finish(self._numbers.broadcast([host], options))
        tensor.copy_(host)

    def objects(self, own: Any) -> list[Any]:
        """Everybody's object, in the order of ranks; for what is rare. Members trust each other."""
        data = np.frombuffer(pickle.dumps(own), np.uint8)
        sizes = self.gather(np.array([len(data)]))[:, 0]
        rows = self.gather(np.pad(data, (0, int(sizes.max()) - len(data))))
        return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes.tolist(), strict=True)]

    def object_of(self, source: int, own: Any = None) -> Any:
        """The object of the member `source`."""
        data = torch.from_numpy(np.frombuffer(pickle.dumps(own), np.uint8).copy())
        size = torch.tensor(len(data))
        self.broadcast(size, source)
        data = data if self.rank == source else torch.empty(int(size), dtype=torch.uint8)
        self.broadcast(data, source)
        return pickle.loads(data.numpy().tobytes())

    def close(self) -> None:
        """Leave; those who wait for this member get a `PeerLost`."""
        if self._in_flight is not None and not self._in_flight.is_completed():
            self._disconnect()  # torch would wait for the end of an exchange that was given up
        self._in_flight = self._numbers = self._tensors = None

    def _disconnect(self) -> None:
        for descriptor, name in open_sockets().items():
            if self._sockets.get(descriptor) == name:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                    connection.getpeername()  # the one that gloo listens at has no peer, and must stay as it is
                    connection.shutdown(socket.SHUT_RDWR)

    def _sum(self, through: Any, tensor: Tensor) -> None:
        work = through.allreduce([tensor])
        if tensor.is_cuda:
            work.wait()  # the stream does, not the host
        else:
            self._finish(work)

    def _finish(self, work: Any) -> None:
        """Wait for an exchange on the host, for as long as everybody is alive."""
        deadline = time.monotonic() + self.timeout
        self._in_flight = work
        while True:
            try:
                work.wait(timedelta(seconds=LOOK))
                break
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # raises what it failed of; it may as well have ended since
                    break
                if time.monotonic() > deadline:
                    raise
            self.watch()
        self._in_flight = None

    def _host_copy(self, tensor: Tensor) -> Tensor:
        key = (tensor.numel(), tensor.dtype)
        if key not in self._on_host:
            self._on_host[key] = torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=True)
        return self._on_host[key].copy_(tensor.flatten())


@contextlib.contextmanager
def losses() -> Iterator[None]:
    """What torch raises when a member is gone, as a `PeerLost`."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(" ".join(str(error).split())[:300]) from None


def open_sockets() -> dict[int, str]:
    """This process's sockets: descriptor -> the system's name, which no other socket gets."""
    found = {}
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was closed since
            name = os.readlink(f"/proc/self/fd/{descriptor}")
            if name.startswith("socket:"):
                found[int(descriptor)] = name
    return found


def torch_distributed() -> Any:
    """The module, which not every build of torch has in full; its type stubs lack what is needed of it."""
    import torch.distributed

    return torch.distributed


def meeting_point(port: int = 0) -> Any:
    """Where members of one host find each other; the first call makes it, those with its port join."""
    timeout = timedelta(seconds=FORMING_TIMEOUT)
    return torch_distributed().TCPStore(LOOPBACK, port, is_master=port == 0, wait_for_workers=False, timeout=timeout)
