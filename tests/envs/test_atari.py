"""Atari: starts, actions, lives, limits, exact resumption. Frames are checked in test_screen."""

from __future__ import annotations

import dataclasses
import functools
import math
import subprocess
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
from ale_py import Action, ALEInterface, ALEState, roms

from phalanx.config import AtariConfig
from phalanx.config.presets import PAPER_SETTINGS
from phalanx.envs.atari import BOOTS, AtariEnv, StartStates, emulator, start_states
from phalanx.errors import UserError
from phalanx.types import Outcome


def make(seed: int = 0, starts: list[bytes] | None = None, **fields: Any) -> AtariEnv:
    return AtariEnv(AtariConfig(**fields), np.random.SeedSequence(seed), starts)


def frame_of(env: AtariEnv) -> np.ndarray:
    return np.zeros(env.spec.frame_shape, np.uint8)


@functools.cache
def probe(game: str) -> ALEInterface:
    return emulator(game)


def at_state_of(env: AtariEnv) -> ALEInterface:
    """Another emulator at the same point of the game."""
    twin = probe(env._config.game)
    twin.restoreState(ALEState(env.state()["emulator"]))
    return twin


class Recorder:
    """An emulator that notes the actions it gets."""

    def __init__(self, ale: ALEInterface) -> None:
        self.ale, self.actions = ale, []

    def act(self, action: Action) -> int:
        self.actions.append(action)
        return self.ale.act(action)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ale, name)


def record(env: AtariEnv) -> list[Action]:
    recorder = Recorder(env._ale)
    env._ale, env._act = recorder, recorder.act
    return recorder.actions


# Starts


def test_number_of_frames_without_action_is_uniform() -> None:
    env = make(game="pong", noop_max=30)
    frame, boots, noops = frame_of(env), Counter(), Counter()
    for _ in range(3100):
        boot, count = env.state()["next"]
        boots[boot] += 1
        noops[count] += 1
        env.reset(frame)
    assert set(boots) == set(range(BOOTS)) and set(noops) == set(range(31))
    assert sum((count - 100) ** 2 / 100 for count in noops.values()) < 60
    expected = 3100 / BOOTS
    assert sum((count - expected) ** 2 / expected for count in boots.values()) < 40


@pytest.mark.parametrize("game", ["breakout", "seaquest", "freeway"])
@pytest.mark.parametrize("noops", [0, 1, 30])
def test_start_states_are_those_of_ordinary_resets(game: str, noops: int) -> None:
    """Memory and screen after a start from the pool are those after a real reset, and the other way round."""
    twin, pool, ordinary = probe(game), set(), set()
    for boot in range(BOOTS):
        start = start_states(game).get(boot, noops)
        twin.restoreState(start.state)
        pool.add((twin.getRAM().tobytes(), start.screen.tobytes()))
    ale = ALEInterface()
    ale.setInt("random_seed", 1 + noops)
    ale.setFloat("repeat_action_probability", 0.25)
    ale.loadROM(roms.get_rom_path(game))
    for played in range(30):
        ale.reset_game()
        for _ in range(noops):
            ale.act(Action.NOOP)
        ordinary.add((ale.getRAM().tobytes(), ale.getScreen().tobytes()))
        for _ in range(played):
            ale.act(Action(played % 18))
    assert pool == ordinary


@pytest.mark.parametrize("game", ["yars_revenge", "haunted_house", "hangman", "crossbow", "pong"])
def test_there_are_about_as_many_starts_as_after_ordinary_resets(game: str) -> None:
    """What a game leaves in memory is part of how the next one begins."""
    ale, rng, ordinary = emulator(game), np.random.default_rng(1), set()
    actions = ale.getMinimalActionSet()
    for _ in range(BOOTS):
        for index in rng.integers(len(actions), size=150):
            ale.act(actions[index])
        ale.reset_game()
        ordinary.add((ale.getRAM().tobytes(), ale.getScreen().tobytes()))
    pool = set()
    for boot in range(BOOTS):
        start = start_states(game).get(boot, 0)
        ale.restoreState(start.state)
        pool.add((ale.getRAM().tobytes(), start.screen.tobytes()))
    assert len(pool) >= 0.75 * len(ordinary)


def test_a_start_does_not_depend_on_what_was_asked_before() -> None:
    one, other = StartStates("pong"), StartStates("pong")
    other.get(5, 9)
    other.get(0, 30)
    for key in [(0, 3), (7, 30), (15, 0)]:
        assert one.get(*key).state.serialize() == other.get(*key).state.serialize()


def test_given_starts_are_all_used() -> None:
    ale = emulator("breakout")
    ale.reset_game()
    states, memories = [], []
    for _ in range(3):
        for _ in range(40):
            ale.act(Action.FIRE)
        states.append(ale.cloneState().serialize())
        ale.act(Action.NOOP)
        memories.append(ale.getRAM().tobytes())
        ale.restoreState(ALEState(states[-1]))
    env = make(game="breakout", starts=states)
    frame, drawn = frame_of(env), Counter()
    for _ in range(60):
        env.prepare()
        env.reset(frame)
        drawn[memories.index(at_state_of(env).getRAM().tobytes())] += 1
    assert min(drawn[k] for k in range(3)) >= 10
    for bad, word in [([], "empty"), ([b"nonsense"], "start state 0"), ([states[0][:-9]], "start state 0")]:
        with pytest.raises(UserError, match=word):
            make(game="breakout", starts=bad)
    with pytest.raises(UserError, match="start state 0"):
        make(game="pong", starts=states[:1])


# Actions, lives, limits


@pytest.mark.parametrize(
    ("game", "presses"), [("breakout", ["FIRE"]), ("alien", ["FIRE", "UP"]), ("freeway", []), ("ms_pacman", [])]
)
def test_fire_and_up_are_pressed_where_they_exist(game: str, presses: list[str]) -> None:
    env = make(game=game, fire_on_reset=True)
    actions = record(env)
    env.reset(frame_of(env))
    assert actions == [getattr(Action, press) for press in (["NOOP", *presses] if presses else [])]


def test_what_the_presses_after_a_lost_life_score_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    env = make(game="breakout", fire_on_reset=True, episodic_life=True)
    frame = frame_of(env)
    env.reset(frame)
    monkeypatch.setattr(env, "_press_start", lambda: 3)
    rewards = 0.0
    while not (outcome := env.step(0, frame)).terminated:
        rewards += outcome.reward
    assert env.state()["score"] == rewards + outcome.reward + 3
    env.reset(frame)
    assert env.state()["score"] == rewards + outcome.reward + 3


def test_a_game_that_ends_in_the_presses_after_a_lost_life_tells_its_score(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frame is that of the lost life, as it always is, and the next reset begins a game."""
    env, twin = (make(game="breakout", fire_on_reset=True, episodic_life=True, reward="raw") for _ in range(2))
    frame, other_frame, press, rewards = frame_of(env), frame_of(env), env._press_start, 0.0
    env.reset(frame)
    twin.reset(other_frame)

    def end_the_game() -> int:
        monkeypatch.setattr(env, "_game_over", lambda: True)
        return 7

    monkeypatch.setattr(env, "_press_start", end_the_game)
    outcome = twin_outcome = Outcome(0, math.nan, False, False)
    while not twin_outcome.terminated:
        outcome, twin_outcome = env.step(1, frame), twin.step(1, other_frame)
        rewards += outcome.reward
        assert np.array_equal(frame, other_frame)
    assert outcome == Outcome(twin_outcome.reward, rewards + 7, True, False) and math.isnan(twin_outcome.score)
    monkeypatch.undo()
    monkeypatch.setattr(env, "_press_start", press)
    env.reset(frame)
    assert (env.state()["lives"], env.state()["score"], env.state()["steps"]) == (5, 0, 0)


@pytest.mark.parametrize("episodic", [False, True])
def test_fire_is_pressed_after_a_lost_life(episodic: bool) -> None:
    env = make(game="breakout", fire_on_reset=True, episodic_life=episodic)
    actions, frame = record(env), frame_of(env)
    env.reset(frame)
    while env.state()["lives"] == 5:
        actions.clear()
        outcome = env.step(0, frame)
    assert actions[-2:] == [Action.NOOP, Action.FIRE]
    if episodic:
        assert outcome.terminated
        actions.clear()
        env.reset(frame)
        assert not actions
    assert env.state()["lives"] == 4
    steps = 0
    while env.state()["lives"] == 4:  # the ball is in play and will be lost again: a frame of FIRE was enough
        env.step(0, frame)
        steps += 1
        assert steps < 100


@pytest.mark.parametrize(("lives", "lost"), [([3, 3], False), ([2, 3], True), ([0, 0], False), ([4, 3], True)])
def test_a_life_is_lost_only_while_one_is_left(lives: list[int], lost: bool) -> None:
    """Some games show no lives for a while before they are over; a life won and lost again is a lost one."""
    env = make(game="breakout", episodic_life=True)
    record(env)
    frame = frame_of(env)
    script = iter([3, *lives, *lives])
    env._get_lives = lambda: next(script)
    env.reset(frame)
    outcome = env.step(0, frame)
    assert outcome.terminated == lost and math.isnan(outcome.score)


@pytest.mark.parametrize("game", ["pong", "breakout", "space_invaders", "boxing"])
def test_lives_need_not_be_watched_where_none_are_left(game: str) -> None:
    """The short way through a step gives what the attentive one does."""
    short, attentive = (make(game=game, episodic_life=True, seed=3) for _ in range(2))
    attentive._plain = False
    frames = frame_of(short), frame_of(attentive)
    rng, ended = np.random.default_rng(0), True
    for _ in range(400):
        if ended:
            short.reset(frames[0])
            attentive.reset(frames[1])
            ended = False
        else:
            action = int(rng.integers(short.spec.actions))
            outcomes = short.step(action, frames[0]), attentive.step(action, frames[1])
            np.testing.assert_equal(outcomes[0], outcomes[1])
            ended = outcomes[0].terminated or outcomes[0].truncated
        assert np.array_equal(*frames)
        assert short.state()["lives"] == attentive.state()["lives"]


def test_score_is_the_raw_sum_over_all_lives() -> None:
    env = make(game="space_invaders", episodic_life=True, reward="sign", seed=5)
    raw = make(game="space_invaders", episodic_life=True, reward="raw", seed=5)
    frame, rng, total, ends = frame_of(env), np.random.default_rng(0), 0.0, 0
    env.reset(frame)
    raw.reset(frame)
    outcome = Outcome(0, math.nan, False, False)
    while math.isnan(outcome.score):
        action = int(rng.integers(6))
        outcome, raw_outcome = env.step(action, frame), raw.step(action, frame)
        total += raw_outcome.reward
        ends += outcome.terminated
        assert outcome.reward == np.sign(raw_outcome.reward) and not outcome.truncated
        if outcome.terminated and math.isnan(outcome.score):
            env.reset(frame)
            raw.reset(frame)
    assert ends == 3 and outcome.score == raw_outcome.score == total > 0


def play(env: AtariEnv, limit: int = 10**6) -> list[Outcome]:
    """Outcomes of a game under actions that depend on nothing but the step."""
    frame, rng, outcomes = frame_of(env), np.random.default_rng(1), []
    env.reset(frame)
    for _ in range(limit):
        outcomes.append(env.step(int(rng.integers(env.spec.actions)), frame))
        if not math.isnan(outcomes[-1].score):
            break
        if outcomes[-1].terminated:
            env.reset(frame)
    return outcomes


def test_time_limit_truncates_and_a_real_end_wins() -> None:
    natural = play(make(game="breakout", max_steps=0))
    assert natural[-1].terminated and not natural[-1].truncated
    length = len(natural)
    assert play(make(game="breakout", max_steps=length))[-1] == natural[-1]
    cut = make(game="breakout", max_steps=length - 1)
    outcomes = play(cut)
    assert len(outcomes) == length - 1 and outcomes[-1].truncated and not outcomes[-1].terminated
    assert outcomes[-1].score == sum(o.reward for o in natural[:-1])
    cut.reset(frame_of(cut))
    assert (cut.state()["steps"], cut.state()["score"], cut.state()["lives"]) == (0, 0, 5)


def test_time_limit_counts_the_whole_game_and_ends_it_even_at_a_lost_life() -> None:
    lives = play(make(game="breakout", episodic_life=True, max_steps=0))
    second = [number for number, outcome in enumerate(lives, 1) if outcome.terminated][1]
    env = make(game="breakout", episodic_life=True, max_steps=second)
    outcomes = play(env)
    assert len(outcomes) == second
    assert outcomes[-1].terminated and not outcomes[-1].truncated and not math.isnan(outcomes[-1].score)
    env.reset(frame_of(env))
    assert env.state()["lives"] == 5


def test_sticky_actions_repeat_the_frame_before() -> None:
    env = make(game="pong", sticky=0.25, max_steps=0)
    actions, frame, wanted = record(env), frame_of(env), []
    env.reset(frame)
    for step in range(600):
        env.step(2 + step % 2, frame)  # RIGHT and LEFT in turn
        wanted += [env._actions[2 + step % 2]] * 4
    assert len(actions) == len(wanted)
    first = [actions[i] != wanted[i] for i in range(4, len(wanted), 4)]  # only a change of action shows
    assert 0.20 < np.mean(first) < 0.30
    again = [actions[i] != wanted[i] for i in range(5, len(wanted), 4)]
    assert 0.03 < np.mean(again) < 0.10  # two repetitions in a row


def test_random_skip_draws_all_lengths() -> None:
    env = make(game="pong", skip_min=2, skip=4)
    actions, frame, lengths = record(env), frame_of(env), Counter()
    env.reset(frame)
    for _ in range(300):
        actions.clear()
        env.step(0, frame)
        lengths[len(actions)] += 1
    assert set(lengths) == {2, 3, 4} and min(lengths.values()) > 70
    assert env.spec.frames_per_step == 3


def test_full_actions() -> None:
    assert (make(game="pong").spec.actions, make(game="pong", full_actions=True).spec.actions) == (6, 18)


# Resumption


@pytest.mark.parametrize("game", ["qbert", "tetris", "pong", "seaquest", "montezuma_revenge"])
def test_a_state_goes_on_alike_in_a_new_emulator_and_in_one_that_has_played(game: str) -> None:
    ale, rng = emulator(game), np.random.default_rng(0)
    ale.reset_game()
    actions = ale.getMinimalActionSet()
    for number in range(60):
        ale.act(actions[rng.integers(len(actions))])
        if number % 20 == 19:
            state, twin = ale.cloneState().serialize(), emulator(game)
            twin.restoreState(ALEState(state))
            ale.restoreState(ALEState(state))
            for action in [actions[index] for index in rng.integers(len(actions), size=30)]:
                assert ale.act(action) == twin.act(action)
                assert np.array_equal(ale.getScreen(), twin.getScreen())
                assert np.array_equal(ale.getRAM(), twin.getRAM())


def test_restored_environment_goes_on_exactly() -> None:
    fields = dict(game="breakout", sticky=0.25, skip_min=2, episodic_life=True, fire_on_reset=True, frame="104x80")
    env, rng = make(seed=7, **fields), np.random.default_rng(0)
    frame, other_frame = frame_of(env), frame_of(env)
    env.reset(frame)
    restored_at_ends = 0
    for start in range(3):
        outcome = Outcome(0, math.nan, False, False)
        steps = 0
        while steps < 80 or (start > 0 and not (outcome.terminated and math.isnan(outcome.score) == (start == 1))):
            if outcome.terminated:
                env.reset(frame)
            outcome = env.step(int(rng.integers(env.spec.actions)), frame)
            steps += 1
        restored_at_ends += outcome.terminated
        other = make(seed=99, **fields)
        other.restore(env.state())
        assert np.array_equal(env.render(), other.render())
        for _ in range(500):
            if outcome.terminated:
                other.prepare()
                env.reset(frame)
                other.reset(other_frame)
                assert np.array_equal(frame, other_frame)
            action = int(rng.integers(env.spec.actions))
            outcome, other_outcome = env.step(action, frame), other.step(action, other_frame)
            assert np.array_equal(frame, other_frame)
            assert repr(outcome) == repr(other_outcome)
    assert restored_at_ends >= 2


def test_restored_environment_repeats_the_right_action() -> None:
    env, other = make(game="pong", sticky=0.9), make(game="pong", sticky=0.9, seed=1)
    actions, other_actions, frame = record(env), record(other), frame_of(env)
    env.reset(frame)
    for step in range(20):
        env.step(2 + step // 10, frame)
        other.restore(env.state())
        actions.clear()
        other_actions.clear()
        env.step(0, frame)
        other.step(0, frame)
        assert actions == other_actions
    assert Action.LEFT in actions


def test_state_after_a_lost_life_holds_the_frame() -> None:
    """Without FIRE the reset after a lost life shows the last frame again, also in another process."""
    env = make(game="breakout", episodic_life=True)
    frame, other_frame = frame_of(env), frame_of(env)
    env.reset(frame)
    while not env.step(1, frame).terminated:
        pass
    other = make(game="breakout", episodic_life=True, seed=4)
    other.restore(env.state())
    last = frame.copy()
    env.reset(frame)
    other.reset(other_frame)
    assert np.array_equal(frame, last) and np.array_equal(other_frame, last)


# Settings and errors


@pytest.mark.parametrize("paper", sorted(PAPER_SETTINGS))
def test_paper_settings_run(paper: str) -> None:
    config = PAPER_SETTINGS[paper]
    env = AtariEnv(dataclasses.replace(config, game="breakout"), np.random.SeedSequence(0))
    assert env.spec.frame_shape == {"stooke": (1, 104, 80), "ba3c": (3, 84, 84)}.get(paper, (1, 84, 84))
    frame = frame_of(env)
    noops = Counter()
    for _ in range(300):
        noops[env.state()["next"][1]] += 1
        env.reset(frame)
    assert (min(noops), max(noops)) == {"ga3c": (12, 12), "ba3c": (0, 0), "paac": (16, 46)}.get(paper, (0, 30))
    env.step(0, frame)
    assert frame.max() > 0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"game": "braekout"}, "breakout"),
        ({"game": "combat"}, "one-player"),
        ({"game": "pong", "frame": "104x80", "color": "rgb"}, "84x84"),
    ],
)
def test_wrong_settings_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        make(**fields)


def test_missing_rom_is_named(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALE_ROMS_DIR", str(tmp_path))
    with pytest.raises(UserError, match="ROM of 'pong'"):
        emulator("pong")


def test_worker_imports_no_cv2_and_prints_nothing() -> None:
    code = (
        "import sys, numpy as np\n"
        "from phalanx.config import AtariConfig\n"
        "from phalanx.envs.atari import AtariEnv\n"
        "env = AtariEnv(AtariConfig(), np.random.SeedSequence(0)); frame = np.zeros((1, 84, 84), np.uint8)\n"
        "env.reset(frame); env.step(0, frame); sys.exit('cv2' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
