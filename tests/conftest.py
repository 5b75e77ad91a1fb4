"""Shared set-up of the tests."""

from __future__ import annotations

import phalanx  # noqa: F401  first: it tells torch's threads to sleep, not spin, and torch reads that when loaded

import pytest  # isort: skip
import torch  # isort: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
