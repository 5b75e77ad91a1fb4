"""Atari 2600 games, straight on the emulator: the hot path of a worker process.

A step holds an action for `skip` frames, copies the raw screen after each of them and turns the last two into one
frame (see `screen`). A reset restores a saved emulator state, which costs a hundredth of a real reset: `StartStates`
makes them once per process, alike in every process, and an environment draws from them with its own generator.
The emulator's random generator is used by real resets only; sticky actions are drawn here, since a saved emulator
state does not hold the action that would be repeated.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ale_py import Action, ALEInterface, ALEState, LoggerMode, roms

from phalanx.config import AtariConfig
from phalanx.envs.rewards import REWARDS
from phalanx.envs.screen import AreaScreen, HalfScreen, Palette, RawScreen, palette
from phalanx.errors import RunError, UserError, unknown
from phalanx.types import EnvSpec, Outcome

BOOTS = 16  # real resets in the pool of start states; they differ in a timer's seed and in what the game before left
PLAYED = 30, 120  # frames played before each of them: at least, and fewer than


class Start(NamedTuple):
    """A point from which an episode can begin. The emulator does not keep the screen in its state."""

    state: ALEState
    screen: np.ndarray


class StartStates:
    """Emulator states after a real reset and so many frames without action, made when first asked for, or before."""

    def __init__(self, game: str) -> None:
        self._ale = emulator(game)
        self._lock = threading.RLock()
        self._starts: dict[tuple[int, int], Start] = {}
        self._screens: dict[bytes, np.ndarray] = {}
        # All boots first: the frames acted later would move the emulator's generator.
        generator = np.random.default_rng(0)  # the same games in every process
        for boot in range(BOOTS):
            self._play(generator)
            self._ale.reset_game()
            self._starts[boot, 0] = self._here()
        self.palette = _checked_palette(self._ale, game)

    def get(self, boot: int, noops: int) -> Start:
        """The start after `noops` frames; should the game end on the way, the rest is taken from the next boot."""
        with self._lock:
            if (boot, noops) not in self._starts:
                self._starts[boot, noops] = self._make(boot, noops)
            return self._starts[boot, noops]

    def fill(self, noops: int) -> None:
        """Make all with up to so many frames, in about a tenth of a second, so that no step ever waits for one."""
        for boot in range(BOOTS):
            self.get(boot, noops)

    def _play(self, generator: np.random.Generator) -> None:
        """Random actions for some frames: an ordinary reset leaves some memory as the game before it left it."""
        actions = self._ale.getMinimalActionSet()
        for index in generator.integers(len(actions), size=generator.integers(*PLAYED)).tolist():
            self._ale.act(actions[index])

    def _make(self, boot: int, noops: int) -> Start:
        """Go on from the nearest start before; those on the way are kept as well."""
        known = max(frames for frames in range(noops) if (boot, frames) in self._starts)
        self._ale.restoreState(self._starts[boot, known].state)
        for done in range(known + 1, noops + 1):
            self._ale.act(Action.NOOP)
            if self._ale.game_over():
                return self.get((boot + 1) % BOOTS, noops - done)
            self._starts[boot, done] = self._here()
        return self._starts[boot, noops]

    def _here(self) -> Start:
        screen = self._ale.getScreen()
        return Start(self._ale.cloneState(), self._screens.setdefault(screen.tobytes(), screen))


@functools.cache
def start_states(game: str) -> StartStates:
    """The start states of a game, one set per process."""
    return StartStates(game)


def emulator(game: str) -> ALEInterface:
    """A new emulator with the game loaded, to be reset or restored; its random generator is the same each time."""
    path = _rom_path(game)
    ALEInterface.setLoggerMode(LoggerMode.Error)
    if ALEInterface.isSupportedROM(path) is None:  # loading it would end the process
        raise UserError(f"the emulator has no one-player mode for the game '{game}'; choose another game")
    ale = ALEInterface()
    ale.setInt("random_seed", 0)
    ale.setFloat("repeat_action_probability", 0.0)
    ale.loadROM(path)
    ale.act(Action.NOOP)  # one that never acted goes on a frame off from a restored state of Q*bert or Tetris
    return ale


def _rom_path(game: str) -> Path:
    known = roms.get_all_rom_ids()
    if game not in known:
        raise unknown("game", game, known)
    try:
        path = roms.get_rom_path(game)
    except OSError as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"the ROM of '{game}' cannot be used ({reason}); reinstall ale-py or correct ALE_ROMS_DIR"
        ) from None
    assert path is not None
    return path


def _checked_palette(ale: ALEInterface, game: str) -> Palette:
    """The palette of the game, compared with what the emulator shows right now."""
    screen = ale.getScreen()
    colors = palette(len(screen))
    if not (
        np.array_equal(colors.grey[screen], ale.getScreenGrayscale())
        and (colors.rgb[screen] == ale.getScreenRGB()).all()
    ):
        raise RunError(f"the emulator shows '{game}' in colours phalanx does not know; use ale-py 0.12")
    return colors


def _make_screen(config: AtariConfig, rows: int) -> HalfScreen | AreaScreen:
    depth = 2 if config.max_pool else 1
    if config.frame == "84x84":
        return AreaScreen(rows, depth, rgb=config.color == "rgb")
    if rows != 210:
        raise UserError(f"env.frame 104x80 needs a screen of 210 rows, but {config.game} has {rows}; use 84x84")
    if config.color == "rgb":
        raise UserError("env.color rgb needs env.frame 84x84")
    return HalfScreen(depth)


class AtariEnv:
    """One game. With `starts` (serialised emulator states) episodes begin one frame after one of them. A `raw` one
    publishes the emulator's screens instead of frames."""

    def __init__(
        self,
        config: AtariConfig,
        seed: np.random.SeedSequence,
        starts: Sequence[bytes] | None = None,
        raw: bool = False,
    ) -> None:
        self._config = config
        self._rng = np.random.default_rng(seed)
        self._pool = start_states(config.game)
        self._ale = emulator(config.game)
        self._act, self._get_screen = self._ale.act, self._ale.getScreen  # looked up once: they are called all the time
        self._game_over, self._get_lives = self._ale.game_over, self._ale.lives
        rows, depth = self._ale.getScreenDims()[0], 2 if config.max_pool else 1
        ready = _make_screen(config, rows)
        self._screen = RawScreen(rows, depth) if raw else ready
        self._buffers = (self._screen.screens[0], self._screen.screens[-1])  # frames alternate between them
        self._write = self._screen.write
        minimal = self._ale.getMinimalActionSet()
        self._actions = self._ale.getLegalActionSet() if config.full_actions else minimal
        start = [Action.NOOP, *(known for known in (Action.FIRE, Action.UP) if known in minimal)]
        self._presses = start if config.fire_on_reset and Action.FIRE in minimal else []
        self._skip_min, self._skip, self._max_steps = config.skip_min, config.skip, config.max_steps
        self._episodic, self._sticky = config.episodic_life, config.sticky
        self._watches_lives = config.episodic_life or bool(self._presses)
        self._plain = not (config.sticky or config.skip_min < config.skip)  # every step one action, for as many frames
        self._shape_reward = REWARDS[config.reward]
        self._quiet = Outcome(self._shape_reward(0.0), math.nan, False, False)  # as most steps
        self._given = None if starts is None else self._given_starts(starts)
        if self._given is None:
            self._pool.fill(config.noop_max)
        self._lives = self._score = self._steps = 0
        self._last_action = Action.NOOP
        self._goes_on = False  # the next reset follows a lost life and continues the game
        self._kept: np.ndarray | None = None  # the screens it will show
        self._shown: np.ndarray | None = None  # the screen of a restored state, which the emulator does not keep
        self._next = self._draw_start()
        skip = (config.skip_min + config.skip) // 2
        spec = EnvSpec(ready.shape, np.dtype(np.uint8), len(self._actions), skip)
        self.spec = replace(spec, frame_shape=self._screen.shape, decoded=spec) if raw else spec

    def reset(self, frame: np.ndarray) -> None:
        """Begin a game, or go on with it after a lost life, and write the frame."""
        if self._goes_on:
            assert self._kept is not None
            np.copyto(self._screen.screens, self._kept)
        else:
            self._begin_game()
        self._goes_on, self._kept = False, None
        self._screen.write(frame)

    def step(self, action: int, frame: np.ndarray) -> Outcome:
        """Hold the action for some frames and write what is to be seen."""
        if self._plain and not (self._watches_lives and self._lives):
            reward, life_lost = self._hold_plainly(self._actions[action]), False
        else:
            reward, life_lost = self._hold_attentively(self._actions[action])
        over = self._game_over()
        if life_lost and not self._episodic:
            reward += self._press_start()
            over = self._game_over()
        self._write(frame)
        self._steps += 1
        late = self._steps == self._max_steps
        if not (reward or over or late or life_lost):
            return self._quiet
        self._score += reward
        terminated = over or (life_lost and self._episodic)
        if terminated and not (over or late):
            over = self._go_on()
        ended = over or late
        score = float(self._score) if ended else math.nan
        return Outcome(self._shape_reward(float(reward)), score, terminated, ended and not terminated)

    def new_screen(self) -> HalfScreen | AreaScreen:
        """What makes frames of screens that come from elsewhere."""
        return _make_screen(self._config, self._ale.getScreenDims()[0])

    def prepare(self) -> None:
        """Nothing: the states games begin at were made before the first one."""

    def render(self) -> np.ndarray:
        picture: np.ndarray = self._ale.getScreenRGB() if self._shown is None else self._pool.palette.rgb[self._shown]
        return picture

    def state(self) -> dict[str, Any]:
        return {
            "emulator": self._ale.cloneState().serialize(),
            "generator": self._rng.bit_generator.state,
            "kept": self._kept,
            "shown": self._ale.getScreen() if self._shown is None else self._shown,
            "lives": self._lives,
            "score": self._score,
            "steps": self._steps,
            "last_action": self._last_action.value,
            "goes_on": self._goes_on,
            "next": list(self._next),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._ale.restoreState(ALEState(state["emulator"]))
        self._rng.bit_generator.state = state["generator"]
        self._kept, self._shown, self._lives = state["kept"], state["shown"], state["lives"]
        self._score, self._steps = state["score"], state["steps"]
        self._last_action = Action(state["last_action"])
        self._goes_on = state["goes_on"]
        self._next = tuple(state["next"])

    def close(self) -> None:
        """Nothing to give back: the emulator goes with the object."""

    def _hold_plainly(self, action: Action) -> int:
        """Act for all frames of a step: the raw reward. What is to be seen are the last two frames. A game that is over
        stands still, so that its end need not be looked for; nor need lives where there are none left to lose."""
        act, (first, last) = self._act, self._buffers
        self._shown, self._last_action = None, action
        reward = 0
        for _ in range(self._skip - 2):
            reward += act(action)
        if self._skip > 1:
            reward += act(action)
            self._get_screen(first)
        reward += act(action)
        self._get_screen(last)
        if self._skip == 1:
            np.copyto(first, last)
        if self._watches_lives:
            self._lives = self._get_lives()
        return reward

    def _hold_attentively(self, action: Action) -> tuple[int, bool]:
        """The same where the number of frames varies, actions stick or a life may be lost, and whether one was. If that
        ends the episode, the last frame alone is to be seen."""
        frames = self._skip
        if self._skip_min < frames:
            frames = int(self._rng.integers(self._skip_min, frames + 1))
        actions = self._stick(action, frames) if self._sticky else (action,) * frames
        act, get_lives, buffers = self._act, self._get_lives, self._buffers
        reward, index, life_lost, before, shown = 0, 0, False, self._lives, frames - 2
        for index, held in enumerate(actions):
            reward += act(held)
            if index >= shown:
                self._get_screen(buffers[index & 1])
            if (lives := get_lives()) != before:
                life_lost = life_lost or 0 < lives < before
                before = lives
                if life_lost and self._episodic:
                    break
        if index < shown:
            self._get_screen(buffers[index & 1])
        if index <= max(shown, 0):  # the other buffer holds a frame of an earlier step
            np.copyto(buffers[~index & 1], buffers[index & 1])
        self._shown, self._lives, self._last_action = None, before, actions[index]
        return reward, life_lost

    def _stick(self, action: Action, frames: int) -> list[Action]:
        """What the emulator gets in each frame: with probability `sticky` what it got in the frame before."""
        actions, last = [], self._last_action
        for repeat in self._rng.random(frames) < self._sticky:
            last = last if repeat else action
            actions.append(last)
        return actions

    def _go_on(self) -> bool:
        """Press what the next life begins with, after the frame of the lost one was written, and keep what is then to
        be seen. Whether the game ended on the way is known in time for its score to be told."""
        self._score += self._press_start()
        over: bool = self._game_over()
        if not over:
            self._goes_on, self._kept = True, self._screen.screens.copy()
        return over

    def _begin_game(self) -> None:
        over = True
        while over:  # pressing FIRE could end a game in theory
            start = self._pool.get(*self._next) if self._given is None else self._given[self._next[0]]
            self._next = self._draw_start()
            self._ale.restoreState(start.state)
            self._shown = start.screen
            for buffer in self._buffers:
                np.copyto(buffer, start.screen)
            self._score = self._steps = 0
            self._lives = self._get_lives()
            self._last_action = Action.NOOP
            self._score = self._press_start()
            over = self._game_over()

    def _press_start(self) -> int:
        """NOOP, FIRE and UP for a frame each, where wanted and known to the game (as accel_rl does); the raw reward."""
        reward = 0
        for action in self._presses:
            if not self._game_over():
                reward += self._act(action)
                self._last_action, self._shown = action, None
        if self._presses:
            self._lives = self._get_lives()
            for buffer in self._buffers:
                self._get_screen(buffer)
        return reward

    def _draw_start(self) -> tuple[int, int]:
        """Boot and number of frames without action of the next game, or the index among the given starts."""
        if self._given is not None:
            return int(self._rng.integers(len(self._given))), 0
        noops = self._rng.integers(self._config.noop_min, self._config.noop_max + 1)
        return int(self._rng.integers(BOOTS)), int(noops)

    def _given_starts(self, starts: Sequence[bytes]) -> list[Start]:
        """The states one frame later, since a saved state has no screen."""
        if not starts:
            raise UserError("the list of start states is empty; give at least one, or none for ordinary starts")
        given = []
        for number, state in enumerate(starts):
            try:
                self._ale.restoreState(ALEState(state))
            except SystemError:
                raise UserError(
                    f"start state {number} is not one of {self._config.game} on this version of ale-py"
                ) from None
            self._ale.act(Action.NOOP)
            given.append(Start(self._ale.cloneState(), self._ale.getScreen()))
        return given
