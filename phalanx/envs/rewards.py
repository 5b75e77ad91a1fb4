"""What an algorithm learns from: the raw reward, its sign, or the reward clipped to [-1, 1]. NaN passes through."""

from __future__ import annotations

from collections.abc import Callable


def _sign(reward: float) -> float:
    return 1.0 if reward > 0 else -1.0 if reward < 0 else reward


def _clip(reward: float) -> float:
    return 1.0 if reward > 1 else -1.0 if reward < -1 else reward


REWARDS: dict[str, Callable[[float], float]] = {"sign": _sign, "clip": _clip, "raw": float}
