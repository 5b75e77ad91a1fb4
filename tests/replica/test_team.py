"""The teams of replicas, as the parent sees them, without replicas: their states, and who is taken to hang."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest
import torch

from phalanx.config import AsynchronousConfig
from phalanx.config.presets import preset
from phalanx.parameters.chunked import CentralParameters
from phalanx.parameters.flat import FlatParameters
from phalanx.parameters.rules import make_rule
from phalanx.replica import team as team_module
from phalanx.replica.central import CentralTeam
from phalanx.replica.team import longest_silence
from phalanx.runtime.share import Share

LEARNER = preset("ppo-catch")  # with Adam, which counts its steps


class OwnChild:
    """A replica that says nothing."""

    def __init__(self, pid: int) -> None:
        self.pid = pid


@pytest.fixture
def team():
    experiment = dataclasses.replace(LEARNER, topology=AsynchronousConfig(replicas=3))
    model = FlatParameters(torch.nn.Linear(9, 5))
    central = CentralParameters.create(model.flat, make_rule(experiment.optimizer).init(model.flat.numel()), 2)
    with contextlib.closing(central):
        yield CentralTeam(
            experiment=experiment,
            target="",
            shares=[Share(rank, 3) for rank in range(3)],
            model=model,
            central=central,
            event=lambda sentence: None,
        )


def test_a_snapshot_without_any_replica_holds_the_whole_state_of_the_rule(team):
    """As when a run is stopped before the first checkpoint: a single learner goes on from it."""
    snapshot = team.snapshot(with_envs=False)
    rule = make_rule(LEARNER.optimizer).init(team.model.flat.numel())
    assert {name: value.shape for name, value in snapshot.store["rule"].items()} == {
        name: value.shape for name, value in rule.items()
    }


def test_parameters_and_moments_of_a_snapshot_are_of_the_same_moment(team, monkeypatch):
    read = CentralParameters.vectors

    def pushed_after(central: CentralParameters) -> Any:
        flat, state = read(central)
        central.begin(flat + 1, {name: vector + 1 for name, vector in state.items()})
        return flat, state

    team.central.begin(torch.zeros(50), {"mean": torch.zeros(50), "square": torch.zeros(50)})
    monkeypatch.setattr(CentralParameters, "vectors", pushed_after)
    snapshot = team.snapshot(with_envs=False)
    assert all(not weights.any() for weights in snapshot.weights.values())
    assert not snapshot.store["rule"]["mean"].any() and not snapshot.store["rule"]["square"].any()


class TestHanging:
    @pytest.fixture
    def clock(self, monkeypatch):
        now = [0.0]
        monkeypatch.setattr(team_module.time, "monotonic", lambda: now[0])
        return now

    @pytest.fixture
    def replaced(self, clock, team, monkeypatch):
        """Which replicas are."""
        replaced: list[int] = []

        def replace(rank: int) -> None:
            replaced.append(rank)
            team.heard[rank] = team._now()

        monkeypatch.setattr(team, "_replace", replace)
        team.looked_at, team.children = 0.0, [OwnChild(pid) for pid in (11, 12, 13)]
        return replaced

    def pass_time(self, team, clock, seconds):
        for _ in range(int(seconds / 0.5)):
            clock[0] += 0.5
            team._replace_hung()

    def test_who_neither_speaks_nor_steps_is_replaced(self, team, clock, replaced):
        team.done.add(2)
        self.pass_time(team, clock, longest_silence(LEARNER) / 2)
        team.clocks.rows[0, 0] += 1
        self.pass_time(team, clock, longest_silence(LEARNER) / 2 + 2)
        assert replaced == [1]

    def test_a_run_that_was_stopped_and_continues_replaces_nobody(self, team, clock, replaced):
        for _ in range(3):
            clock[0] += 10 * longest_silence(LEARNER)
            self.pass_time(team, clock, 5)
        assert not replaced

    def test_who_waits_for_the_lock_of_one_that_hangs_is_not_replaced(self, team, clock, replaced, monkeypatch):
        monkeypatch.setattr(CentralParameters, "holder", lambda central, chunk: 12 if chunk == 1 else None)
        self.pass_time(team, clock, longest_silence(LEARNER) + 2)
        assert replaced == [1]
        monkeypatch.setattr(CentralParameters, "holder", lambda central, chunk: None)
        self.pass_time(team, clock, longest_silence(LEARNER) + 2)
        assert sorted(replaced[1:]) == [0, 1, 2]  # each hangs by itself


def test_successors_of_a_run_that_goes_on_play_other_games_than_those_before(team, monkeypatch):
    seeds = []
    monkeypatch.setattr(team, "_start", lambda rank, experiment, state: seeds.append(experiment.run.seed))

    class Dead:
        control = None

        def kill(self) -> None: ...

        def release(self) -> None: ...

        def last_words(self) -> str:
            return "killed by SIGKILL"

    for steps in (100, 2000):  # at the first death of each of two sessions
        team.births, team.children = 0, [Dead() for _ in range(3)]
        team.clocks.rows[1, 0] = steps
        team._replace(1)
    assert len(set(seeds)) == 2
