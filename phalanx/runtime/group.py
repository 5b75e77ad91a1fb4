"""A group of processes that exchange tensors in lock step, on `torch.distributed`: gloo on a CPU, NCCL between GPUs.

Everybody calls the same operations in the same order. When a member dies, the connections to it close, and whoever
waits for it gets a `PeerLost`; whoever gets one closes its group, so that those who waited for that one get it too. A
group is formed anew under the next number, with the same members or with successors.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.errors import UserError

LOOPBACK = "127.0.0.1"
FORMING_TIMEOUT = 20.0  # seconds for which members wait for each other when a group is formed


class PeerLost(Exception):  # noqa: N818
    """Another member of the group died, left it, or did not come for too long."""


class Group:
    """The members' exchange. `store` is where they find each other; `address` is this member's own, for the others."""

    def __init__(
        self,
        store: Any,
        number: int,
        rank: int,
        size: int,
        device: torch.device,
        timeout: float,
        nccl: bool = False,
        address: str = LOOPBACK,
    ) -> None:
        dist = torch_distributed()
        if not dist.is_available():
            raise UserError("this build of torch has no torch.distributed; use --topology.replicas 1")
        self.rank = rank
        self.size = size
        self.device = device
        self._dist = dist
        self._on_host: dict[tuple[int, torch.dtype], Tensor] = {}  # page-locked copies of tensors of a GPU, by size
        self._numbers: Any = None  # exchanges tensors of the host
        self._tensors: Any = None  # exchanges those of GPUs, where NCCL does
        try:
            with losses():
                options = dist.ProcessGroupGloo._Options()
                options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
                options._timeout = timedelta(seconds=FORMING_TIMEOUT)
                place = dist.PrefixStore(f"group-{number}", store)
                self._numbers = dist.ProcessGroupGloo(place, rank, size, options)
                self._numbers.barrier().wait(timedelta(seconds=FORMING_TIMEOUT))
                if nccl:
                    place = dist.PrefixStore(f"nccl-{number}", store)
                    self._tensors = dist.ProcessGroupNCCL(place, rank, size, dist.ProcessGroupNCCL.Options())
        except PeerLost:
            self.close()
            raise
        self.timeout = timedelta(seconds=timeout)
        self.capturable = nccl  # may a CUDA graph hold an exchange?

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
            self._numbers.allgather([rows], [own]).wait(self.timeout)
        return torch.stack(rows).numpy()

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Everybody's becomes that of the member `source`."""
        options = self._dist.BroadcastOptions()
        options.rootRank = source
        host = tensor.cpu()
        with losses():
            self._numbers.broadcast([host], options).wait(self.timeout)
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
        self._numbers = self._tensors = None

    def _sum(self, through: Any, tensor: Tensor) -> None:
        work = through.allreduce([tensor])
        if tensor.is_cuda:
            work.wait()  # the stream does, not the host
        else:
            work.wait(self.timeout)

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


def torch_distributed() -> Any:
    """The module, which not every build of torch has in full; its type stubs lack what is needed of it."""
    import torch.distributed

    return torch.distributed


def meeting_point(port: int = 0) -> Any:
    """Where members of one host find each other; the first call makes it, those with its port join."""
    timeout = timedelta(seconds=FORMING_TIMEOUT)
    return torch_distributed().TCPStore(LOOPBACK, port, is_master=port == 0, wait_for_workers=False, timeout=timeout)
