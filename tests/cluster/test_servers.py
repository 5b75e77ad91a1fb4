"""Parameter servers and whole runs of gorila on one real Ray, which these tests share."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from phalanx.cluster import janitor
from phalanx.config import OptimizerConfig
from phalanx.parameters.client import ShardedStore, states_of
from phalanx.parameters.flat import FlatParameters
from phalanx.parameters.local import LocalStore
from phalanx.parameters.rules import make_clip, make_rule
from phalanx.parameters.shards import Verdict, cut
from phalanx.types import Gradient
from whole_runs import records

ray = pytest.importorskip("ray")

CONFIG = OptimizerConfig(rule="adagrad", epsilon=1e-3, clip="global", clip_norm=0.5)
EVERY = 5  # updates between two copies to the standby
SIZE = 1_003
PARTS = cut(SIZE, 3)


@pytest.fixture(scope="module", autouse=True)
def one_ray():
    from phalanx.cluster.engine import running

    with running(""):
        yield


def gone():
    """Wait until Ray has forgotten the standby of a run: the next one has its name."""
    from phalanx.cluster.servers import STANDBY

    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            ray.get_actor(STANDBY)
        except ValueError:
            return
        time.sleep(0.02)


def weights(run):
    checkpoint = sorted((run / "checkpoints").glob("step-*"))[-1]
    return load_file(checkpoint / "model.safetensors")


def test_a_run_with_one_bundle_equals_serial_and_goes_on_when_it_is_resumed(train, resume, tmp_path, monkeypatch):
    """A pull before each acting step, no bounds, AdaGrad on the servers: the same weights to the last bit."""
    monkeypatch.setattr("phalanx.cluster.engine.running", contextlib.nullcontext)
    adagrad = ("rule", "adagrad", "learning-rate", 0.02, "epsilon", 1e-3, "initial-accumulator", 0.01, "clip", "none")
    flags = [f"--optimizer.{word}" if place % 2 == 0 else word for place, word in enumerate(adagrad)]
    flags += ["--run.threads", 1, "--algorithm.target-clock", "updates", "--algorithm.target-every", 50]
    gorila = ["--topology", "gorila", "--topology.bundles", 1, "--topology.shards", 3]
    assert train("dqn-catch", *gorila, *flags, name="ours", steps=2_000) == 0
    assert train("dqn-catch", "--topology", "serial", *flags, name="theirs", steps=2_000) == 0
    ours, theirs = weights(tmp_path / "ours"), weights(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    before = records(tmp_path / "ours")[-1]
    gone()
    assert resume("--run.steps", 2_500, name="ours") == 0
    after = records(tmp_path / "ours")[-1]
    assert 2_500 <= after["steps"] < 2_600
    assert after["updates"] == after["version"] > before["updates"] > 150
    gone()


def begun():
    """What the servers begin with: the parameters of `model`."""
    from phalanx.cluster.server import with_arrays

    rule = make_rule(CONFIG)
    store = {"version": 0, "rule": rule.init(SIZE)}
    return [with_arrays(state) for state in states_of(FlatParameters(model()).flat, store, PARTS, rule)]


@pytest.fixture(scope="module")
def same_servers():
    from phalanx.cluster.server import ShardOrder
    from phalanx.cluster.servers import start_servers

    orders = [ShardOrder(n, part.stop - part.start, CONFIG, snapshot_every=EVERY) for n, part in enumerate(PARTS)]
    made = start_servers(orders, PARTS, begun(), workers=4)
    yield made
    made.end()


@pytest.fixture
def servers(same_servers):
    """Three of them, as they were at their beginning."""
    ray.get([handle.restore.remote(s) for handle, s in zip(same_servers.handles, begun(), strict=True)], timeout=60)
    return same_servers


def model():
    torch.manual_seed(0)
    return nn.Linear(SIZE, 1, bias=False)


def store_of(servers, worker=0, far=False, bfloat16=False):
    shards = servers.reach(bfloat16)()
    if far:
        shards.blocks = [None for _ in shards.parts]  # as if they were on other hosts
    parameters = FlatParameters(model())
    return ShardedStore(shards, parameters, make_rule(CONFIG), make_clip(CONFIG, []), worker, bfloat16=bfloat16)


def gradients(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [Gradient(torch.randn(SIZE, generator=generator), torch.tensor(1.0), 0) for _ in range(count)]


@pytest.mark.parametrize("far", [False, True], ids=["one host", "two hosts"])
def test_servers_equal_a_local_store_bit_for_bit(servers, far):
    store = store_of(servers, far=far)
    local = LocalStore(FlatParameters(model()), make_rule(CONFIG), make_clip(CONFIG, []))
    for ours, theirs in zip(gradients(12), gradients(12), strict=True):
        assert store.push(ours, 0.1) == local.push(theirs, 0.1)
        assert torch.equal(store.parameters.flat, local.parameters.flat)
    for name, value in local.state()["rule"].items():
        assert torch.equal(store.state()["rule"][name], value)


def test_two_bytes_a_number_travel_alike_between_hosts_and_within_one(servers):
    near, far = store_of(servers, 0, bfloat16=True), store_of(servers, 1, far=True, bfloat16=True)
    for turn, gradient in enumerate(gradients(6)):
        (near, far)[turn % 2].push(gradient, 0.1)
        near.pull(near.parameters)
        far.pull(far.parameters)
        assert torch.equal(near.parameters.flat, far.parameters.flat)
    assert near.parameters.flat.eq(near.parameters.flat.bfloat16()).all()


def kill_server(servers, number):
    process = ray.get(servers.handles[number].describe.remote()).block.process
    os.kill(process, signal.SIGKILL)
    return process


def test_a_server_that_is_killed_comes_back_and_its_workers_go_on(servers):
    near, far = store_of(servers, 0), store_of(servers, 1, far=True)
    for gradient in gradients(8):
        near.push(gradient, 0.1)
    far.pull(far.parameters)
    kill_server(servers, 1)
    for ours, theirs in zip(gradients(4, 1), gradients(4, 2), strict=True):
        near.push(ours, 0.1)
        far.push(theirs, 0.1)
    versions = [ray.get(handle.version.remote()) for handle in servers.handles]
    assert versions[0] == versions[2] == 16
    assert 16 - EVERY <= versions[1] < 16
    lost = 16 - versions[1]
    began = 8 - lost
    words = f"parameter server 1 died and came back with update {began}; {lost} are lost"
    assert near.shards.came_back == {1: (words, lost)}
    assert far.shards.came_back[1][0].endswith(f"; at least {lost} are lost")
    values = ray.get(servers.handles[1].read.remote(None, False))[1]
    for store in (near, far):
        store.pull(store.parameters)
        assert store.parameters.flat[servers.parts[1]].tolist() == values.tolist()
    successor = ray.get(servers.handles[1].describe.remote()).block.process
    mark = f"{janitor.MARK}=".encode()
    assert mark in Path(f"/proc/{successor}/environ").read_bytes()  # it was born in Ray, long after Ray was started
    assert janitor.MARK not in os.environ


def test_a_push_that_is_sent_again_counts_once(servers):
    from phalanx.cluster.server import packed

    part = servers.parts[0]
    gradient = packed(torch.ones(part.stop - part.start), False)
    calls = [servers.handles[0].push.remote(7, 1, 0, 0.1, 0.0, gradient) for _ in range(3)]
    receipts = ray.get(calls, timeout=60)
    assert [receipt.verdict for receipt in receipts] == [Verdict.APPLIED] * 3
    assert sorted(receipt.repeated for receipt in receipts) == [False, True, True]
    assert ray.get(servers.handles[0].version.remote()) == 1


def test_a_server_that_dies_with_its_standby_waits_for_parameters(servers):
    from phalanx.cluster.server import NoParametersError, with_arrays

    store = store_of(servers)
    for gradient in gradients(7):
        store.push(gradient, 0.1)
    before = store.parameters.flat.clone()
    state = with_arrays(ShardState(store, servers.parts[2]).state())
    os.kill(ray.get(servers.standby.handle.process.remote()), signal.SIGKILL)
    kill_server(servers, 2)
    deadline = time.monotonic() + 60
    while 2 not in store.shards.ignorant:
        assert time.monotonic() < deadline
        store.pull(store.parameters)
        assert torch.equal(store.parameters.flat, before)  # what was read last, not what an empty server has
        time.sleep(0.1)
    calls = [servers.handles[2].version.remote() for _ in range(50)]  # more than it has threads for
    for call in calls:
        with pytest.raises(NoParametersError):
            ray.get(call, timeout=60)
    far = store_of_in_thread(servers)
    ray.get(servers.handles[2].restore.remote(state), timeout=60)
    assert far().version == 7
    assert store.push(gradients(1)[0], 0.1) == 8
    assert not torch.equal(store.parameters.flat[servers.parts[2]], before[servers.parts[2]])


def store_of_in_thread(servers):
    """A worker on another host that begins now, and waits."""
    made = []
    thread = threading.Thread(target=lambda: made.append(store_of(servers, 3, far=True)))
    thread.start()

    def joined():
        thread.join(60)
        return made[0]

    return joined


class ShardState:
    """What a supervisor knows of a shard: its parameters, and the state of a rule that begins anew."""

    def __init__(self, store, part):
        self.store, self.part = store, part

    def state(self):
        rule = make_rule(CONFIG).init(self.part.stop - self.part.start)
        return {"version": 7, "values": self.store.parameters.flat[self.part].clone(), "rule": rule, "seen": {}}
