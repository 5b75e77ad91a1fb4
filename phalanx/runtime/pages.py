"""Page-locked host memory, which a GPU reads and writes in place: the step buffer, and replay frames that do not fit on
the device."""

from __future__ import annotations

import mmap
import weakref

import numpy as np
import torch
from torch import Tensor

from phalanx.errors import RunError


def lock_pages(memory: np.ndarray) -> None:
    """Lock host memory into place, so that the GPU reads and writes it directly."""
    code = int(torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))
    if code != 0:
        raise RunError(f"cannot lock {memory.nbytes / 2**20:,.0f} MiB of host memory for the GPU (CUDA error {code})")


def lock_pages_for(owner: object, memory: np.ndarray) -> None:
    """The same for as long as `owner` is there."""
    lock_pages(memory)
    weakref.finalize(owner, _release, memory).atexit = False


def unlock_pages(memory: np.ndarray) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)


class _Mapped:
    """Page-locked memory as torch wants to be told of memory the device can reach; the tensor keeps this object."""

    def __init__(self, array: np.ndarray) -> None:
        self.__cuda_array_interface__ = array.__array_interface__


def mapped(array: np.ndarray, device: torch.device) -> Tensor:
    """Page-locked memory as a tensor of the device, which reads and writes it without a copy in between."""
    plain = array.view(np.uint8) if array.dtype == np.bool_ else array
    tensor = torch.as_tensor(_Mapped(plain), device=device)
    return tensor.view(torch.bool) if array.dtype == np.bool_ else tensor


def mapped_zeros(shape: tuple[int, ...], dtype: np.dtype, device: torch.device) -> Tensor:
    """A tensor of the device that lies in page-locked memory of its own, which goes when the tensor does."""
    return both_views(shape, dtype, device)[1]


def both_views(shape: tuple[int, ...], dtype: np.dtype, device: torch.device) -> tuple[np.ndarray, Tensor]:
    """The same, and beside it the array that the host reads and writes, for as long as there is the tensor."""
    array = np.frombuffer(mmap.mmap(-1, int(np.prod(shape)) * dtype.itemsize), dtype)
    memory = _Mapped(array.reshape(shape))
    lock_pages_for(memory, array)
    return array.reshape(shape), torch.as_tensor(memory, device=device)


def _release(array: np.ndarray) -> None:
    torch.cuda.synchronize()  # kernels may still be at it
    unlock_pages(array)
