"""Runs over several hosts: Ray nodes of which one goes and another comes, and real networks between namespaces."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hosts import Hosts, needs_hosts, wait_until
from safetensors.torch import load_file

from phalanx.cluster.engine import check_address
from phalanx.errors import UserError
from whole_runs import descendants, newest, same

ROOT = Path(__file__).parents[2]
STORE = 80 << 20
RAY = str(Path(sys.executable).with_name("ray"))


ALONE = ("--topology.evaluate-every", "0")  # two workers and nobody else, as there is room for two


def first(flags):
    return flags[0]


class Joining:
    """`phalanx train` that joins a cluster, and what it has written."""

    def __init__(self, directory, address, start, *flags):
        self.directory, self.output = directory / "run", directory / "output"
        command = [sys.executable, "-m", "phalanx", "train", *flags, "--topology.address", address, "--run.name", "run"]
        command += ["--run.directory", str(directory), "--run.log-every", "0.5", "--run.steps", "10000000"]
        self.driver = start(*command)

    def text(self):
        return self.output.read_text() + self.events()

    def events(self):
        with contextlib.suppress(OSError):
            return (self.directory / "events.log").read_text()
        return ""

    @property
    def updates(self):
        with contextlib.suppress(OSError, IndexError, ValueError):
            return json.loads((self.directory / "metrics.jsonl").read_text().splitlines()[-1])["updates"]
        return 0

    def wait(self, condition, seconds=120):
        wait_until(lambda: self.driver.poll() is not None or condition(), seconds, self.text)
        assert self.driver.poll() is None, self.text()

    def wait_for_updates(self, more=5):
        before = self.updates
        self.wait(lambda: self.updates >= before + more)

    def weights(self):
        checkpoints = sorted((self.directory / "checkpoints").glob("step-*"))
        return load_file(checkpoints[-1] / "model.safetensors")


@pytest.mark.parametrize(
    "flags",
    [("gorila-catch", "--topology.bundles", "2"), pytest.param(("dba3c-catch", *ALONE), marks=pytest.mark.slow)],
    ids=first,
)
def test_a_node_goes_another_comes_and_the_run_goes_on(tmp_path, ray_place, flags):
    """And the cluster outlives the run, with nothing of it left there, even if its driver is killed."""
    pytest.importorskip("ray")
    from phalanx.cluster.engine import import_ray

    import_ray()
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": STORE, "include_log_monitor": False}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False, "no_monitor": True})
    try:
        leaving = cluster.add_node(**node)

        def start(*command):
            with (tmp_path / "output").open("w") as output:
                return subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)

        def ours():
            kinds = (b"ray::Host", b"ray::Server", b"ray::Standby")
            return [process for process in descendants(os.getpid()) if command_line(process).startswith(kinds)]

        run = Joining(tmp_path, cluster.address, start, *flags)
        try:
            run.wait_for_updates()
            cluster.remove_node(leaving, allow_graceful=False)
            run.wait(lambda: "died:" in run.events())
            run.wait_for_updates()  # of the member that is left; there is no room for another one
            cluster.add_node(**node)
            run.wait(lambda: sum(command_line(each).startswith(b"ray::Host") for each in ours()) == 2)
            run.wait_for_updates()
        finally:
            run.driver.kill()
            run.driver.wait(60)
        wait_until(lambda: not ours(), 60, lambda: str(ours()))
        assert cluster.head_node.all_processes
    finally:
        cluster.shutdown()


def command_line(process):
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.slow
@needs_hosts
def test_ray_nodes_in_two_networks_one_of_which_is_unplugged(tmp_path, ray_place):
    """The recipe of docs/clusters.md. The hosts share no memory: parameters and gradients travel."""
    pytest.importorskip("ray")
    secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    common = ["--num-cpus", "2", "--object-store-memory", str(STORE), "--disable-usage-stats", "--block"]
    with Hosts() as hosts:
        head, other = hosts.addresses
        address = f"{head}:6379"
        command = [RAY, "start", "--head", "--node-ip-address", head, "--port", "6379", "--include-dashboard", "false"]
        hosts.start(0, *command, *common, output=tmp_path / "head", apart=True, **secret)
        wait_until(lambda: "Ray runtime started" in (tmp_path / "head").read_text(), 90, (tmp_path / "head").read_text)
        command = [RAY, "start", "--address", address, "--node-ip-address", other]
        hosts.start(1, *command, *common, output=tmp_path / "other", apart=True, **secret)
        wait_until(lambda: "runtime started" in (tmp_path / "other").read_text(), 90, (tmp_path / "other").read_text)

        def start(*command):
            return hosts.start(0, *command, output=tmp_path / "output", **secret)

        run = Joining(tmp_path, address, start, "gorila-catch", "--topology.bundles", "2")
        run.wait_for_updates(50)
        hosts.unplug(1)
        run.wait(lambda: "died" in run.events() or "no answer" in run.events(), 180)
        run.wait_for_updates(50)
        os.killpg(run.driver.pid, signal.SIGINT)
        assert run.driver.wait(90) == 128 + signal.SIGINT
        assert all(torch.isfinite(value).all() for value in run.weights().values())


@pytest.mark.slow
@needs_hosts
def test_torchrun_on_two_hosts_learns_what_one_host_does(train, tmp_path):
    flags = ("--run.threads", "1", "--run.precision", "float32", "--sampler.decorrelation", "10")
    with Hosts() as hosts:
        launchers = []
        for number, address in enumerate(hosts.addresses):
            command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
            command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts.addresses[0]}:29400", "--rdzv-id", "run"]
            command += [
                "--rdzv-conf",
                f"is_host={number == 0}",
                "--local-addr",
                address,
                "-m",
                "phalanx",
                "train",
                "a2c-catch",
                "--topology",
                "synchronous",
            ]
            command += ["--run.name", "run", "--run.directory", str(tmp_path), "--run.steps", "4096", *flags]
            launchers.append(hosts.start(number, *command, output=tmp_path / f"output-{number}", apart=True))
        for launcher in launchers:
            assert launcher.wait(timeout=240) == 0, (tmp_path / "output-0").read_text()
    own = ("--topology", "synchronous", "--topology.replicas", 2, "--sampler.decorrelation", 10, "--run.threads", 1)
    assert train("a2c-catch", *own, name="own", steps=4096) == 0
    theirs, one_host = newest(tmp_path / "run"), newest(tmp_path / "own")
    assert same(theirs.weights, one_host.weights)
    assert same(theirs.state["clocks"], one_host.state["clocks"])


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1:1", r"nobody listens at 127.0.0.1:1 \(.*\); start a cluster with `ray start --head --port 1`"),
        ("nowhere", "it must be HOST:PORT of a cluster's head, or auto"),
        ("127.0.0.1:70000", "it must be HOST:PORT"),
        ("ray://127.0.0.1:10001", "it must be HOST:PORT"),
    ],
)
def test_a_wrong_address_is_refused_in_one_sentence(address, words):
    with pytest.raises(UserError, match=words):
        check_address(address)


@pytest.fixture
def head(ray_place):
    """The address of a cluster's head, or rather of the part of it that answers who joins, with a token of its own."""
    ray = pytest.importorskip("ray")
    server = Path(ray.__file__).with_name("core") / "src/ray/gcs/gcs_server"
    port = 31_000 + os.getpid() % 9_000
    flags = {"log_dir": ray_place, "config_list": "e30=", "gcs_server_port": port, "metrics-agent-port": 0}
    flags |= {"node-ip-address": "127.0.0.1", "session-name": "s", "session-dir": ray_place, "node-id": "0f" * 28}
    flags |= {"stdout_filepath": f"{ray_place}/out", "stderr_filepath": f"{ray_place}/err"}
    secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    command = [server, *(f"--{name}={value}" for name, value in flags.items())]
    process = subprocess.Popen(command, env={**os.environ, **secret}, stdout=subprocess.DEVNULL)

    def listens():
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1).close()
            return True
        return False

    try:
        wait_until(listens, 30, lambda: "no head")
        yield f"127.0.0.1:{port}", secret
    finally:
        process.kill()
        process.wait(30)


def test_a_wrong_token_is_refused_before_there_is_a_run(head, tmp_path):
    """In processes of their own: Ray reads the variables once."""
    address, secret = head
    command = [sys.executable, "-m", "phalanx", "train", "gorila-catch", "--topology.address", address]
    command += ["--run.directory", str(tmp_path / "runs")]
    wrong = {**os.environ, **secret, "RAY_AUTH_TOKEN": "b" * 64}
    done = subprocess.run(command, cwd=ROOT, env=wrong, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert f"the cluster at {address} refuses this process's token; set RAY_AUTH_MODE=token" in line
    assert not (tmp_path / "runs").exists()
    code = f"from phalanx.cluster.engine import check_token; check_token('{address}')"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **secret}, timeout=120, check=True)


def test_a_wrong_address_is_refused_before_there_is_a_run(train, tmp_path, capsys):
    assert train("gorila-catch", "--topology.address", "127.0.0.1:1", steps=100) == 2
    assert "nobody listens at 127.0.0.1:1" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
