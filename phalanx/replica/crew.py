"""Threads that do one kind of work each, turn by turn: how many there are may change, all of them can be made to pause,
and what one of them fails of reaches the thread that looks after them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

from phalanx.errors import RunError
from phalanx.runtime.deadline import Deadline

TURN = 0.05  # seconds that a turn may wait for work


class Hand(Protocol):
    """Somebody who works in a thread."""

    def turn(self, seconds: float) -> None:
        """Do what there is to do; wait for it for so long at most."""

    def leave(self) -> None:
        """The thread ends: give back what is not done."""


class Gate:
    """Threads pass it before each turn. Who shuts it waits until nobody is at work."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.inside = 0
        self.is_shut = False

    @contextlib.contextmanager
    def passed(self, seconds: float) -> Iterator[bool]:
        """Is it open, or opened within so long? If so it cannot be shut while this context lasts."""
        with self.changed:
            is_open = self.changed.wait_for(lambda: not self.is_shut, seconds)
            self.inside += is_open
        try:
            yield is_open
        finally:
            with self.changed:
                self.inside -= is_open
                self.changed.notify_all()

    @contextlib.contextmanager
    def shut(self, seconds: float) -> Iterator[None]:
        """Nobody is at work while this context lasts, nor after it if it was shut before. Raises RunError if somebody
        does not end their turn in time."""
        was_shut = self.is_shut
        try:
            self.close(seconds)
            yield
        finally:
            if not was_shut:
                self.open()

    def close(self, seconds: float) -> None:
        """The same until it is opened again."""
        with self.changed:
            self.is_shut = True
            if not self.changed.wait_for(lambda: not self.inside, seconds):
                raise RunError(f"a thread did not end its turn within {seconds:g} s")

    def open(self) -> None:
        with self.changed:
            self.is_shut = False
            self.changed.notify_all()


class Crew:
    """The threads of one kind of work, numbered from 0."""

    def __init__(self, name: str, hire: Callable[[int], Hand], gate: Gate, alarm: threading.Event) -> None:
        self.name = name
        self.hire = hire  # makes the one with that number; who left is not made again
        self.gate = gate
        self.alarm = alarm  # set when one fails
        self.hands: list[Hand] = []
        self.threads: dict[int, threading.Thread] = {}
        self.wanted = 0
        self.dismissed = False
        self.lock = threading.Lock()
        self.failure: BaseException | None = None

    def resize(self, count: int) -> None:
        """So many are to work. Those that are too many end after their turn."""
        while len(self.hands) < count:
            self.hands.append(self.hire(len(self.hands)))
        with self.lock:
            self.wanted = count
            for number in range(count):
                if number not in self.threads:
                    name = f"{self.name} {number}"
                    self.threads[number] = threading.Thread(target=self._work, args=(number,), name=name, daemon=True)
                    self.threads[number].start()

    def dismiss(self) -> None:
        """None is wanted any more, and nobody waits for a gate that is shut."""
        with self.lock:
            self.wanted, self.dismissed = 0, True

    def close(self, end: Deadline) -> None:
        """End all of them by then; a thread that does not end is left behind, and dies with the process."""
        self.dismiss()
        for thread in list(self.threads.values()):
            thread.join(end.left)

    def _work(self, number: int) -> None:
        hand = self.hands[number]
        try:
            while not self.dismissed:
                with self.gate.passed(TURN) as is_open:
                    if is_open and not self._is_wanted(number):
                        return
                    if is_open:
                        hand.turn(TURN)
        except BaseException as error:
            self.failure = error
            self.alarm.set()

    def _is_wanted(self, number: int) -> bool:
        """If not, the thread is as good as gone: should it be wanted again, another is started. What it gives back is
        part of its last turn, so that it is there once the gate is shut."""
        with self.lock:
            if number < self.wanted:
                return True
            self.hands[number].leave()
            del self.threads[number]
            return False
