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
import shlex
import shutil
import stat
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from phalanx.errors import RunError, UserError
from phalanx.files import open_plain, read_plain, remove, write_whole
from phalanx.runs.formats import EARLIER
from phalanx.runs.pack import pack, unpack

FORMAT = 2
FILES = ("model.safetensors", "state.safetensors", "state.json")
MANIFEST_BYTES = 1 << 20  # no manifest is larger
STATE_BYTES = 1 << 28  # nor is a state.json
NAME = r"step-\d{12,}"
MALFORMED = (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, RecursionError, MemoryError)
"""What reading values of another shape than they should have may raise."""


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


class Checkpoints:
    """The checkpoints of one run: the newest `keep` and the one with the best score."""

    def __init__(
        self,
        directory: Path,
        keep: int,
        report: Callable[[str], None] = warnings.warn,
        check: Callable[[Any], None] = lambda state: None,
    ) -> None:
        self.directory = directory
        self.keep = keep
        self.report = report  # told about each checkpoint that cannot be used
        self.check = check  # raises ValueError if a state is none of this run
        self._unusable: set[Path] = set()  # those that were found damaged

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
            remove(temporary, careless=True)
        return final

    def load(self, device: str | torch.device = "cpu") -> Loaded:
        """The newest checkpoint that is whole; its weights on `device`, its state on the CPU."""
        return self._first_usable(self._readable(), device)

    def load_another(self) -> Loaded:
        """The newest one besides those given up."""
        return self._first_usable([path for path in self._readable() if path not in self._unusable], "cpu")

    def give_up(self, path: Path, damage: str) -> None:
        """Note, and say, that a checkpoint cannot be used."""
        self._unusable.add(path)
        self.report(f"{damage}; trying another checkpoint")

    def load_best(self, device: str | torch.device = "cpu") -> Loaded:
        """The whole checkpoint with the best score; those without a score come last."""

        def score(path: Path) -> float:
            found = _read_manifest(path)["score"] if _is_whole(path) else None
            return -math.inf if found is None else float(found)

        return self._first_usable(sorted(self._readable(), key=score, reverse=True), device)

    def _first_usable(self, candidates: list[Path], device: str | torch.device) -> Loaded:
        for path in candidates:
            try:
                return _read(path, device, self.check)
            except DamageError as damage:
                self.give_up(path, str(damage))
        if candidates or self._unusable:
            raise UserError(f"none of the checkpoints in {self.directory} can be used; start the run anew")
        run = self.directory.absolute().parent
        raise UserError(
            f"{self.directory} holds no checkpoint: the run ended before its first; start it again with `phalanx train "
            f"PRESET --run.directory {shlex.quote(str(run.parent))} --run.name {shlex.quote(run.name)}`"
        )

    def _readable(self) -> list[Path]:
        """The candidates, for one who only reads."""
        try:
            return self._candidates()
        except OSError as error:
            raise UserError(f"cannot read {self.directory} ({error.strerror}); ask its owner for permission") from None

    def _candidates(self) -> list[Path]:
        """Checkpoint directories, newest first; `.old-` ones are left of a crash while one was being replaced."""
        found = self.directory.iterdir() if self.directory.is_dir() else iter(())
        named = [path for path in found if re.fullmatch(rf"(\.old-)?{NAME}", path.name) and path.is_dir()]
        return sorted(named, key=lambda path: (_steps(path), not path.name.startswith(".")), reverse=True)

    def _publish(self, temporary: Path, final: Path) -> None:
        """Give the finished directory its name; one of the same steps is there under some name until the end."""
        old = self.directory / f".old-{final.name}"
        if os.path.lexists(final):
            os.replace(final, old)
        try:
            os.replace(temporary, final)
        except BaseException:
            if os.path.lexists(old):
                os.replace(old, final)
            raise
        _sync(self.directory)
        remove(old, careless=True)

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
            remove(self.directory / "best.json")
        for path in set(self._candidates()) - kept:
            # Renamed first, so that a crash leaves no half-removed checkpoint behind.
            doomed = self.directory / f".tmp-{path.name}"
            os.replace(path, doomed)
            remove(doomed, careless=True)

    def _mark_best(self, mark: dict[str, Any]) -> None:
        write_whole(self.directory / "best.json", json.dumps(mark) + "\n")
        _sync(self.directory)

    def _clean(self) -> None:
        """Remove what a crashed write left, and undo a replacement that it did not finish; others' files stay, since
        the directory may be a link to anywhere."""
        for path in self.directory.glob(".tmp-*"):
            if re.fullmatch(rf"\.tmp-(\.old-)?({NAME}|best\.json)", path.name):
                remove(path)
        for old in self.directory.glob(".old-*"):
            final = self.directory / old.name.removeprefix(".old-")
            if re.fullmatch(NAME, final.name):
                remove(old) if os.path.lexists(final) else os.replace(old, final)


def _read(path: Path, device: str | torch.device, check: Callable[[Any], None]) -> Loaded:
    manifest = _read_manifest(path)
    try:
        for name, expected in manifest["files"].items():
            _check_size(path / name, expected)
        for file in path.iterdir():  # what the manifest does not name may be read as well
            if not stat.S_ISREG(file.lstat().st_mode):
                raise DamageError(f"{file} is not a plain file")
        for name, expected in manifest["files"].items():
            if _checksum(path / name) != expected["sha256"]:
                raise DamageError(f"{path / name} is damaged: its checksum is not the one in the manifest")
        weights = load_file(path / FILES[0], device=str(device))
        state = unpack(json.loads(read_plain(path / FILES[2], STATE_BYTES)), load_file(path / FILES[1]))
        state = EARLIER[manifest["format"]](state) if manifest["format"] in EARLIER else state
        check(state)
    except (OSError, SafetensorError, *MALFORMED) as error:
        raise DamageError(f"the checkpoint {path} cannot be read ({in_one_line(error)})") from error
    return Loaded(weights, state, manifest["steps"], manifest["score"], path)


def in_one_line(error: Exception) -> str:
    """An error that nobody foresaw, short enough for a sentence."""
    text = " ".join(str(error).split())
    text = text if len(text) <= 200 else f"{text[:100]} ... {text[-100:]}"
    return f"{type(error).__name__}: {text}" if isinstance(error, MALFORMED) else text


def _check_size(path: Path, expected: dict[str, Any]) -> None:
    """Refuse at once, without opening it, what is no plain file of the size it should have."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        raise DamageError(f"{path} is missing") from None
    except OSError as error:
        raise DamageError(f"{path} cannot be read ({error.strerror})") from error
    if not stat.S_ISREG(found.st_mode):
        raise DamageError(f"{path} is not a plain file")
    if found.st_size != expected["bytes"]:
        raise DamageError(f"{path} is damaged: it has {found.st_size} bytes instead of {expected['bytes']}")


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
        manifest = json.loads(read_plain(path, MANIFEST_BYTES))
        whole = isinstance(manifest, dict) and manifest.pop("sha256", None) == _digest(manifest)
    except FileNotFoundError:
        raise DamageError(f"{path} is missing") from None
    except (OSError, *MALFORMED) as error:
        raise DamageError(f"{path} is damaged: it cannot be read as JSON ({in_one_line(error)})") from error
    if not whole:
        raise DamageError(f"{path} is damaged: its contents do not match its own checksum")
    if manifest.get("format") not in (FORMAT, *EARLIER):
        raise DamageError(
            f"{path} has format {manifest.get('format')}, but this version of phalanx reads up to {FORMAT}"
        )
    if type(manifest.get("steps")) is not int or manifest["steps"] != _steps(directory):
        raise DamageError(f"{path} is of step {manifest.get('steps')}, which is not what its directory says")
    score = manifest.setdefault("score", None)
    if score is not None and (type(score) not in (int, float) or not abs(score) < math.inf):
        raise DamageError(f"{path} is damaged: its score is not a number")
    _check_names(path, manifest.get("files"))
    return manifest


def _check_names(path: Path, files: Any) -> None:
    """A manifest names files beside itself, those of every checkpoint among them, each with its size and checksum."""
    if not isinstance(files, dict) or not set(FILES) <= set(files):
        raise DamageError(f"{path} is damaged: it does not name {', '.join(FILES)}")
    for name, expected in files.items():
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise DamageError(f"{path} names {name!r:.80}, which is not a file in its own directory")
        numbers = expected if isinstance(expected, dict) else {}
        if type(numbers.get("bytes")) is not int or type(numbers.get("sha256")) is not str:
            raise DamageError(f"{path} is damaged: it lacks the size or the checksum of {name!r:.80}")


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
    with os.fdopen(open_plain(path), "rb") as file:
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
