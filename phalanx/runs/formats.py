"""Checkpoints of earlier formats, brought into the present one when they are read."""

from __future__ import annotations

from typing import Any

import torch


def from_format_1(state: dict[str, Any]) -> dict[str, Any]:
    """Format 1 held one replica with everything in it, and the parameters a second time in its store."""
    replica = dict(state["replica"])
    clocks, store = replica.pop("progress"), dict(replica.pop("store"))
    store.pop("parameters")
    version, pending = replica.pop("version", 0), replica.pop("held", None)
    if pending is not None:
        pending = {**pending, "version": torch.full(pending["action"].shape, version, dtype=torch.int64)}
    if replica["sampling"] is not None:
        sampling = dict(replica["sampling"])
        collector = dict(sampling["collector"])
        collector["uniform"] = collector.pop("noise")
        collector["uncounted"] = collector.pop("cut", 0)
        slots = [
            {("gap_before" if key == "severed" else key): value for key, value in slot.items()}
            for slot in sampling["envs"]["slots"]
        ]
        replica["sampling"] = {**sampling, "collector": collector, "envs": {**sampling["envs"], "slots": slots}}
    rest = {key: value for key, value in state.items() if key != "replica"}
    return {**rest, "clocks": clocks, "store": store, "replicas": [{**replica, "pending": pending}]}


EARLIER = {1: from_format_1}
"""How a state of an earlier format becomes one of the present, by the number of the format."""
