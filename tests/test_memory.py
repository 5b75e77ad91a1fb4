from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import torch
from phalanx.runtime.memory import keep_freed_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

if sys.argv[1] == "keep":
    keep_freed_memory()
tensors = [torch.ones(15 << 20, dtype=torch.uint8) for _ in range(4)]
held = resident()
del tensors
print((held - resident()) >> 20)
"""


def given_back(mode: str) -> int:
    """MiB that the process loses when it frees four tensors of 15 MiB."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, mode], capture_output=True, text=True, timeout=60, check=True)
    return int(done.stdout)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs the memory figures of Linux")
def test_freed_tensors_stay_with_the_process() -> None:
    assert given_back("default") >= 45
    assert given_back("keep") <= 5
