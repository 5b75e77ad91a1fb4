"""`phalanx eval` and `phalanx play`: whole games of a trained agent, scored or recorded."""

from __future__ import annotations

import argparse
from pathlib import Path

from phalanx.cli.directories import existing_run
from phalanx.errors import require, tell


def evaluate_command(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="phalanx eval", description="Play whole games and report raw scores.")
    add_options_of_play(parser, games=30)
    options = parser.parse_args(arguments)
    import statistics

    from phalanx.sampling.evaluator import evaluate

    games, seed = positive(options.games, "--games"), not_negative(options.seed, "--seed")
    config, policy, compute, progress = load_policy(options)
    scores = evaluate(config, policy, compute, games, seed, progress)
    spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
    print(
        f"{len(scores)} games of {config.name}: mean {statistics.mean(scores):.2f}, deviation {spread:.2f}, "
        f"min {min(scores):g}, max {max(scores):g} (raw scores, whole games, "
        f"{'greedy' if options.greedy else 'drawn'} actions, {progress.steps:,} steps of training)"
    )
    return 0


def play(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="phalanx play", description="Record games.")
    add_options_of_play(parser, games=1)
    parser.add_argument("--video", type=Path, required=True, help="file to write, .mp4 or .gif")
    parser.add_argument("--max-frames", type=int, default=20_000, help="pictures recorded at most")
    options = parser.parse_args(arguments)
    from phalanx.runs.video import check_format, check_place, write_video
    from phalanx.sampling.evaluator import evaluate

    check_format(options.video)
    games, seed = positive(options.games, "--games"), not_negative(options.seed, "--seed")
    config, policy, compute, progress = load_policy(options)
    check_place(options.video)
    pictures: list[object] = []

    def watch(picture: object) -> None:
        if len(pictures) < options.max_frames:
            pictures.append(picture)

    scores = evaluate(config, policy, compute, games, seed, progress, environments=1, watch=watch)
    write_video(options.video, pictures, fps=15)  # type: ignore[arg-type]
    print(f"{options.video}: {len(pictures)} pictures, scores {', '.join(f'{score:g}' for score in scores)}")
    return 0


def add_options_of_play(parser: argparse.ArgumentParser, games: int) -> None:
    """What `eval` and `play` both want to know."""
    parser.add_argument("run", type=Path, help="directory of the run")
    parser.add_argument("--games", type=int, default=games, help="games to play")
    parser.add_argument(
        "--greedy", action="store_true", help="always the best action: no draw, and no random one of Q-learning"
    )
    parser.add_argument("--best", action="store_true", help="the checkpoint with the best score instead of the newest")
    parser.add_argument("--seed", type=int, default=0, help="seed of the games")
    parser.add_argument("--device", help="cpu or cuda instead of the run's device")


def load_policy(options: argparse.Namespace):  # type: ignore[no-untyped-def]
    """Environment, policy, device and counters of a run's checkpoint, by the options of `eval` and `play`."""
    import dataclasses

    from phalanx.config.stored import load
    from phalanx.parameters.flat import FlatParameters
    from phalanx.registry import MakeEnv, make_evaluation_policy, make_network
    from phalanx.runs.directory import run_checkpoints
    from phalanx.runtime.device import choose_compute
    from phalanx.types import Progress

    experiment = load(existing_run(options.run) / "config.json").validate()
    checkpoints = run_checkpoints(experiment, options.run, tell)
    loaded = checkpoints.load_best() if options.best else checkpoints.load()
    device = options.device or experiment.run.device
    compute = choose_compute(dataclasses.replace(experiment.run, device=device), "--device cpu")
    spec = MakeEnv(experiment.env, 0)(0).spec
    model = make_network(experiment, spec).to(compute.device)
    FlatParameters(model).load(loaded.weights)
    policy = make_evaluation_policy(experiment, model, compute, options.greedy)
    return experiment.env, policy, compute, Progress(**loaded.state["clocks"])


def not_negative(value: int, name: str) -> int:
    require(0 <= value < 2**63, f"{name} is {value}, but must not be negative, and less than 2^63")
    return value


def positive(value: int, name: str) -> int:
    require(value > 0, f"{name} is {value}, but must be at least 1")
    return value
