"""Checkpoints: everything a run needs to go on, in directories that are either whole or not there.

    checkpoints/step-000001234567/  model.safetensors   the weights, name -> tensor
                                    state.safetensors   every other tensor, array and byte string
                                    state.json          the rest of the state; arrays are references into the above
                                    replay-*.bin        the replay memory, if it is part of checkpoints
                                    manifest.json       format, steps, score, time, size and checksum of each file
    checkpoints/best.json           names the checkpoint with the best score

Nothing in them is executed on load. A topology gives `Checkpoints.write` its state; `resume` and `eval` call `load`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from phalanx.errors import RunError, UserError

FORMAT = 1
FILES = ("model.safetensors", "state.safetensors", "state.json")
MARK = "$"  # key that tells a reference or a special value from a plain dict
JSON_BITS = 4096  # larger ints are written in hexadecimal: Python limits the length of decimal ones it reads
ARRAY_KINDS = "biufcmMSU"
TENSOR_TYPES = {
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
}


@dataclass
class Loaded:
    """A checkpoint in memory."""

    weights: dict[str, Tensor]
    state: Any
    steps: int
    score: float | None
    path: Path


class DamageError(Exception):
    """One checkpoint cannot be used; the text names the file and what is wrong with it."""


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
        return {key: unpack(item, tensors) for key, item in tree["items"]}
    if kind == "int":
        return int(tree["value"], 16)
    if kind == "float":
        return float(tree["value"])
    tensor = tensors[tree["name"]]
    if kind == "tensor":
        return tensor
    if kind == "bytes":
        return tensor.numpy().tobytes()
    # A copy, since bytes of a file need not lie where numbers of this type may lie.
    array = np.empty(tree["shape"], np.dtype(tree["dtype"]))
    array.reshape(-1).view(np.uint8)[:] = tensor.numpy()
    return array if kind == "array" else array[()]


class Checkpoints:
    """The checkpoints of one run: the newest `keep` and the one with the best score."""

    def __init__(self, directory: Path, keep: int, report: Callable[[str], None] = warnings.warn) -> None:
        self.directory = directory
        self.keep = keep
        self.report = report  # told about each checkpoint that cannot be used
        self._unusable: set[Path] = set()  # those `load` found damaged

    def write(
        self,
        weights: dict[str, Tensor],
        state: Any,
        steps: int,
        score: float | None,
        extra: Callable[[Path], None] | None = None,
    ) -> Path:
        """Write a checkpoint, or leave all as it was; older ones beyond `keep`, and any of later steps, then go.
        `extra` may put further files, too large for `state`, into the directory it is given."""
        final = self.directory / f"step-{steps:012d}"
        temporary = self.directory / f".tmp-{final.name}"
        values, tensors = pack(state)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._clean()
            temporary.mkdir()
            save_file(_separate(weights), temporary / FILES[0])
            save_file(_separate(tensors), temporary / FILES[1])
            (temporary / FILES[2]).write_text(json.dumps(values, allow_nan=False))
            for name in FILES[:2]:  # safetensors leaves them to the owner alone, whatever the umask says
                (temporary / name).chmod((temporary / FILES[2]).stat().st_mode)
            if extra is not None:
                extra(temporary)
            (temporary / "manifest.json").write_text(_manifest(temporary, steps, score))
            for path in (*temporary.iterdir(), temporary):
                _sync(path)
            self._publish(temporary, final)
            self._unusable.discard(final)
            self._prune(steps)
        except (OSError, SafetensorError) as error:
            free = _free_space(self.directory)
            raise RunError(
                f"cannot write the checkpoint {final} ({error}; {free} free); make room and resume the run"
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return final

    def load(self, device: str | torch.device = "cpu") -> Loaded:
        """The newest checkpoint that is whole; its weights on `device`, its state on the CPU."""
        return self._first_usable(self._readable(), device)

    def load_best(self, device: str | torch.device = "cpu") -> Loaded:
        """The whole checkpoint with the best score; those without a score come last."""

        def score(path: Path) -> float:
            found = _read_manifest(path)["score"] if _is_whole(path) else None
            return -math.inf if found is None else float(found)

        return self._first_usable(sorted(self._readable(), key=score, reverse=True), device)

    def _first_usable(self, candidates: list[Path], device: str | torch.device) -> Loaded:
        for path in candidates:
            try:
                return _read(path, device)
            except DamageError as damage:
                self._unusable.add(path)
                self.report(f"{damage}; trying another checkpoint")
        if candidates:
            raise UserError(f"none of the checkpoints in {self.directory} can be used; start the run anew")
        raise UserError(f"{self.directory} holds no checkpoint; give the directory of a run that wrote one")

    def _readable(self) -> list[Path]:
        """The candidates, for one who only reads."""
        try:
            return self._candidates()
        except OSError as error:
            raise UserError(f"cannot read {self.directory} ({error.strerror}); ask its owner for permission") from None

    def _candidates(self) -> list[Path]:
        """Checkpoint directories, newest first; `.old-` ones are left of a crash while one was being replaced."""
        found = self.directory.iterdir() if self.directory.is_dir() else iter(())
        named = [path for path in found if re.fullmatch(r"(\.old-)?step-\d{12,}", path.name) and path.is_dir()]
        return sorted(named, key=lambda path: (_steps(path), not path.name.startswith(".")), reverse=True)

    def _publish(self, temporary: Path, final: Path) -> None:
        """Give the finished directory its name; one of the same steps is there under some name until the end."""
        old = self.directory / f".old-{final.name}"
        if final.exists():
            os.replace(final, old)
        try:
            os.replace(temporary, final)
        except BaseException:
            if old.exists():
                os.replace(old, final)
            raise
        _sync(self.directory)
        shutil.rmtree(old, ignore_errors=True)

    def _prune(self, steps: int) -> None:
        """Mark the best and remove what is not kept: damaged ones, and later steps, of a future that was given up."""
        named = [path for path in self._candidates() if path.name.startswith("step-") and _steps(path) <= steps]
        past = [path for path in named if path not in self._unusable and _is_whole(path)]
        scores = {path: score for path in past if (score := _read_manifest(path)["score"]) is not None}
        kept = set(past[: self.keep])
        if scores:
            best = max(scores, key=lambda path: scores[path])
            self._mark_best({"checkpoint": best.name, "steps": _steps(best), "score": scores[best]})
            kept.add(best)
        else:
            (self.directory / "best.json").unlink(missing_ok=True)
        for path in set(self._candidates()) - kept:
            # Renamed first, so that a crash leaves no half-removed checkpoint behind.
            doomed = self.directory / f".tmp-{path.name}"
            os.replace(path, doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    def _mark_best(self, mark: dict[str, Any]) -> None:
        temporary = self.directory / ".tmp-best.json"
        temporary.write_text(json.dumps(mark) + "\n")
        _sync(temporary)
        os.replace(temporary, self.directory / "best.json")
        _sync(self.directory)

    def _clean(self) -> None:
        """Remove what a crashed write left, and undo a replacement that it did not finish."""
        for path in self.directory.glob(".tmp-*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for old in self.directory.glob(".old-*"):
            final = self.directory / old.name.removeprefix(".old-")
            shutil.rmtree(old) if final.exists() else os.replace(old, final)


def _read(path: Path, device: str | torch.device) -> Loaded:
    manifest = _read_manifest(path)
    for name, expected in manifest["files"].items():
        _check(path / name, expected)
    try:
        weights = load_file(path / FILES[0], device=str(device))
        state = unpack(json.loads((path / FILES[2]).read_text()), load_file(path / FILES[1]))
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise DamageError(f"the checkpoint {path} cannot be read ({error})") from error
    return Loaded(weights, state, manifest["steps"], manifest["score"], path)


def _check_size(path: Path, expected: dict[str, Any]) -> None:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise DamageError(f"{path} is missing") from None
    except OSError as error:
        raise DamageError(f"{path} cannot be read ({error.strerror})") from error
    if size != expected["bytes"]:
        raise DamageError(f"{path} is damaged: it has {size} bytes instead of {expected['bytes']}")


def _check(path: Path, expected: dict[str, Any]) -> None:
    _check_size(path, expected)
    try:
        checksum = _checksum(path)
    except OSError as error:
        raise DamageError(f"{path} cannot be read ({error.strerror})") from error
    if checksum != expected["sha256"]:
        raise DamageError(f"{path} is damaged: its checksum is not the one in the manifest")


def _manifest(directory: Path, steps: int, score: float | None) -> str:
    paths = sorted(directory.iterdir())
    files = {path.name: {"bytes": path.stat().st_size, "sha256": _checksum(path)} for path in paths}
    score = float(score) if score is not None and math.isfinite(score) else None
    body = {"format": FORMAT, "steps": steps, "score": score, "time": time.time(), "files": files}
    return json.dumps({**body, "sha256": _digest(body)}, indent=2) + "\n"


def _read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest, or DamageError: it carries its own checksum, so that a wrong step count or score cannot slip in."""
    path = directory / "manifest.json"
    try:
        manifest = json.loads(path.read_text())
    except FileNotFoundError:
        raise DamageError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise DamageError(f"{path} is damaged: it cannot be read as JSON ({error})") from error
    if not isinstance(manifest, dict) or manifest.pop("sha256", None) != _digest(manifest):
        raise DamageError(f"{path} is damaged: its contents do not match its own checksum")
    if manifest["format"] != FORMAT:
        raise DamageError(f"{path} has format {manifest['format']}, but this version of phalanx reads {FORMAT}")
    if manifest["steps"] != _steps(directory):
        raise DamageError(f"{path} is of step {manifest['steps']}, which is not what its directory says")
    return manifest


def _is_whole(path: Path) -> bool:
    """Does the checkpoint look whole, as far as can be told without reading all of it?"""
    try:
        for name, expected in _read_manifest(path)["files"].items():
            _check_size(path / name, expected)
    except DamageError:
        return False
    return True


def _steps(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def _digest(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
        return digest.hexdigest()


def _separate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors on the CPU that share no memory, as the file format wants; copies only where it must."""
    separate: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        if tensor.untyped_storage().nbytes() != tensor.nbytes or tensor.data_ptr() in seen:
            tensor = tensor.clone()
        seen.add(tensor.data_ptr())
        separate[name] = tensor
    return separate


def _sync(path: Path) -> None:
    """Make sure that a file or a directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _free_space(directory: Path) -> str:
    try:
        return f"{shutil.disk_usage(directory).free / 2**20:.0f} MiB"
    except OSError:
        return "unknown space"
