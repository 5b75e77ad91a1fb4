"""Ray for the time of a run: a small one on this machine, which ends with the run, or a cluster that is there already.

A local Ray has no dashboard, an object store of the least size that Ray allows, and a directory of its own. A janitor
(`janitor.py`) removes what is left of it, even of a run that was killed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from phalanx.cluster import janitor
from phalanx.errors import RunError, UserError, in_words, require
from phalanx.runtime.child import module_path
from phalanx.runtime.signals import STOPS

STORE = 80 << 20  # bytes of the local object store; Ray takes no less than 75 MiB
ROOM = 1 << 16  # processes a local Ray may hold at once; the machine sets the limit, not a count
JANITOR_SECONDS = 15.0  # that it may take
NEEDLESS = ("start_api_server", "start_monitor", "start_log_monitor")
"""Of a Ray node: what starts processes for jobs that are handed in, for further nodes and for logs on the driver's
terminal. A run needs none of them, and they take 250 MB and some seconds."""
REACH_SECONDS = 5.0  # within which the head of a cluster must accept a connection
JOIN_TRIES = "5"  # a second each, until the head of a cluster has answered
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_SCHEDULER_EVENTS": "0",
    "RAY_COLOR_PREFIX": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # learners that reserve no GPU may all use the one there is
    "RAY_enable_metrics_collection": "0",
    "RAY_enable_worker_prestart": "0",  # processes that nobody asked for would take the cores while ours start
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_register_timeout_seconds": "120",  # many processes that import torch on one core take long
    "RAY_metrics_report_interval_ms": "60000",
    "RAY_worker_niceness": "0",
    "RAY_raylet_start_wait_time_s": "120",
}


def check_address(address: str) -> None:
    """Refuse an address where nobody listens, before anything is started: Ray would try for minutes."""
    if address in ("", "auto"):
        return
    host, _, port = address.rpartition(":")
    sentence = f"--topology.address is {address}; it must be HOST:PORT of a cluster's head, or auto"
    require(bool(host) and port.isdigit() and 0 < int(port) < 1 << 16 and "/" not in host, sentence)
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_SECONDS).close()
    except OSError as error:
        raise UserError(
            f"nobody listens at {address} ({error.strerror or error}); start a cluster with "
            f"`ray start --head --port {port}` on {host}, or leave --topology.address out"
        ) from None


def check_token(address: str) -> None:
    """Refuse to join a cluster that does not know this process's token, before a run directory is made. What Ray writes
    of it to the terminal comes from below Python, and only the file descriptor can be kept from it."""
    import_ray()
    from ray._private.services import canonicalize_bootstrap_address
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.exceptions import AuthenticationError, RayError

    found = canonicalize_bootstrap_address(address) if address == "auto" else address
    require(bool(found), "--topology.address is auto, but no Ray cluster is to be found on this host")
    try:
        with _silent():
            GcsClient(address=found)
    except AuthenticationError:
        raise UserError(
            f"the cluster at {found} refuses this process's token; set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN here to "
            "what they are where the cluster was started"
        ) from None
    except RayError as error:
        raise UserError(f"no Ray cluster answers at {found} ({in_words(error)})") from None


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def import_ray() -> Any:
    os.environ.update({name: value for name, value in QUIET.items() if name not in os.environ})
    try:
        import ray
    except ImportError:
        raise UserError("this run needs Ray; install it with `pip install 'phalanx[cluster]'`") from None
    return ray


@contextlib.contextmanager
def running(address: str) -> Iterator[Any]:
    """Ray, joined where an address is given, else started here; it is gone afterwards. It prints an account of every
    death in its midst; what there is to tell of one, the fleet tells."""
    ray = import_ray()
    logging.getLogger("ray").setLevel(logging.ERROR)
    sys.modules["ray._private.worker"].print_to_stdstream = lambda *_, **__: None  # type: ignore[attr-defined]
    with _joined(ray, address) if address else _local(ray):
        yield ray


@contextlib.contextmanager
def _joined(ray: Any, address: str) -> Iterator[None]:
    check_address(address)
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", JOIN_TRIES)
    with _signals_kept():
        try:
            ray.init(address=address, namespace=f"phalanx-{secrets.token_hex(8)}", **SILENT)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UserError(f"no Ray cluster could be joined at {address} ({in_words(error)})") from None
    try:
        yield
    finally:
        _shut_down(ray)


@contextlib.contextmanager
def _local(ray: Any) -> Iterator[None]:
    directory = tempfile.mkdtemp(prefix="phalanx-", dir=None if len(tempfile.gettempdir()) < 16 else "/tmp")
    changed = {
        janitor.MARK: directory,
        "PYTHONPATH": os.pathsep.join(module_path()),  # what runs there is what runs here
    }
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # nobody else on this machine may send it work
    cleaner = subprocess.Popen(
        [sys.executable, "-I", "-S", str(janitor.__file__), directory], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        place = store_directory(directory)
        with _signals_kept(), _needless_left_out(), _environment(changed):  # Ray hands it on to all its processes
            try:
                ray.init(
                    num_cpus=ROOM,
                    num_gpus=0,
                    include_dashboard=False,
                    object_store_memory=STORE,
                    _temp_dir=directory,
                    _plasma_directory=place,
                    _node_ip_address="127.0.0.1",
                    **SILENT,
                )
            except Exception as error:  # Ray raises that very class when its processes do not start in time
                raise RunError(f"Ray could not be started ({in_words(error)})") from error
        yield
    finally:
        _shut_down(ray)
        assert cleaner.stdin is not None
        cleaner.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            cleaner.wait(JANITOR_SECONDS)


SILENT: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}


def store_directory(otherwise: str) -> str:
    """Where the object store lies: in shared memory where there is room for it, as is not so in many containers."""
    shared = Path("/dev/shm")
    with contextlib.suppress(OSError):
        if shutil.disk_usage(shared).free > 2 * STORE and os.access(shared, os.W_OK):
            return str(shared)
    require(
        shutil.disk_usage(otherwise).free > 2 * STORE,
        f"neither /dev/shm nor {tempfile.gettempdir()} has {2 * STORE >> 20} MiB free for Ray's object store",
    )
    return otherwise


def _shut_down(ray: Any) -> None:
    with contextlib.suppress(Exception):  # of a Ray that is broken the janitor takes care
        ray.shutdown()


@contextlib.contextmanager
def _needless_left_out() -> Iterator[None]:
    """Ray has no option for it."""
    node = sys.modules["ray._private.node"].Node
    kept = {name: getattr(node, name) for name in NEEDLESS if hasattr(node, name)}
    try:
        for name in kept:
            setattr(node, name, lambda *_, **__: None)
        yield
    finally:
        for name, method in kept.items():
            setattr(node, name, method)


@contextlib.contextmanager
def _environment(changed: dict[str, str]) -> Iterator[None]:
    """Only what is started meanwhile has these variables: processes that the run starts later are none of Ray's, and
    the janitor must leave them alone."""
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray sets up a handler of its own for SIGTERM; the session has one already."""
    handlers = {number: signal.getsignal(number) for number in STOPS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:
                signal.signal(number, handler)
