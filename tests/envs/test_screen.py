"""Frames of Atari games: against the emulator, cv2, Gymnasium and a plain frame-by-frame emulator."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from ale_py import Action, ALEInterface, ALEState

from phalanx.config import AtariConfig
from phalanx.envs import frames as plain
from phalanx.envs.atari import AtariEnv, emulator
from phalanx.envs.frames import AreaResize, compiled
from phalanx.envs.screen import FRAMES, palette
from phalanx.errors import UserError


def make(seed: int = 0, starts: list[bytes] | None = None, **fields: Any) -> AtariEnv:
    return AtariEnv(AtariConfig(**fields), np.random.SeedSequence(seed), starts)


def frame_of(env: AtariEnv) -> np.ndarray:
    return np.zeros(env.spec.frame_shape, np.uint8)


def means_of_fours(image: np.ndarray) -> np.ndarray:
    sums: np.ndarray = image.reshape(len(image) // 2, 2, -1, 2).sum((1, 3), dtype=np.int64)
    return (sums + 2) >> 2


def put_at_state_of(env: AtariEnv, twin: ALEInterface) -> None:
    twin.restoreState(ALEState(env.state()["emulator"]))


@pytest.mark.parametrize(
    "games", [("journey_escape", "enduro", "seaquest", "space_invaders"), ("laser_gates", "air_raid", "sir_lancelot")]
)
def test_palette_is_what_the_emulator_shows(games: tuple[str, ...]) -> None:
    """Random memory makes games show nearly all colours there are."""
    seen: set[int] = set()
    for game in games:
        ale, rng = emulator(game), np.random.default_rng(0)
        ale.reset_game()
        boot, colors = ale.cloneState(), palette(ale.getScreenDims()[0])
        for round_ in range(250):
            if round_ % 5 == 0:
                ale.restoreState(boot)
            for address in rng.integers(0, 128, rng.integers(0, 20)):
                ale.setRAM(int(address), int(rng.integers(256)))
            ale.act(Action(int(rng.integers(18))))
            screen = ale.getScreen()
            assert np.array_equal(colors.grey[screen], ale.getScreenGrayscale())
            assert np.array_equal(colors.rgb[screen], ale.getScreenRGB())
            seen.update(np.unique(screen).tolist())
    assert sum(index % 2 == 0 for index in seen) >= 120


@pytest.mark.parametrize("game", ["pong", "breakout", "space_invaders"])
@pytest.mark.parametrize("life_loss", [False, True])
def test_steps_equal_those_of_gymnasium(game: str, life_loss: bool) -> None:
    gymnasium, _ = pytest.importorskip("gymnasium"), pytest.importorskip("cv2")
    name = "ALE/" + "".join(word.title() for word in game.split("_")) + "-v5"
    raw = gymnasium.make(name, frameskip=1, repeat_action_probability=0.0, full_action_space=False)
    wrapper = gymnasium.wrappers.AtariPreprocessing
    theirs = wrapper(raw, noop_max=0, frame_skip=4, terminal_on_life_loss=life_loss)
    theirs.reset(seed=1)
    start = theirs.ale.cloneState().serialize()
    theirs.ale.act(0)  # given starts begin one frame later
    env = make(game=game, reward="raw", episodic_life=life_loss, starts=[start], max_steps=0)
    frame, resize, rng = frame_of(env), AreaResize(210), np.random.default_rng(2)
    env.reset(frame)
    over, ends = False, 0
    while not over:
        action = int(rng.integers(env.spec.actions))
        their_frame, reward, terminated, _, _ = theirs.step(action)
        outcome = env.step(action, frame)
        over = theirs.ale.game_over()
        assert (outcome.reward, outcome.terminated, outcome.truncated) == (reward, terminated, False)
        assert math.isnan(outcome.score) != over
        ends += terminated
        if not terminated:  # at an end Gymnasium shows an older frame
            pooled = theirs.obs_buffer[0]
            assert np.array_equal(palette(210).grey[env._screen.screens].max(0), pooled)
            resized, tie = resize(pooled), resize.sums(pooled) % resize.scale == resize.scale / 2
            assert np.array_equal(frame[0], resized)
            assert np.array_equal(resized[~tie], their_frame[~tie])  # cv2 rounds exact ties as it pleases
        elif not over:
            env.reset(frame)
    assert ends == (1 if game == "pong" or not life_loss else {"breakout": 5, "space_invaders": 3}[game])


@pytest.mark.parametrize(("shape", "max_pool"), [("104x80", True), ("84x84", True), ("104x80", False)])
def test_frames_are_the_last_ones_executed_also_at_ends(shape: str, max_pool: bool) -> None:
    """Against a plain emulator, frame by frame; some steps end after each number of frames."""
    executed: Counter[int] = Counter()
    grey, resize = palette(210).grey, AreaResize(210)
    env = make(game="breakout", frame=shape, max_pool=max_pool, episodic_life=True, seed=3)
    frame, rng = frame_of(env), np.random.default_rng(0)
    env.reset(frame)
    twin, lives = emulator("breakout"), 5
    put_at_state_of(env, twin)
    while sum(executed.values()) < 600:
        action = int(rng.integers(env.spec.actions))
        screens = []
        for _ in range(4):
            twin.act(env._actions[action])
            screens.append(twin.getScreen())
            if twin.game_over() or twin.lives() < lives:
                break
        lives = twin.lives()
        outcome = env.step(action, frame)
        seen = screens[-2:] if max_pool and len(screens) == 4 else screens[-1:]  # after an early end the last one alone
        last = grey[np.stack(seen)].max(0)
        small = means_of_fours(last[1:209]) if shape == "104x80" else resize(last)
        assert np.array_equal(frame[0], small)
        assert np.array_equal(env.render(), palette(210).rgb[screens[-1]])
        if outcome.terminated:
            executed[len(screens)] += 1
            env.reset(frame)
            if twin.game_over():
                lives = 5
                put_at_state_of(env, twin)
        else:
            assert len(screens) == 4
            executed[0] += 1
    assert executed[1] and executed[2] + executed[3]


def thin_objects(image: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Objects one pixel wide, numbered from 1: runs of pixels down a column that visibly differ from what is on their
    left and on their right. And the image without them."""
    signed = image.astype(int)
    left, right = np.roll(signed, 1, 1), np.roll(signed, -1, 1)
    thin = (np.abs(signed - left) >= 4) & (np.abs(signed - right) >= 4)
    thin[:, [0, -1]] = False
    begins = thin & ~np.vstack([np.zeros_like(thin[:1]), thin[:-1]])
    numbers = np.cumsum(begins.T).reshape(thin.T.shape).T * thin
    return numbers, np.where(thin, left, signed).astype(np.uint8)


def half_frame(image: np.ndarray) -> np.ndarray:
    """The frame of a screen that shows this image."""
    screen, frame = np.zeros((210, 160), np.uint8), np.zeros((1, 104, 80), np.uint8)
    screen[1:209] = image
    FRAMES.half_frame(screen, screen, bytes(range(256)), frame)
    return frame[0]


def count_seen(image: np.ndarray, numbers: np.ndarray, without: np.ndarray) -> tuple[int, int]:
    """How many objects there are, and of how many a pixel changes the frame. One pixel of each 2x2 is taken away at a
    time, so that none hides what another does."""
    frame, seen = half_frame(image), np.zeros(numbers.shape, bool)
    for row, column in np.ndindex(2, 2):
        changed = image.copy()
        changed[row::2, column::2] = without[row::2, column::2]
        seen[row::2, column::2] = half_frame(changed) != frame
    return int(numbers.max()), len(np.unique(numbers[seen & (numbers > 0)]))


@pytest.mark.parametrize(
    "game", ["space_invaders", "demon_attack", "centipede", "star_gunner", "chopper_command", "seaquest"]
)
def test_104x80_frames_show_whatever_is_one_pixel_wide_or_high(game: str) -> None:
    env = AtariEnv(AtariConfig(game), np.random.SeedSequence(1), raw=True)
    screens, rng = frame_of(env), np.random.default_rng(1)
    env.reset(screens)
    there, seen = np.zeros(2, int), np.zeros(2, int)
    for step in range(240):
        outcome = env.step(1 if step % 3 else int(rng.integers(env.spec.actions)), screens)  # mostly FIRE
        if outcome.terminated or outcome.truncated:
            env.reset(screens)
        image = palette(210).grey[screens].max(0)[1:209]
        numbers, without = thin_objects(image)
        counts = [count_seen(image, numbers, without)]
        numbers, without = thin_objects(image.T)
        counts.append(count_seen(image, numbers.T, without.T))
        there, seen = there + [count for count, _ in counts], seen + [shown for _, shown in counts]
    assert there.sum() >= 100
    assert seen.tolist() == there.tolist()


def test_rgb_frame_is_the_resized_screen() -> None:
    env = make(game="seaquest", color="rgb", max_pool=False)
    frame, resize = frame_of(env), AreaResize(210)
    env.reset(frame)
    for action in range(10):
        env.step(action, frame)
        for channel in range(3):
            assert np.array_equal(frame[channel], resize(env.render()[:, :, channel]))


@pytest.mark.skipif(not compiled(), reason="there was no C compiler")
@pytest.mark.parametrize(
    "fields",
    [{}, {"frame": "104x80"}, {"color": "rgb", "max_pool": False}, {"raw": True}, {"raw": True, "frame": "104x80"}],
)
def test_games_look_alike_with_and_without_compiled_code(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def play() -> list[np.ndarray]:
        env = AtariEnv(AtariConfig(game="seaquest", **settings), np.random.SeedSequence(3), raw=raw)
        frame, frames = frame_of(env), []
        env.reset(frame)
        for step in range(60):
            env.step(step * 7 % env.spec.actions, frame)
            frames.append(frame.copy())
        return frames

    settings = dict(fields)
    raw = settings.pop("raw", False)
    ours = play()
    monkeypatch.setattr("phalanx.envs.screen.FRAMES", plain)
    assert np.array_equal(ours, play())


def test_tall_screens_give_84x84_and_refuse_104x80() -> None:
    env = make(game="air_raid")
    frame = frame_of(env)
    env.reset(frame)
    env.step(0, frame)
    assert frame.shape == (1, 84, 84) and frame.max() > 0
    with pytest.raises(UserError, match="250"):
        make(game="air_raid", frame="104x80")
