"""The state of a run as JSON values and tensors, which is what a checkpoint's files can hold, and back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

MARK = "$"  # key that tells a reference or a special value from a plain dict
JSON_BITS = 4096  # larger ints are written in hexadecimal: Python limits the length of decimal ones it reads
ARRAY_KINDS = "biufcmMSU"
TENSOR_TYPES = {
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
}


def pack(tree: Any) -> tuple[Any, dict[str, Tensor]]:
    """Split nested dicts and lists into JSON values and the tensors they refer to.

    Ints, floats, bools, strings, None, bytes, numpy arrays and scalars, and tensors come back from `unpack` as they
    went in, but for three things: a tuple comes back as a list, a dict's subclass as a dict, a tensor on the CPU.
    """
    tensors: dict[str, Tensor] = {}
    return _pack(tree, "state", tensors), tensors


def _pack(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or type(value) in (bool, str):
        return value
    if type(value) is int:
        return value if value.bit_length() <= JSON_BITS else {MARK: "int", "value": hex(value)}
    if type(value) is float:
        return value if math.isfinite(value) else {MARK: "float", "value": repr(value)}
    if isinstance(value, dict):
        return _pack_dict(value, where, tensors)
    if isinstance(value, list | tuple):
        return [_pack(item, f"{where}.{i}", tensors) for i, item in enumerate(value)]
    reference, tensor = _pack_array(value, where)
    # The number makes the name unique, the path readable; file formats want clean text.
    name = f"{len(tensors)} {where}".encode("ascii", "backslashreplace").decode()
    tensors[name] = tensor
    return {**reference, "name": name}


def _pack_dict(value: dict[Any, Any], where: str, tensors: dict[str, Tensor]) -> Any:
    for key in value:
        if type(key) not in (str, int):
            raise TypeError(f"{where} has the key {key!r}; a checkpoint keeps dicts whose keys are str or int")
    items = [(key, _pack(item, f"{where}.{key}", tensors)) for key, item in value.items()]
    if MARK in value or any(type(key) is int for key in value):
        return {MARK: "dict", "items": items}
    return dict(items)


def _pack_array(value: Any, where: str) -> tuple[dict[str, Any], Tensor]:
    if isinstance(value, Tensor):
        if value.dtype not in TENSOR_TYPES or value.layout != torch.strided:
            raise TypeError(f"{where} is a tensor of {value.dtype}, {value.layout}; a checkpoint cannot keep it")
        return {MARK: "tensor"}, value.detach()
    if isinstance(value, bytes):
        return {MARK: "bytes"}, _raw(np.frombuffer(value, np.uint8))
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in ARRAY_KINDS:
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        array = np.asarray(value)
        return {MARK: kind, "dtype": array.dtype.str, "shape": list(array.shape)}, _raw(array)
    raise TypeError(f"{where} is a {type(value).__name__}; a checkpoint keeps plain values, bytes, arrays and tensors")


def _raw(array: np.ndarray) -> Tensor:
    """The array's bytes in C order."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return torch.from_numpy(flat if flat.flags.writeable else flat.copy())


def unpack(tree: Any, tensors: dict[str, Tensor]) -> Any:
    """What was given to `pack`."""
    if isinstance(tree, list):
        return [unpack(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    kind = tree.get(MARK)
    if kind is None:
        return {key: unpack(item, tensors) for key, item in tree.items()}
    if kind == "dict":
        if not all(type(key) in (str, int) for key, _ in tree["items"]):
            raise ValueError("a key of a dict is neither str nor int")
        return {key: unpack(item, tensors) for key, item in tree["items"]}
    if kind == "int":
        return int(tree["value"], 16)
    if kind == "float":
        return float(tree["value"])
    tensor = tensors[tree["name"]]
    if kind == "tensor":
        return tensor
    if tensor.dtype != torch.uint8 or tensor.ndim != 1:
        raise ValueError(f"{tree['name']!r:.80} is not a row of bytes")
    if kind == "bytes":
        return tensor.numpy().tobytes()
    if kind not in ("array", "scalar"):
        raise ValueError(f"{kind!r:.80} is not a kind of value")
    return _unpack_array(tree, kind, tensor)


def _unpack_array(tree: dict[str, Any], kind: str, tensor: Tensor) -> Any:
    """The array with these bytes. Its size is looked at before there is one: a wrong shape might ask for any memory."""
    dtype, shape = np.dtype(str(tree["dtype"])), tree["shape"]
    if dtype.kind not in ARRAY_KINDS or not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError(f"an array of {dtype} with the shape {shape!r:.80} cannot be")
    if math.prod(shape) * dtype.itemsize != tensor.numel() or (kind == "scalar" and shape):
        raise ValueError(f"an array of {dtype} with the shape {shape!r:.80} does not have {tensor.numel()} bytes")
    # A copy, since bytes of a file need not lie where numbers of this type may lie.
    array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8)[:] = tensor.numpy()
    return array if kind == "array" else array[()]
