"""Presets that are made from others differ from them only where they say so."""

from __future__ import annotations

import dataclasses

from phalanx.config.presets import preset


def test_atari_fast_is_breakout_fast_for_any_game_within_ten_million_steps() -> None:
    one, other = (dataclasses.asdict(preset(name)) for name in ("atari-fast", "breakout-fast"))
    changed = {
        f"{part}.{field}": one[part][field]
        for part in ("env", "model", "algorithm", "optimizer", "sampler", "topology", "run")
        for field in one[part]
        if one[part][field] != other[part][field]
    }
    assert changed == {
        "algorithm.entropy_coef": 0.01,
        "optimizer.learning_rate": 2.5e-4,
        "optimizer.schedule_length": 10_000_000,
        "run.steps": 10_000_000,
        "run.target_score": None,
    }
