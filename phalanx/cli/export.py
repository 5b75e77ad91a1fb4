"""`phalanx export`: a trained agent as a directory to give away: weights, configuration, a model card and a video.

The directory is that of a run which holds one checkpoint and nothing that only training needs, so `eval`, `play` and
`phalanx.load` take it. It is played before it is handed over: its card tells how the exported weights do.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.cli.play import GameOptions, drawn, load_policy, not_negative, positive
from phalanx.config.flags import parse_options
from phalanx.errors import EnvironmentFailed, RunError, UserError, require, tell

if TYPE_CHECKING:
    from phalanx.config import Experiment
    from phalanx.runs.checkpoint import Loaded

VIDEO = "replay.mp4"  # by this name the Hub finds it


@dataclass(frozen=True)
class ExportOptions:
    """Write a trained agent into a directory to give away: weights (safetensors), config.json, a model card for the
    Hugging Face Hub (README.md) and a video. Nothing is uploaded."""

    run: Path
    """Directory of the run."""
    out: Path
    """Directory to make."""
    games: int = 30
    """Games that are played for the score on the card."""
    newest: bool = False
    """The newest checkpoint instead of the one with the best score."""
    greedy: bool = False
    """Always the best action: no draw, and no random one of Q-learning."""
    seed: int = 0
    """Seed of the games."""
    device: str | None = None
    """cpu or cuda instead of the run's device."""
    max_frames: int = 5_000
    """Pictures of the video at most."""


def command(arguments: list[str]) -> int:
    options = parse_options(ExportOptions, "export", arguments)
    positive(options.games, "--games")
    not_negative(options.seed, "--seed")
    positive(options.max_frames, "--max-frames")
    from phalanx.config.code import refuse_own_files
    from phalanx.config.stored import existing_run, load
    from phalanx.runs.directory import run_checkpoints

    experiment = load(existing_run(options.run) / "config.json").validate(learns=False)
    refuse_own_files(experiment, options.run)
    taken = os.path.lexists(options.out)
    require(not taken, f"{options.out} exists already; choose another directory, or remove it")
    checkpoints = run_checkpoints(experiment, options.run, tell)
    loaded = checkpoints.load() if options.newest else checkpoints.load_best()
    unfinished = options.out.with_name(f".tmp-{os.getpid()}")
    try:
        result = _write(unfinished, experiment, loaded, options)
        unfinished.rename(options.out)
    except OSError as error:
        sentence = f"cannot write {options.out} ({error.strerror}); make room there, or choose another directory"
        raise RunError(sentence) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    print(f"{options.out}: mean score {result} in {options.games} games")
    drawn_too = (options.out / VIDEO).exists()
    print(f"next: phalanx {'play' if drawn_too else 'eval'} {shlex.quote(str(options.out))}", end="")
    print(" --video play.mp4" if drawn_too else "")
    return 0


def _write(place: Path, experiment: Experiment, loaded: Loaded, options: ExportOptions) -> str:
    """Everything that belongs to the export; the score on its card."""
    from phalanx.config.code import without_folders
    from phalanx.config.stored import load_origin, save
    from phalanx.registry import algorithm_name
    from phalanx.runs.card import Facts, card
    from phalanx.runs.checkpoint import FILES, Checkpoints
    from phalanx.sampling.evaluator import evaluate

    place.mkdir(parents=True)
    origin = load_origin(options.run / "config.json")
    run = dataclasses.replace(experiment.run, directory="runs", name="", loggers=())  # nobody else's business
    given_away = dataclasses.replace(experiment, run=run)
    save(given_away, place / "config.json", origin)
    written = Checkpoints(place / "checkpoints", 1).write(
        loaded.weights, for_playing(loaded.state), loaded.steps, loaded.score
    )
    how = GameOptions(place, greedy=options.greedy, device=options.device)
    config, policy, compute, progress = load_policy(how)
    scores = evaluate(config, policy, compute, options.games, options.seed, progress)
    versions = origin.get("versions") if isinstance(origin, dict) else None
    facts = Facts(
        algorithm=algorithm_name(experiment),
        topology=experiment.topology.name,
        preset=experiment.preset,
        environment=config.name,
        scores=scores,
        greedy=options.greedy,
        seed=options.seed,
        steps=loaded.steps,
        parameters=sum(tensor.numel() for tensor in loaded.weights.values()),
        weights=str((written / FILES[0]).relative_to(place)),
        video=_film(place / VIDEO, how, options),
        versions=versions if isinstance(versions, dict) else {},
    )
    (place / "README.md").write_text(card(facts))
    save(without_folders(given_away), place / "config.json", origin)  # from here on it is played elsewhere
    return facts.result


def for_playing(state: Any) -> dict[str, Any]:
    """Of a checkpoint's state, what playing needs."""
    nothing: dict[str, Any] = {"learner": {}, "experience": {}, "sampling": None}
    kept = {name: state[name] for name in ("clocks", "scores", "time_s")}
    return {**kept, "store": {}, "replicas": [nothing], "exported": True}


def _film(path: Path, how: GameOptions, options: ExportOptions) -> str | None:
    """A video of one game; None, and why, for an environment that draws nothing."""
    from phalanx.runs.video import write_video
    from phalanx.sampling.player import Player

    config, policy, compute, progress = load_policy(how)  # anew, since the generator of a policy has a course
    player = Player(config, policy, compute, options.seed, progress)
    pictures = (drawn(shown, config) for shown in itertools.islice(player.games(1), options.max_frames))
    try:
        write_video(path, pictures, player.fps)
    except (UserError, EnvironmentFailed) as error:
        tell(f"the export has no video: {error}")
        return None
    return path.name
