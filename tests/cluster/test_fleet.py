"""What a fleet makes of its members' silence and death, without Ray: calls are answered here."""

from __future__ import annotations

import dataclasses
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from phalanx.cluster.post import EVALUATOR, WORKER, Post
from phalanx.cluster.server import ShardOrder, ShardServer
from phalanx.cluster.standby import Standby
from phalanx.config.presets import preset
from phalanx.errors import RunError, UserError
from phalanx.parameters.client import Whole
from phalanx.parameters.flat import FlatParameters
from phalanx.parameters.shards import cut
from phalanx.runtime.share import WHOLE, Share

pytest.importorskip("ray")

from ray.exceptions import GetTimeoutError, NodeDiedError, ObjectLostError, RayTaskError

from phalanx.cluster import fleet as fleets
from phalanx.cluster import servers, transport, watched
from phalanx.cluster.fleet import CHIEF_TIMEOUT, LONGEST_EVALUATION, ROOM_SECONDS, Fleet
from phalanx.cluster.servers import Servers
from phalanx.cluster.watched import Watched
from phalanx.runtime.child import START_TIMEOUT


class Calls:
    """Stands for Ray: a call is its own answer, an error is raised, None has not come yet."""

    @staticmethod
    def wait(calls, timeout, num_returns=1):
        return [call for call in calls if call != "none yet"], []

    @staticmethod
    def get(call, timeout):
        if isinstance(call, Exception):
            raise call
        return call


@pytest.fixture
def fleet_of(monkeypatch):
    """A fleet of two workers and an evaluator that have been started, but not heard of."""

    def make(**topology):
        experiment = preset("dba3c-catch")
        experiment = dataclasses.replace(experiment, topology=dataclasses.replace(experiment.topology, **topology))
        posts = [Post(WORKER, rank, "", Share(rank, 2)) for rank in range(2)] + [Post(EVALUATOR, 2, "", WHOLE)]
        told = []
        model = FlatParameters(nn.Linear(16, 1, bias=False))
        fleet = Fleet(experiment=experiment, model=model, posts=posts, event=told.append, quorum=2)
        fleet.servers = SimpleNamespace(set_quorum=told.append, repeat_quorum=lambda quorum: None)
        for post in posts:
            start(fleet, post)
        return fleet, told

    def start(fleet, post, experiment=None):
        post.handle, post.arrival, post.begun, post.calls = SimpleNamespace(), "none yet", False, []
        post.born = post.heard = time.monotonic()

    monkeypatch.setattr(fleets, "ray", SimpleNamespace(wait=Calls.wait, get=Calls.get, kill=lambda handle: None))
    monkeypatch.setattr(Fleet, "_start", start)
    return make


def ago(seconds):
    return time.monotonic() - seconds


def test_a_slow_start_does_not_end_a_run_that_needs_all_its_workers(fleet_of):
    fleet, told = fleet_of(too_few="stop")
    for post in fleet.posts:
        post.born = post.heard = ago(ROOM_SECONDS + 1)
    fleet._look_after_quorum()
    fleet.posts[0].heard = ago(START_TIMEOUT + 1)
    with pytest.raises(RunError, match="1 worker is alive, but a step needs the gradients of 2"):
        fleet._look_after_quorum()
    assert not told


def test_nor_does_a_cluster_that_is_full_for_the_moment(fleet_of):
    fleet, told = fleet_of(too_few="stop", address="head:1")
    for post in fleet.posts:
        post.born = post.heard = ago(10 * START_TIMEOUT)
    fleet._replace_hung()
    fleet._look_after_quorum()
    assert told == [f"{name} waits for 1 free cores in the cluster" for name in ("worker 0", "worker 1", "evaluator 2")]
    fleet.posts[0].arrival = "it is there"
    fleet._replace_hung()
    assert not fleet.posts[0].waits_for_room and fleet.posts[0].heard > ago(START_TIMEOUT)
    fleet._look_after_quorum()
    fleet.births = 1  # somebody has died
    fleet.posts[1].begun = True
    with pytest.raises(RunError, match="need"):
        fleet._look_after_quorum()


def test_a_run_that_may_go_on_with_fewer_does_so_soon(fleet_of):
    fleet, told = fleet_of(too_few="lower")
    fleet.posts[0].begun = True
    fleet.posts[1].born = ago(ROOM_SECONDS + 1)
    fleet._look_after_quorum()
    assert told == ["1 worker is alive: a step takes the gradients of 1 from now on", 1]


@pytest.mark.parametrize("address", ["", "head:1"])
def test_a_member_that_has_a_process_and_never_gets_ready_is_replaced(fleet_of, address):
    fleet, told = fleet_of(address=address)
    limit = START_TIMEOUT + fleet.experiment.sampler.step_timeout
    for post in fleet.posts:
        post.arrival, post.born, post.heard = None, ago(9 * limit), ago(limit + 1)
    fleet._replace_hung()
    assert told == [f"worker {rank} died: no answer for {limit:g} s" for rank in range(2)]
    fleet.posts[2].heard = ago(LONGEST_EVALUATION + 1)
    fleet._replace_hung()
    assert told[2:] == [f"evaluator 2 died: no answer for {LONGEST_EVALUATION:g} s"]


@pytest.mark.parametrize(
    ("cause", "words"), [(UserError("no game is here"), "no game is here"), (ValueError("?"), "all of the traceback")]
)
def test_a_member_that_cannot_be_made_says_why(fleet_of, cause, words):
    """In one sentence where there is one: another host may do better, so it is no end yet."""
    fleet, told = fleet_of()
    fleet.posts[0].calls = [RayTaskError("work", "all of the traceback", cause).as_instanceof_cause()]
    assert fleet._hear(fleet.posts[0]) is None
    assert told == [f"worker 0 died: {words}"]


@pytest.mark.parametrize("error", [ObjectLostError("00" * 28, None, ""), NodeDiedError("its host is gone")])
def test_a_chief_whose_host_is_gone_has_a_successor(fleet_of, error):
    """Though the answer was made: it lay on the host."""
    fleet, told = fleet_of()
    answers = [error, {"values": torch.ones(16).numpy(), "version": 4, "rule": {}, "apart": 0}]
    for post, answer in zip(fleet.posts, answers, strict=False):
        post.begun = True
        post.handle.whole = SimpleNamespace(remote=lambda answer=answer: answer)
    assert fleet._whole().state["version"] == 4
    assert told[0].startswith("worker 0 died:") and told[1] == "worker 0 was the chief; worker 1 is from now on"


def test_a_chief_that_gives_no_answer_is_passed_over(fleet_of):
    fleet, told = fleet_of()
    whole = {"values": torch.ones(16).numpy(), "version": 4, "rule": {}, "apart": 0}
    for post, answer in zip(fleet.posts, [GetTimeoutError(f"{CHIEF_TIMEOUT:g} s"), whole], strict=False):
        post.begun = True
        post.handle.whole = SimpleNamespace(remote=lambda answer=answer: answer)
    assert fleet._whole().state["version"] == 4
    assert told == ["worker 0, the chief, gives no answer; the next worker is the chief"]


def test_a_checkpoint_does_not_count_back_when_a_server_did(fleet_of, monkeypatch):
    fleet, _ = fleet_of()
    fleet.version = 120
    monkeypatch.setattr(fleet, "_whole", lambda: Whole(torch.zeros(16), {"version": 20, "rule": {}}))
    assert fleet.snapshot().store["version"] == 120


def test_a_checkpoint_of_several_steps_is_told_of(fleet_of, monkeypatch):
    fleet, told = fleet_of()
    monkeypatch.setattr(fleet, "_whole", lambda: Whole(torch.zeros(16), {"version": 20, "rule": {}}, 3))
    fleet.snapshot()
    assert told == ["a checkpoint has slices of steps up to 3 apart: none was to be had of all servers"]


def test_servers_are_told_their_quorum_again(monkeypatch):
    """One call was lost with its server, another has no answer yet."""
    monkeypatch.setattr(servers, "ray", SimpleNamespace(wait=Calls.wait, get=Calls.get))
    monkeypatch.setattr(servers, "REPEAT", 0.0)
    told = []

    def server(number, answer):
        return SimpleNamespace(
            set_quorum=SimpleNamespace(remote=lambda quorum: told.append((number, quorum)) or answer)
        )

    some = Servers([server(0, NodeDiedError("gone")), server(1, "done"), server(2, "none yet")], [], None)
    some.repeat_quorum(3)
    assert not told
    some.set_quorum(2)
    told.clear()
    some.repeat_quorum(2)
    assert told == [(0, 2), (1, 2)]


class Here:
    """A server in this process behind a handle like Ray's; another one may take its place."""

    def __init__(self, server):
        self.server = server

    def __getattr__(self, name):
        return SimpleNamespace(remote=lambda *arguments: self._answer(name, arguments))

    def _answer(self, name, arguments):
        try:
            return getattr(self.server, name)(*arguments)
        except Exception as error:
            return error


@pytest.mark.parametrize("asked", ["supervisor", "chief"])
def test_a_server_that_lost_its_standby_is_looked_after_while_it_is_asked_for_a_checkpoint(
    fleet_of, monkeypatch, asked
):
    """Only the supervisor can give it parameters, and waits for its state meanwhile, or for a chief who does."""
    fleet, told = fleet_of()
    monkeypatch.setattr(transport, "ray", fleets.ray)
    monkeypatch.setattr(transport, "LOOK", 0.0)
    monkeypatch.setattr(transport, "RECOVERY", 20.0)
    fleet.model = FlatParameters(nn.Linear(32, 1, bias=False))
    parts, standby = cut(32, 2), Standby()
    orders = [ShardOrder(number, 16, fleet.experiment.optimizer, quorum=1) for number in range(2)]
    for order, copy in zip(orders, fleet._copies(parts), strict=True):
        standby.keep(order.number, copy)
    handles = [Here(ShardServer(order, standby.keep, standby.kept)) for order in orders]
    fleet.servers = Servers(handles, parts, SimpleNamespace(look=lambda: ""))
    fleet._look_after_servers()
    handles[1].server = ShardServer(orders[1], standby.keep, Standby().kept)
    if asked == "chief":
        fleet.posts[0].begun = True
        whole = {"values": torch.ones(32).numpy(), "version": 4, "rule": {}, "apart": 0}
        fleet.posts[0].handle.whole = SimpleNamespace(remote=lambda: "none yet")

        def get(call, timeout):
            return Calls.get(whole if call == "none yet" else call, timeout)

        def wait(calls, timeout, num_returns=1):
            return (calls, []) if calls == ["none yet"] and told else Calls.wait(calls, timeout)

        monkeypatch.setattr(fleets, "ray", SimpleNamespace(wait=wait, get=get))
    assert fleet._whole().state["version"] == (4 if asked == "chief" else 0)
    assert told[0] == "parameter server 1 died with its standby: it goes on from the newest checkpoint"
    assert handles[1].server.began_with == 0


def test_a_death_is_named_at_once_and_so_is_the_return(monkeypatch):
    answers = iter([1, 1, NodeDiedError("gone"), NodeDiedError("gone"), GetTimeoutError("late"), 2, 2, 3])
    monkeypatch.setattr(watched, "ray", SimpleNamespace(wait=Calls.wait, get=Calls.get))
    monkeypatch.setattr(watched, "LOOK", -1.0)
    one = Watched(SimpleNamespace(process=SimpleNamespace(remote=lambda: next(answers))))
    news = [one.look() for _ in range(16)][1::2]  # every second look asks
    assert news == ["", "", "died", "", "", "came back", "", "came back"]


def test_a_server_that_died_is_named_before_it_is_back(fleet_of, monkeypatch):
    fleet, told = fleet_of()
    shards = SimpleNamespace(look=lambda: None, gone={1}, ignorant=set(), came_back={})
    fleet.shards, fleet.servers = shards, Servers([], [], SimpleNamespace(look=lambda: ""))
    for gone in ({1}, {1}, set(), {1}):
        shards.gone = gone
        fleet._look_after_servers()
    assert told == ["parameter server 1 died; Ray starts it again"] * 2
