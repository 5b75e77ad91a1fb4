"""Our kernels for pools give torch's bits, forwards and backwards. Without a GPU they are compiled as plain C++ and run
one thread after the other."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.models import pooling

STAND_IN = """
#include <cstring>
#define __global__
#define __device__
struct uint4 { unsigned x, y, z, w; };
struct uint2 { unsigned x, y; };
static struct { int x; } blockIdx, blockDim, threadIdx;
static float __uint_as_float(unsigned bits) { float number; memcpy(&number, &bits, 4); return number; }
SOURCE
#define ALL for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) \\
    for (blockDim.x = block, threadIdx.x = 0; threadIdx.x < block; threadIdx.x++)
extern "C" void run_pool(int blocks, int block, uint4* a, uint4* b, uint2* c, int n, int h, int w, int p) {
    ALL pool(a, b, c, n, h, w, p);
}
extern "C" void run_unpool(int blocks, int block, uint4* a, uint2* b, uint4* c, int n, int h, int w, int p) {
    ALL unpool(a, b, c, n, h, w, p);
}
"""
SHAPES = [(3, 16, 8, 6), (2, 32, 7, 5), (1, 8, 2, 2), (5, 8, 3, 9), (2, 8, 1, 4), (0, 8, 4, 4), (40, 64, 25, 19)]


@pytest.fixture(scope="module")
def plain_kernels(tmp_path_factory: Any) -> Any:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source: Path = tmp_path_factory.mktemp("pool") / "pool.cpp"
    source.write_text(STAND_IN.replace("SOURCE", pooling.SOURCE))
    library = source.with_suffix(".so")
    flags = ["-O1", "-w", "-fno-strict-aliasing", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))

    def kernel(function: Any) -> Any:
        def run(grid: tuple[int, int, int], block: tuple[int, int, int], args: list[Any]) -> None:
            pointers = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else a for a in args]
            function(grid[0], block[0], *pointers)

        return run

    return kernel(loaded.run_pool), kernel(loaded.run_unpool)


def pixels(shape: tuple[int, ...], device: str) -> Tensor:
    """With many ties, zeros of both signs, and some that are not finite."""
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 2).round().bfloat16()
    flat = x.flatten()
    flat[::7], flat[1::31], flat[5::43], flat[6::47] = -0.0, torch.inf, -torch.inf, torch.nan
    return x.to(device).contiguous(memory_format=torch.channels_last)


def assert_same_bits(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    assert ours.is_contiguous(memory_format=torch.channels_last)
    ours, theirs = ours.contiguous().view(torch.int16), theirs.contiguous().view(torch.int16)
    number = (theirs & 0x7FFF) <= 0x7F80  # the bits of what is no number may differ
    assert torch.equal(ours[number], theirs[number])
    assert bool(((ours & 0x7FFF) > 0x7F80)[~number].all())


def check(shape: tuple[int, ...], device: str, pool: Any) -> None:
    x = pixels(shape, device)
    results = []
    for function in (pool, lambda x: F.max_pool2d(x, 2)):
        leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
        pooled = function(leaf)
        gradient = torch.randn(pooled.shape, generator=torch.Generator().manual_seed(1)).to(pooled)
        pooled.backward(gradient)  # of another layout
        results.append((pooled.detach(), leaf.grad))
    for ours, theirs in zip(*results, strict=True):
        assert_same_bits(ours, theirs)


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if min(shape[2:]) > 1 and shape[0]])
def test_its_bits_are_torchs(shape, plain_kernels, monkeypatch):
    monkeypatch.setattr(pooling, "kernels", lambda device: plain_kernels)
    check(shape, "cpu", pooling.Pool.apply)


@pytest.mark.parametrize("shape", [(2, 8, 1, 4), (0, 8, 4, 4)])
def test_what_has_no_window_has_no_gradient(shape, plain_kernels, monkeypatch):
    monkeypatch.setattr(pooling, "kernels", lambda device: plain_kernels)
    leaf = pixels(shape, "cpu").requires_grad_()
    pooled = pooling.Pool.apply(leaf)
    assert pooled.numel() == 0
    pooled.sum().backward()
    assert leaf.grad.shape == leaf.shape and not leaf.grad.any()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if min(shape[2:]) > 1 and shape[0]])
def test_its_bits_are_torchs_on_a_gpu(shape):
    assert pooling.kernels(torch.device("cuda", torch.cuda.current_device())) is not None
    check(shape, "cuda", pooling.max_pool)


@pytest.mark.gpu
def test_it_can_be_captured():
    x = pixels((6, 16, 9, 7), "cuda")
    pooling.max_pool(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pooled = pooling.max_pool(x)
    x.copy_(pixels((6, 16, 9, 7), "cuda").nan_to_num(1.0) * 3)
    graph.replay()
    assert torch.equal(pooled, F.max_pool2d(x, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("change", [lambda x: x.float(), lambda x: x[:, :5], lambda x: x.contiguous()])
def test_what_does_not_fit_goes_to_torch(change):
    x = change(pixels((2, 16, 8, 6), "cuda").nan_to_num(0.0))
    assert torch.equal(pooling.max_pool(x), F.max_pool2d(x, 2))


def test_without_a_compiler_for_kernels_it_says_so_once(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "_compile_kernel", None)
    pooling.kernels.cache_clear()
    with pytest.warns(UserWarning, match="cannot be compiled, torch's are slower: 'NoneType' object is not callable"):
        assert pooling.kernels(torch.device("cpu")) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pooling.kernels(torch.device("cpu")) is None
    pooling.kernels.cache_clear()
