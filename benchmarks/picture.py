"""The moving picture of the README: a trained agent's game beside the learning curve of its run.

phalanx train pong --run.name pong
PYTHONPATH=. .venv/bin/python benchmarks/picture.py runs/pong docs/pictures/pong.gif
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from phalanx.cli.play import GameOptions, load_policy
from phalanx.runs.caption import captioned, drawn
from phalanx.runs.video import write_video
from phalanx.sampling.player import Player

SCALE = 2  # of the game and of letters
WIDTH, LEFT, RIGHT, TOP, BOTTOM = 440, 44, 16, 40, 40  # of the curve's panel, and its margins, in pixels
LINE, GRID, INK = (90, 200, 140), (60, 60, 60), (200, 200, 200)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=Path, help="directory of a run on an Atari game")
    parser.add_argument("picture", type=Path, help="file to write, .gif or .mp4")
    parser.add_argument("--frames", type=int, default=420, help="pictures at most")
    parser.add_argument("--skip", type=int, default=0, help="steps of the game left out at its start")
    parser.add_argument("--seed", type=int, default=0, help="seed of the game")
    options = parser.parse_args()
    config, policy, compute, progress = load_policy(GameOptions(options.run))
    player = Player(config, policy, compute, options.seed, progress)
    records = [json.loads(line) for line in (options.run / "metrics.jsonl").read_text().splitlines()]
    points = [(record["steps"], record["score"]) for record in records if record["score"] is not None]

    def pictures() -> Iterator[np.ndarray]:
        panel = None
        for now in islice(player.games(1), options.skip, options.skip + options.frames):
            game = captioned(now.picture, f"SCORE {now.score:.0f}  STEP {now.step}")
            game = game.repeat(SCALE, 0).repeat(SCALE, 1)
            panel = curve(points, game.shape[0]) if panel is None else panel
            yield np.concatenate([game, panel], axis=1)

    count = write_video(options.picture, pictures(), player.fps)
    print(f"{options.picture}: {count} pictures, {options.picture.stat().st_size / 1e6:.2f} MB")


def curve(points: list[tuple[int, float]], height: int) -> np.ndarray:
    """A panel with the mean score over the steps of a run."""
    panel = np.zeros((height, WIDTH, 3), np.uint8)
    steps, scores = (np.array(values, float) for values in zip(*points, strict=True))
    low, high = np.floor(scores.min()), np.ceil(max(scores.max(), scores.min() + 1))
    x = LEFT + steps / steps[-1] * (WIDTH - LEFT - RIGHT)
    y = height - BOTTOM - (scores - low) / (high - low) * (height - TOP - BOTTOM)
    for value in (low, 0.0, high):
        if low <= value <= high:
            row = round(height - BOTTOM - (value - low) / (high - low) * (height - TOP - BOTTOM))
            panel[row, LEFT : WIDTH - RIGHT] = GRID
            write(panel, f"{value:.0f}", row - 5, 4)
    columns = np.arange(round(x[0]), round(x[-1]) + 1)
    rows = np.interp(columns, x, y)
    for column, before, after in zip(columns[1:], rows[:-1], rows[1:], strict=True):
        first, last = sorted((round(before), round(after)))
        panel[first - 1 : last + 2, column - 1 : column + 1] = LINE
    write(panel, "SCORE", 12, LEFT)
    write(panel, f"{steps[-1]:.0f} STEPS", height - BOTTOM + 14, WIDTH - RIGHT - 8 * len(f"{steps[-1]:.0f} STEPS"))
    return panel


def write(panel: np.ndarray, text: str, row: int, column: int) -> None:
    letters = drawn(text).repeat(SCALE, 0).repeat(SCALE, 1)
    height, width = letters.shape
    area = panel[row : row + height, column : column + width]
    area[letters[: area.shape[0], : area.shape[1]] > 0] = INK


if __name__ == "__main__":
    main()
