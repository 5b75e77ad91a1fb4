"""Where and how the network runs: device, precision, threads."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.config import RunConfig
from phalanx.errors import UserError
from phalanx.runtime.affinity import usable_cores
from phalanx.runtime.memory import keep_freed_memory


@dataclass(frozen=True)
class Compute:
    """Device and precision of the network; parameters and losses stay float32."""

    device: torch.device
    bfloat16: bool = False
    graphs: bool = False  # capture the work of the device as CUDA graphs
    threads: int = 0  # of torch; 0 leaves them as they are
    tf32: bool = False  # in float32 matrix products and convolutions of a GPU

    def install(self) -> Compute:
        """Set this process up for it: torch's threads, what the allocator keeps, the current GPU. Itself."""
        if self.threads:
            torch.set_num_threads(self.threads)
        if self.device.type == "cpu":
            keep_freed_memory()
        else:
            if self.device.index is not None:
                torch.cuda.set_device(self.device)  # streams and graphs are made on the current one
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = self.tf32
        return self

    def autocast(self) -> AbstractContextManager[Any]:
        if not self.bfloat16:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def casting_weights_once(self) -> AbstractContextManager[Any]:
        """Around a rollout on a CPU: weights are cast to bfloat16 once, not at every step, as they do not change. Where
        they do, at a poll, `FlatParameters.refresh` has them cast again."""
        return self.autocast() if self.device.type == "cpu" else contextlib.nullcontext()


class on_stream:  # noqa: N801  (used like a function)
    """`torch.cuda.stream` for what runs a thousand times a second: that one looks for devices each time, which takes
    longer than a launch. None changes nothing."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.before = torch.cuda.current_stream(self.stream.device_index)
            torch.cuda.set_stream(self.stream)

    def __exit__(self, *exception: object) -> None:
        if self.stream is not None:
            torch.cuda.set_stream(self.before)


@contextlib.contextmanager
def torch_as_it_was() -> Iterator[None]:
    """Within it a run sets torch up for itself; afterwards its chance and its threads are the caller's again. What
    sleeps on a GPU that nobody has used yet is let lie."""
    threads = torch.get_num_threads()
    used = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=used):
            yield
    finally:
        torch.set_num_threads(threads)


def choose_compute(run: RunConfig, instead: str = "--run.device cpu") -> Compute:
    """The device and precision the run asks for; `instead` is what helps where there is no GPU."""
    name = run.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    known = name.partition(":")[0] in ("cpu", "cuda")
    try:
        device = torch.device(name if known else "cpu")
    except RuntimeError:
        known = False
    if not known:
        raise UserError(f"run.device '{name}' is not a device that phalanx knows; use cpu, cuda or cuda:0")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"run.device asks for a GPU, but torch sees none; use {instead}")
    # Beside a GPU the other cores belong to the simulators.
    threads = run.threads or (usable_cores() if device.type == "cpu" else 1)
    return Compute(device, run.precision == "bfloat16", run.graphs and device.type == "cuda", threads, run.tf32)


def restore_generator(generator: torch.Generator, state: torch.Tensor) -> None:
    """Go on with the numbers of a saved state. Those of another kind of device cannot be taken over: a run that moves
    there goes on with others."""
    if state.numel() == generator.get_state().numel():
        generator.set_state(state)
    else:
        generator.manual_seed(zlib.crc32(state.numpy().tobytes()))
