"""A process that hangs where no signal reaches it ends all the same, says where, and leaves nobody behind."""

from __future__ import annotations

import math
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import phalanx
from phalanx.runtime import watchdog
from phalanx.runtime.watchdog import Watchdog
from whole_runs import descendants, newest

ROOT = Path(phalanx.__file__).parent.parent
HANG = """
import ctypes
def hang(*arguments):
    \"\"\"In the system, uninterruptibly for Python: a mutex locked twice.\"\"\"
    library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    print("hangs", flush=True)
    while True:
        library.pthread_mutex_lock(mutex)
"""


def start(program: str, *arguments: str) -> subprocess.Popen[str]:
    """A program with `hang`, which says so when it does."""
    process = subprocess.Popen(
        [sys.executable, "-c", HANG + textwrap.dedent(program), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    while line := process.stdout.readline():
        if line == "hangs\n":
            return process
    pytest.fail(process.communicate()[1])


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Its exit code and what it said."""
    try:
        output, error = process.communicate(timeout=30)
    finally:
        process.kill()
    return process.returncode, output + error


TRAIN = """
import contextlib
import sys
from phalanx.cli.main import main
from phalanx.learning.learner import Learner
from phalanx.runtime import watchdog
from phalanx.runs.session import Session

watchdog.OBEYED, learn, recording = 0.5, Learner.learn, Session.recording

def learns_for_a_while(self, experience):
    return hang() if self.clocks.now().updates >= 20 else learn(self, experience)

@contextlib.contextmanager
def watched(self, *arguments):
    with recording(self, *arguments):
        self.watchdog.silence = float(sys.argv[1])
        yield

Learner.learn, Session.recording = learns_for_a_while, watched
sys.exit(main(["train", "a2c-catch", *sys.argv[2:]]))
"""


class TestTraining:
    flags = (
        "--topology",
        "synchronous",
        "--sampler.workers",
        "2",
        "--run.checkpoint-updates",
        "5",
        "--run.name",
        "run",
    )

    @pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
    def test_that_hangs_obeys_signals(self, tmp_path, number):
        process = start(TRAIN, "inf", *self.flags, "--run.directory", str(tmp_path))
        children = descendants(process.pid)
        assert len(children) == 2
        os.kill(process.pid, number)
        code, said = ended(process)
        assert code == 1
        assert "asked to stop 0.5 s ago, the process hangs" in (tmp_path / "run/events.log").read_text()
        assert "learns_for_a_while" in said  # where
        assert newest(tmp_path / "run").steps > 0
        deadline = time.monotonic() + 10
        while alive := [child for child in children if Path(f"/proc/{child}").exists()]:
            assert time.monotonic() < deadline, alive
            time.sleep(0.02)

    def test_that_hangs_ends_by_itself(self, tmp_path):
        code, said = ended(start(TRAIN, "0.5", *self.flags, "--run.directory", str(tmp_path)))
        assert code == 1
        assert "nothing has happened for 0.5 s" in (tmp_path / "run/events.log").read_text()
        assert "learns_for_a_while" in said

    def test_that_goes_on_is_left_alone(self, train, monkeypatch):
        monkeypatch.setattr(watchdog, "LOOK", 0.01)
        monkeypatch.setattr(watchdog.os, "_exit", lambda code: pytest.fail("ended a run that went on"))
        wakeup = signal.set_wakeup_fd(-1)
        assert train("a2c-catch", "--topology", "serial", steps=5_000) == 0
        assert signal.set_wakeup_fd(wakeup) == -1  # given back


class TestTheLastWords:
    def test_may_hang_as_well(self):
        process = start(
            """
            from phalanx.runtime import watchdog
            watchdog.FAREWELL = 0.5
            with watchdog.Watchdog(lambda: 0, lambda: False, hang) as dog:
                dog.silence = 0.2
                hang()
            """
        )
        assert ended(process)[0] == 1


@pytest.fixture
def ends(monkeypatch):
    """Why the watchdog would have ended the process."""
    sentences: list[str] = []
    monkeypatch.setattr(watchdog, "LOOK", 0.01)
    monkeypatch.setattr(watchdog, "OBEYED", 0.1)
    monkeypatch.setattr(Watchdog, "_end", lambda self, sentence: sentences.append(sentence))
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    yield sentences
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def dog(ends):
    """One that watches this process, whose `signs` are those of life."""
    dog = Watchdog(lambda: dog.signs, lambda: dog.busy, ends.append)
    dog.signs, dog.busy = 0, False
    with dog:
        yield dog


def first(ends):
    """What it would have ended for, sooner or later."""
    deadline = time.monotonic() + 30
    while not ends:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return ends[0]


def test_it_waits_while_a_checkpoint_is_written(dog, ends, monkeypatch):
    dog.busy, dog.silence = True, 0.1
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.5)
    assert not ends
    dog.silence = math.inf
    dog.busy = False
    assert "asked to stop" in first(ends)


def test_it_does_not_wait_for_ever(dog, ends, monkeypatch):
    monkeypatch.setattr(watchdog, "EXCUSED", 0.3)
    dog.busy = True
    os.kill(os.getpid(), signal.SIGTERM)
    assert "asked to stop" in first(ends)


def test_other_signals_do_not_matter(dog, ends):
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    os.kill(os.getpid(), signal.SIGALRM)
    time.sleep(0.5)
    signal.signal(signal.SIGALRM, before)
    assert not ends


def test_signs_of_life_are_heard(dog, ends):
    dog.silence = 1.0
    for _ in range(30):
        time.sleep(0.05)
        dog.signs += 1
    assert not ends
    assert "nothing has happened for 1 s" in first(ends)


def test_long_work_without_a_sign_is_excused(dog, ends):
    dog.silence = 0.2
    with dog.patient():
        time.sleep(0.6)
    assert not ends


def test_a_process_that_was_stopped_was_not_silent():
    """It continues long after the silence that ends one."""
    process = start(
        """
        import signal, time
        from phalanx.runtime import watchdog
        with watchdog.Watchdog(lambda: 0, lambda: False, print) as dog:
            dog.silence = 1.5
            print("hangs", flush=True)
            time.sleep(1.2)  # begins anew when it continues
        """
    )
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(2.5)
    os.kill(process.pid, signal.SIGCONT)
    assert ended(process)[0] == 0


def test_a_child_that_was_forked_is_another_process(dog, ends):
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)  # handled, but not told to the parent
        time.sleep(1)
        os._exit(0)
    time.sleep(0.6)
    assert not ends
    dog.__exit__()  # does not wait for the child
    assert dog.thread.is_alive() is False
    os.waitpid(child, 0)
    dog.__enter__()


def test_descriptors_may_be_many(ends):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2000, limits[1]), limits[1]))
    many = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with Watchdog(lambda: 0, lambda: False, ends.append) as dog:
            assert dog.reader.fileno() > 1024
            time.sleep(0.1)
            assert dog.thread.is_alive()
    finally:
        for descriptor in many:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
