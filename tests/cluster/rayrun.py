"""A run of the command line on a local Ray, in processes that a test can find, kill and count."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from safetensors.torch import load_file

from phalanx.cluster import janitor

MARK = "PHALANX_TEST_RUN"
PLACE = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))  # for what Ray keeps in files; short, for the names of sockets
atexit.register(shutil.rmtree, PLACE, ignore_errors=True)
ROOT = Path(__file__).parents[2]


class RayRun:
    """`phalanx train ...`, marked by a variable that all its processes inherit."""

    def __init__(self, directory, *arguments, environment=None, before=()):
        self.mark = uuid.uuid4().hex
        self.directory = directory / "run"
        command = [*before, sys.executable, "-m", "phalanx", "train", *arguments, "--run.name", "run"]
        command += ["--run.directory", str(directory), "--run.log-every", "0.5"]
        self.output = (directory / "output").open("w+")
        environment = {**os.environ, "TMPDIR": str(PLACE), MARK: self.mark, **(environment or {})}
        self.driver = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=self.output, stderr=subprocess.STDOUT, start_new_session=True
        )

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for process in [self.driver.pid, *self.processes()]:
            kill(process)
        self.driver.wait(60)
        self.output.close()

    def processes(self, kind=""):
        """Those that live, the driver aside; of one kind by how Ray calls them. Ray's agents write a title over their
        environment: they are known by the files that they have open in a run's directory."""
        found = []
        for entry in os.listdir("/proc"):
            if not entry.isdigit() or int(entry) == self.driver.pid:
                continue
            try:
                environment = Path("/proc", entry, "environ").read_bytes()
                words = Path("/proc", entry, "cmdline").read_bytes()
            except OSError:
                continue
            ours = f"{MARK}={self.mark}".encode() in environment
            if not ours and words.startswith(janitor.TITLE):
                with contextlib.suppress(OSError):
                    ours = any(file.startswith(f"{PLACE}/phalanx-") for file in janitor.open_files(int(entry)))
            if ours and kind.encode() in words:
                found.append(int(entry))
        return found

    def kill_one(self, kind, number=0):
        self.wait(lambda: self.processes(kind), f"no process {kind}")
        process = sorted(self.processes(kind))[number]
        kill(process)
        return process

    def nodes(self):
        """Processes of members that have simulators of their own, which are their children."""
        members = set(self.processes("ray::Host"))
        return sorted({parent_of(process) for process in self.processes()} & members)

    def records(self):
        """Those that are whole: the last one may be about to be written."""
        with contextlib.suppress(OSError):
            lines = (self.directory / "metrics.jsonl").read_text().splitlines(keepends=True)
            return [json.loads(line) for line in lines if line.endswith("\n")]
        return []

    def events(self):
        try:
            return (self.directory / "events.log").read_text()
        except OSError:
            return ""

    def wait_for_updates(self, more=5):
        """So many more than there are now."""
        before = self.updates
        self.wait(lambda: self.updates >= before + more, "no further update")

    def wait_for_event(self, words, times=1):
        self.wait(lambda: self.events().count(words) >= times, f"nobody said: {words}")

    @property
    def score(self):
        records = self.records()
        return (records[-1]["score"] or 0.0) if records else 0.0

    @property
    def updates(self):
        records = self.records()
        return records[-1]["updates"] if records else 0

    def wait(self, condition, otherwise, seconds=120.0):
        deadline = time.monotonic() + seconds
        while not condition():
            text = (self.directory.parent / "output").read_text()
            assert self.driver.poll() is None, f"the run has ended: {text}"
            assert time.monotonic() < deadline, f"{otherwise}: {text} {self.events()}"
            time.sleep(0.1)

    def end(self, number=signal.SIGINT):
        """Stop the run, and see that nothing of it is left."""
        self.driver.send_signal(number)
        code = self.driver.wait(60)
        self.nothing_is_left()
        return code

    def nothing_is_left(self):
        deadline = time.monotonic() + 30
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.1)
        left = [Path("/proc", str(process), "cmdline").read_bytes() for process in self.processes()]
        assert not left, left


def newest_weights(run):
    checkpoints = sorted((run.directory / "checkpoints").glob("step-*"))
    return load_file(checkpoints[-1] / "model.safetensors")


def parent_of(process):
    try:
        return int(Path("/proc", str(process), "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def kill(process):
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def ray_directories():
    """Of the runs that this process has started."""
    return set(PLACE.glob("phalanx-*"))
