"""Several hosts on this one: network namespaces that are joined by a virtual cable."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time

import pytest


def run(*words):
    subprocess.run(words, check=True, capture_output=True, timeout=30)


def may_make_hosts():
    """Is this root with iproute2, and may it make namespaces?"""
    if os.geteuid() or shutil.which("ip") is None or shutil.which("unshare") is None:
        return False
    name = f"phx-try-{os.getpid()}"
    try:
        run("ip", "netns", "add", name)
        run("ip", "netns", "exec", name, "unshare", "--mount", "--pid", "--fork", "--mount-proc", "true")
        run("ip", "link", "add", f"phx{os.getpid()}", "netns", name, "type", "veth", "peer", "name", "other")
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return False
    finally:
        with contextlib.suppress(subprocess.CalledProcessError, subprocess.TimeoutExpired):
            run("ip", "netns", "del", name)
    return True


class Hosts:
    """Two of them, at `addresses`. They share files, but neither a network nor, with `apart`, processes and memory."""

    def __init__(self):
        self.names = [f"phx-{os.getpid()}-{number}" for number in (1, 2)]
        self.addresses = ["10.213.7.1", "10.213.7.2"]
        self.children = []

    def __enter__(self):
        one, other = self.names
        try:
            for name in self.names:
                run("ip", "netns", "add", name)
                run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", one, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", other)
            for name, address in zip(self.names, self.addresses, strict=True):
                run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "cable")
                run("ip", "-n", name, "link", "set", "cable", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception):
        for child in self.children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait(60)
        for name in self.names:
            with contextlib.suppress(subprocess.CalledProcessError, subprocess.TimeoutExpired):
                inside = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, timeout=30)
                for process in map(int, inside.stdout.split()):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
                run("ip", "netns", "del", name)

    def start(self, number, *command, output, apart=False, **variables):
        """A command on one of the hosts."""
        words = ["ip", "netns", "exec", self.names[number]]
        words += ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"] if apart else []
        with output.open("ab") as file:
            child = subprocess.Popen(
                [*words, *command],
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **variables},
                start_new_session=True,
            )
        self.children.append(child)
        return child

    def unplug(self, number):
        run("ip", "-n", self.names[number], "link", "set", "cable", "down")


def wait_until(condition, seconds, otherwise):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, otherwise()
        time.sleep(0.2)


needs_hosts = pytest.mark.skipif(not may_make_hosts(), reason="network namespaces cannot be made here")
