"""What a run was made with: versions and the machine, kept in its `config.json` beside the experiment.

Results depend on them in the last bits, and speeds altogether; so a resumed run says when they are others than before.
"""

from __future__ import annotations

import contextlib
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import phalanx
from phalanx.runtime.affinity import usable_cores

PACKAGES = ("torch", "ale-py", "gymnasium", "numpy")
GIT_TIMEOUT = 5.0  # seconds
LONGEST = 200  # letters of a value that is shown


def origin(gpu: str | None = None) -> dict[str, Any]:
    """Of a run that this process makes."""
    versions = {"phalanx": phalanx.__version__, "commit": commit(), "python": platform.python_version()}
    return {
        "versions": {**versions, **{name: installed(name) for name in PACKAGES}},
        "machine": {"cpu": processor(), "cores": usable_cores(), "gpu": gpu, "system": platform.platform()},
    }


def gpu_name(device: Any) -> str | None:
    """The kind of GPU behind a torch device."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def changes(before: Any, now: dict[str, Any]) -> list[str]:
    """What differs, in words; nothing where one of them was not told. What was read from a file is of anybody."""
    found = []
    for part, values in now.items():
        told = before.get(part) if isinstance(before, dict) else None
        for name, value in values.items():
            old = told.get(name) if isinstance(told, dict) else None
            if old is not None and value is not None and old != value:
                found.append(f"{name} {_short(old)} -> {_short(value)}")
    return found


def commit() -> str | None:
    """The commit that phalanx runs from, `-dirty` where files were changed; None if it was installed."""
    root = Path(phalanx.__file__).parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT, check=True)
        return done.stdout.strip() or None
    return None


def installed(package: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def processor() -> str:
    """The processor's own name, where the system tells it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _short(value: Any) -> str:
    """A value as a terminal may show it."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(value)[:LONGEST])
