"""Agents: env workers that wait for nobody but their own actions. Any number of them plays, and it may change.

    owner: request([3, 7])  -> agents 3 and 7 wake, and step their environments into their rows of the shared buffer
    owner: arrived()        <- the agents whose step is done, in whatever order they came

An agent is an env worker (worker.py) that wakes its owner after its own steps. Agents beyond the number that is to play
rest: their processes sleep, and their games stand still until they are wanted again. Any thread may call `arrived`,
`request` and `wait`; processes are started, looked after and asked by one thread only.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from phalanx.errors import RunError
from phalanx.runtime.child import START_TIMEOUT
from phalanx.sampling.handle import WorkerHandle
from phalanx.sampling.pool import WorkerPool
from phalanx.sampling.slot import EnvFactory, SlotRules, too_long_to_restore
from phalanx.types import EnvStep

LOOK_AGAIN = 0.05  # seconds after which one looks without having been woken
SPARE = 32  # descriptors that must stay free for checkpoints and successors when an agent is added
STOPPED = 1.0  # seconds between two looks after which agents may not have run either, as the whole job was stopped


class Agents(WorkerPool):
    """Up to `capacity` env workers with `envs_per_agent` environments each; at first none is started."""

    free_running = True

    def __init__(
        self,
        factory: EnvFactory,
        capacity: int,
        envs_per_agent: int = 1,
        rules: SlotRules | None = None,
        timeout: float = 30.0,
        max_deaths: int = 1000,
        max_deaths_in_a_row: int = 10,
        report: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        super().__init__(
            factory, capacity, envs_per_agent, 1, rules, timeout, max_deaths, max_deaths_in_a_row, None, report
        )
        self.envs_per_agent = envs_per_agent
        self.rows = [[list(range(first, first + envs_per_agent))] for first in self.first_rows(np.arange(capacity))]
        self.step: EnvStep = self.exchange.step
        self.playing = 0  # agents with lower numbers play, the others rest
        self.up: list[bool] = []  # of those started: have they made their environments?
        self.messages = select.poll()  # what the thread that looks after them hears: words and deaths
        self.places: dict[int, int] = {}  # descriptor -> agent
        self.heard = np.zeros(capacity)  # when an agent was last known to be alive,
        self.heartbeats = np.zeros(capacity)  # and its heartbeat then
        self.looked = 0.0  # when somebody looked for those that hang

    @property
    def capacity(self) -> int:
        return self.layout.workers

    @property
    def started(self) -> int:
        return len(self.workers)

    def first_rows(self, agents: np.ndarray) -> Any:
        return agents * self.envs_per_agent

    def rows_of(self, agents: np.ndarray) -> np.ndarray:
        """The rows of these agents' environments, in their order."""
        rows = self.first_rows(agents)[:, None] + np.arange(self.envs_per_agent)
        return rows.ravel()

    def play(self, count: int) -> None:
        """So many agents are to play from now on; those that were never started begin with their first step. Raises
        OSError where the system starts no more of them; then those there are play."""
        try:
            with self._spare_descriptors() if count > self.started else contextlib.nullcontext():
                for number in range(self.started, count):
                    self._add(number)
        finally:
            self.playing = min(count, self.started)

    def arrived(self) -> np.ndarray:
        """Agents whose newest step is done and that were not asked for another, by number."""
        requests = self.exchange.requests[0]
        return np.flatnonzero((requests == self.exchange.dones[0]) & (requests > 0))

    def request(self, agents: np.ndarray) -> None:
        """Have agents take their next step, with the actions that stand in `exchange.action`. A thread that was left
        behind asks nobody: the descriptors may be others' by now."""
        if self.closed:
            return
        self.exchange.requests[0, agents] += 1
        for number in agents.tolist():
            os.eventfd_write(self.workers[number].wake, 1)

    def wait(self, seconds: float) -> None:
        """Until an agent has arrived or somebody called `wake`; it may also have been for nothing."""
        self.epoll.poll(max(0.0, seconds))

    def wake(self) -> None:
        if not self.closed:
            os.eventfd_write(self.owner_wake, 1)

    def look_after(self) -> None:
        """Hear who is up, and replace who has died or hangs; waits for nobody."""
        heard = {descriptor for descriptor, _ in self.messages.poll(0)}
        for number in {self.places[descriptor] for descriptor in heard}:  # once: a successor may get the same ones
            worker = self.workers[number]
            if worker.death_watch not in heard and not self.up[number] and worker.hear() == "ready":
                self.up[number] = True
            else:
                worker.kill()
                self._replace(worker)
        self._replace_hung()

    def all_arrived(self, seconds: float) -> bool:
        """Wait until every agent is up and none steps any more, while nobody asks for steps."""
        deadline = time.monotonic() + seconds
        while True:
            self.look_after()
            if all(self.up) and len(self.arrived()) == self.started:
                return True
            if time.monotonic() > deadline:
                return False
            self.wait(LOOK_AGAIN)

    def state(self) -> dict[str, Any]:
        """What the games go on from. No agent may be stepping."""
        slots: dict[int, Any] = {}
        for number in range(self.started):
            while not isinstance(answer := self.workers[number].question("state"), dict):
                self._renew(number)  # it died since its last step, or of this
            slots.update(answer)
        step = {name: getattr(self.step, name)[: len(slots)].copy() for name in vars(self.step)}
        return {"slots": [slots[row] for row in sorted(slots)], "step": step, "births": self.births}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on with the games of a saved state, each of which has just arrived."""
        slots = state["slots"]
        self.play(len(slots) // self.envs_per_agent)
        if not self.all_arrived(START_TIMEOUT):
            raise RunError(f"the environments were not made within {START_TIMEOUT:g} s")
        self.births = max(state["births"], *(slot["incarnation"] for slot in slots))
        questions = {number: {row: slots[row] for row in self._rows(number)} for number in range(self.started)}
        for number, answer in zip(questions, self._ask_all("restore", questions), strict=True):
            while answer is not True:
                if words := self.workers[number].traceback:
                    raise RunError(f"env worker {number} cannot restore its environments: {words}")
                self._renew(number)  # it was killed from outside; a successor may take its place
                (answer,) = self._ask_all("restore", {number: questions[number]})
        for name, values in state["step"].items():
            getattr(self.step, name)[: len(slots)] = values
        if sentence := too_long_to_restore(slots):
            self.report(sentence)

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _spare_descriptors(self) -> Iterator[None]:
        """Take some while agents are added, so that these are not the last ones."""
        with contextlib.ExitStack() as spare:
            for _ in range(SPARE):
                spare.callback(os.close, os.dup(self.owner_wake))
            yield

    def _add(self, number: int) -> None:
        """Start one that was never started; nothing of it is left if that fails."""
        handle = WorkerHandle(number, 0, os.eventfd(0, os.EFD_NONBLOCK))
        try:
            self._launch(handle)
        except BaseException:  # a signal may interrupt it as well
            if handle.process is not None:
                handle.kill()
            handle.release()
            os.close(handle.wake)
            raise
        self.workers.append(handle)
        self.up.append(False)
        self.request(np.array([number]))

    def _launch(self, handle: WorkerHandle) -> None:
        """Start a process and listen to it."""
        self._begin(handle)
        assert handle.control is not None
        for descriptor in (handle.control.fileno(), handle.death_watch):
            self.messages.register(descriptor, select.POLLIN)
            self.places[descriptor] = handle.number
        self.heard[handle.number] = time.monotonic()

    def _replace(self, dead: WorkerHandle) -> None:
        """Name a death and start a successor, whose environments cut off what was begun."""
        for descriptor, number in list(self.places.items()):
            if number == dead.number:
                self.messages.unregister(descriptor)
                del self.places[descriptor]
        self._note_death(dead)
        self.up[dead.number] = False
        self._launch(self._successor(dead))

    def _renew(self, number: int) -> None:
        """Replace an agent that gave no answer, and wait until its successor is up."""
        self.workers[number].kill()
        self._replace(self.workers[number])
        deadline = time.monotonic() + START_TIMEOUT
        while not self.up[number]:
            if time.monotonic() > deadline:
                raise RunError(f"env worker {number} did not get ready within {START_TIMEOUT:g} s")
            self.look_after()
            self.wait(LOOK_AGAIN)

    def _replace_hung(self) -> None:
        """Those that were asked for a step and gave no sign of life for too long."""
        exchange, now, count = self.exchange, time.monotonic(), self.started
        idle = exchange.requests[0, :count] == exchange.dones[0, :count]
        alive = idle | (exchange.heartbeat[:count] != self.heartbeats[:count]) | (now - self.looked > STOPPED)
        self.looked = now
        self.heard[:count][alive] = now
        self.heartbeats[:count] = exchange.heartbeat[:count]
        for number in np.flatnonzero(now - self.heard[:count] > self.timeout).tolist():
            if self.up[number] or now - self.heard[number] > START_TIMEOUT:
                self.report(f"env worker {number} gave no step for {now - self.heard[number]:.0f} s; it is killed")
                self.workers[number].kill()
                self._replace(self.workers[number])
