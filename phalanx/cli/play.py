"""`phalanx eval` and `phalanx play`: whole games of a trained agent, scored or recorded."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.config.flags import parse_options
from phalanx.errors import require

if TYPE_CHECKING:
    import numpy as np

    from phalanx.config import EnvConfig
    from phalanx.sampling.player import Shown


@dataclass(frozen=True)
class GameOptions:
    """What `eval` and `play` both want to know."""

    run: Path
    """Directory of the run."""
    games: int = 1
    """Games to play."""
    greedy: bool = False
    """Always the best action: no draw, and no random one of Q-learning."""
    best: bool = False
    """The checkpoint with the best score instead of the newest."""
    seed: int = 0
    """Seed of the games."""
    device: str | None = None
    """cpu or cuda instead of the run's device."""


@dataclass(frozen=True)
class EvalOptions(GameOptions):
    """Play whole games of a trained agent and report their raw scores."""

    games: int = 30
    """Games to play."""
    json: bool = False
    """One JSON object instead of a sentence."""


@dataclass(frozen=True)
class PlayOptions(GameOptions):
    """Record games of a trained agent, at the speed at which people would play."""

    video: Path = Path("play.mp4")
    """File to write, .mp4 or .gif."""
    max_frames: int = 20_000
    """Pictures recorded at most; the game stops there."""


def evaluate_command(arguments: list[str]) -> int:
    options = parse_options(EvalOptions, "eval", arguments)
    import statistics

    from phalanx.sampling.evaluator import evaluate

    games, seed = positive(options.games, "--games"), not_negative(options.seed, "--seed")
    config, policy, compute, progress = load_policy(options)
    scores = evaluate(config, policy, compute, games, seed, progress)
    result = {
        "environment": config.name,
        "games": len(scores),
        "mean": statistics.mean(scores),
        "deviation": statistics.stdev(scores) if len(scores) > 1 else 0.0,
        "min": min(scores),
        "max": max(scores),
        "actions": "greedy" if options.greedy else "drawn",
        "steps": progress.steps,
        "seed": seed,
    }
    sentence = (
        "{games} game{s} of {environment}: mean {mean:.2f}, deviation {deviation:.2f}, min {min:g}, max {max:g} "
        "(raw scores, whole games, {actions} actions, {steps:,} steps of training)"
    )
    print(
        json.dumps({**result, "scores": scores})
        if options.json
        else sentence.format(**result, s="" if games == 1 else "s")
    )
    return 0


def play(arguments: list[str]) -> int:
    options = parse_options(PlayOptions, "play", arguments)
    from phalanx.runs.video import check_format, check_place, speed, write_video
    from phalanx.sampling.player import Player

    check_format(options.video)
    games, seed = positive(options.games, "--games"), not_negative(options.seed, "--seed")
    most = positive(options.max_frames, "--max-frames")
    config, policy, compute, progress = load_policy(options)
    check_place(options.video)
    player = Player(config, policy, compute, seed, progress)
    scores: list[float] = []
    under_way: list[Shown] = []  # the newest picture's game, if it is not over

    def shown() -> Iterator[np.ndarray]:
        for now in itertools.islice(player.games(games), most):
            under_way[:] = [] if now.over else [now]
            scores.extend([now.score] if now.over else [])
            yield drawn(now, config)

    count = write_video(options.video, shown(), player.fps)
    words = [f"{count:,} pictures at {speed(options.video, player.fps):g} per second"]
    words += [f"scores {', '.join(f'{score:g}' for score in scores)}"] if scores else []
    if under_way:
        last = under_way[0]
        words.append(f"stopped by --max-frames in game {last.game + 1} at step {last.step:,}, score {last.score:g}")
    print(f"{options.video}: {', '.join(words)}")
    return 0


def drawn(shown: Shown, config: EnvConfig) -> np.ndarray:
    """A picture as a video shows it; that of an Atari game, whose own display differs from game to game, with its score
    and step."""
    from phalanx.config import AtariConfig
    from phalanx.runs.caption import captioned

    if not isinstance(config, AtariConfig):
        return shown.picture
    return captioned(shown.picture, f"SCORE {shown.score:.0f}  STEP {shown.step}")


def load_policy(options: GameOptions):  # type: ignore[no-untyped-def]
    """Environment, policy, device and counters of a run's checkpoint, by the options of `eval` and `play`."""
    from phalanx.agent import load_agent

    agent = load_agent(
        options.run,
        best=options.best,
        greedy=options.greedy,
        device=options.device,
        instead="--device cpu",
    )
    return agent.experiment.env, agent.policy(), agent.compute, agent.progress


def not_negative(value: int, name: str) -> int:
    require(0 <= value < 2**63, f"{name} is {value}, but must not be negative, and less than 2^63")
    return value


def positive(value: int, name: str) -> int:
    require(value > 0, f"{name} is {value}, but must be at least 1")
    return value
