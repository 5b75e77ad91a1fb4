"""Maxima of 2x2 pixels, the pool of torsos.

With channels innermost in memory torch's kernels take several times as long as reading and writing the pixels does,
backwards above all. So on a GPU bfloat16 pixels go through two kernels of our own, compiled when they are first used.
They give the same bits; where they cannot be had, torch's are used.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

THREADS = 256
CHANNELS = 8  # of a thread: 16 bytes at a time

SOURCE = r"""
typedef unsigned short number;  // a bfloat16: the upper half of a float

__device__ float value(number bits) { return __uint_as_float((unsigned)bits << 16); }

// which of the 2x2 windows of an image of height x width, and which eight of its channels
struct Place {
    int row, column, part;
    long long image;
    __device__ Place(long long thread, int rows, int columns, int parts) {
        part = thread % parts;
        thread /= parts;
        column = thread % columns;
        thread /= columns;
        row = thread % rows;
        image = thread / rows;
    }
    __device__ long long corner(int height, int width, int parts) const {
        return ((image * height + 2 * row) * width + 2 * column) * parts + part;
    }
};

extern "C" __global__ void pool(
    const uint4* pixels, uint4* maxima, uint2* winners, int threads, int height, int width, int parts
) {
    long long thread = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (thread >= threads) return;
    long long corner = Place(thread, height / 2, width / 2, parts).corner(height, width, parts);
    uint4 window[4] = {pixels[corner], pixels[corner + parts],
                       pixels[corner + (long long)width * parts], pixels[corner + (width + 1LL) * parts]};
    uint4 best = window[0];
    uint2 from = {0, 0};
    number* maximum = (number*)&best;
    unsigned char* winner = (unsigned char*)&from;
    #pragma unroll
    for (int other = 1; other < 4; other++) {
        const number* candidate = (const number*)&window[other];
        #pragma unroll
        for (int channel = 0; channel < 8; channel++) {
            float theirs = value(candidate[channel]);
            if (theirs > value(maximum[channel]) || theirs != theirs) {  // the first of equals; what is no number wins
                maximum[channel] = candidate[channel];
                winner[channel] = other;
            }
        }
    }
    maxima[thread] = best;
    winners[thread] = from;
}

// one thread for each window, and for each that reaches beyond the image, whose pixels have no part in any maximum
extern "C" __global__ void unpool(
    const uint4* gradients, const uint2* winners, uint4* result, int threads, int height, int width, int parts
) {
    long long thread = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (thread >= threads) return;
    Place place(thread, (height + 1) / 2, (width + 1) / 2, parts);
    uint4 gradient = {0, 0, 0, 0};
    uint2 from = {0, 0};
    if (place.row < height / 2 && place.column < width / 2) {
        long long whole = ((place.image * (height / 2) + place.row) * (width / 2) + place.column) * parts + place.part;
        gradient = gradients[whole];
        from = winners[whole];
    }
    const number* given = (const number*)&gradient;
    const unsigned char* winner = (const unsigned char*)&from;
    long long corner = place.corner(height, width, parts);
    #pragma unroll
    for (int pixel = 0; pixel < 4; pixel++) {
        int down = pixel / 2, right = pixel % 2;
        if (2 * place.row + down >= height || 2 * place.column + right >= width) continue;
        uint4 own;
        number* share = (number*)&own;
        #pragma unroll
        for (int channel = 0; channel < 8; channel++) share[channel] = winner[channel] == pixel ? given[channel] : 0;
        result[corner + ((long long)down * width + right) * parts] = own;
    }
}
"""


def max_pool(x: Tensor) -> Tensor:
    """[N, C, H, W] -> [N, C, H/2, W/2]"""
    fits = x.is_cuda and x.dtype == torch.bfloat16 and x.shape[1] % CHANNELS == 0 and x.numel() < 2**31
    if fits and x.is_contiguous(memory_format=torch.channels_last) and kernels(x.device) is not None:
        pooled: Tensor = Pool.apply(x)
        return pooled
    return F.max_pool2d(x, 2)


@functools.cache
def kernels(device: torch.device) -> tuple[Callable[..., None], Callable[..., None]] | None:
    """Forwards and backwards, for a device; None where they cannot be compiled."""
    try:
        compile_kernel: Any = torch.cuda._compile_kernel
        with torch.cuda.device(device):
            return compile_kernel(SOURCE, "pool"), compile_kernel(SOURCE, "unpool")
    except Exception as error:  # of whatever kind: torch's kernels do as well
        reason = str(error).partition("\n")[0]
        warnings.warn(f"phalanx's kernels for pools cannot be compiled, torch's are slower: {reason}", stacklevel=2)
        return None


class Pool(torch.autograd.Function):
    """2x2 maxima of bfloat16 pixels with channels innermost."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        count, channels, height, width = x.shape
        shape = (count, channels, height // 2, width // 2)
        maxima = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        winners = torch.empty(shape, dtype=torch.uint8, device=x.device, memory_format=torch.channels_last)
        launch(0, maxima.numel() // CHANNELS, [x, maxima, winners], x.shape)
        context.save_for_backward(winners)
        context.shape = x.shape
        return maxima

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        (winners,) = context.saved_tensors
        count, channels, height, width = context.shape
        result = torch.empty(
            context.shape, dtype=gradient.dtype, device=gradient.device, memory_format=torch.channels_last
        )
        windows = count * ((height + 1) // 2) * ((width + 1) // 2)
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        launch(1, windows * channels // CHANNELS, [gradient, winners, result], context.shape)
        return result


def launch(which: int, threads: int, tensors: list[Tensor], shape: torch.Size) -> None:
    found = kernels(tensors[0].device)
    assert found is not None
    blocks = -(-threads // THREADS)
    arguments = [*tensors, threads, shape[2], shape[3], shape[1] // CHANNELS]
    if blocks:
        found[which](grid=(blocks, 1, 1), block=(THREADS, 1, 1), args=arguments)
