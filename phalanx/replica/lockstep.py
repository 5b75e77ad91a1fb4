"""Replicas that make every update together: their team, as the parent sees it, and their part in it.

    parent: LockstepTeam                              replica: Member
    waits until all have asked for a group   <------  "waiting", with the version it has
    says which group, and whose parameters   ------>  forms it, takes those parameters over, iterates with the others
    names a dead one, starts a successor              loses its peers, leaves the group at once, asks for another one
    "state" to all                           ------>  all answer after the same iteration

Replicas agree on the clocks once an iteration. What their parent asks goes with that, so that all of them do it after
the same iteration, and every hundredth time so does a checksum of what must be the same everywhere.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from phalanx.errors import RunError
from phalanx.parameters.allreduce import AllReduceStore
from phalanx.parameters.flat import FlatParameters
from phalanx.replica.replica import Replica
from phalanx.replica.report import Snapshot
from phalanx.replica.team import EMPTY, Answer, Mailbox, Team
from phalanx.runtime.child import Parent
from phalanx.runtime.clocks import LockstepClocks, sum_in_lockstep
from phalanx.runtime.group import Group, PeerLost, meeting_point
from phalanx.runtime.share import Share
from phalanx.types import Progress

LONGEST_ANSWER = 600.0  # seconds that all replicas may take to tell their states, deaths and all
CHECK_EVERY = 100  # agreements between two checks that all replicas are the same


@dataclass(frozen=True)
class GroupInvitation:
    """What a replica is told of how it meets the others."""

    port: int
    nccl: bool
    question: int  # the newest that was asked of all
    initial_state: tuple[dict[str, Tensor], dict[str, Any]] | None  # of the checkpoint to go on from: parameters, store


@dataclass(frozen=True)
class State:
    """A replica's answer to a question."""

    question: int
    joined: bool  # was it ever in a group? Then it knows the parameters of the run
    weights: dict[str, Tensor]
    store: dict[str, Any]
    clocks: np.ndarray  # its row
    replica: dict[str, Any] | None


class LockstepTeam(Team):
    """Replicas in lock step, on one host."""

    def __init__(
        self,
        *,
        experiment: Any,
        target: str,
        shares: list[Share],
        model: FlatParameters,
        nccl: bool,
        event: Callable[[str], None],
    ) -> None:
        super().__init__(experiment=experiment, target=target, shares=shares, model=model, event=event)
        self.nccl = nccl
        self.meeting = meeting_point()
        self.groups = 0  # formed so far
        self.waiting: dict[int, tuple[bool, int]] = {}  # replicas that want a group, with what they know of the run
        self.question = 0
        self.answers: dict[int, State] = {}
        self.initial_state: tuple[dict[str, Tensor], dict[str, Any]] | None = None
        self.lost_at = 0.0  # when the group lost a member

    def __enter__(self) -> LockstepTeam:
        return self

    @property
    def progress(self) -> Progress:
        return sum_in_lockstep(self.clocks.rows)

    def notes(self) -> list[str]:
        through = "NCCL" if self.nccl else "gloo"
        return [
            f"{len(self.shares)} replicas in lock step, {self.model.flat.numel():,} parameters each, over {through}"
        ]

    def weights(self) -> dict[str, Tensor]:
        return self._newest(self._ask_all(with_envs=False)).weights

    def snapshot(self, with_envs: bool = True) -> Snapshot:
        """Of the same iteration of all replicas. Those that look for a group answer at once."""
        answers = self._ask_all(with_envs)
        newest = self._newest(answers)
        rows = np.stack([answers[rank].clocks if rank in answers else self.clocks.rows[rank] for rank in self._ranks])
        states = [answers[rank].replica if rank in answers else None for rank in self._ranks]
        return Snapshot(newest.weights, sum_in_lockstep(rows), newest.store, [state or EMPTY for state in states])

    def restore(self, snapshot: Snapshot, directory: Path) -> None:
        self.model.load(snapshot.weights)
        self.clocks.restore(snapshot.clocks)
        self.initial_state = snapshot.weights, snapshot.store
        self._restore_states(snapshot)

    @property
    def _ranks(self) -> range:
        return range(len(self.shares))

    def _shared(self) -> GroupInvitation:
        return GroupInvitation(self.meeting.port, self.nccl, self.question, self.initial_state)

    def _take(self, rank: int, kind: str, content: Any) -> None:
        if kind == "waiting":
            self.waiting[rank] = content
            self._form_group()
        elif kind == "state" and content.question == self.question:
            self.answers[rank] = content

    def _lost(self, rank: int) -> None:
        if self.nccl:
            raise RunError(
                f"replica {rank} died, and over NCCL the others cannot go on without it; resume the run, or use "
                "--topology.exchange gloo"
            )
        self.waiting.pop(rank, None)
        self.answers.pop(rank, None)
        self.lost_at = time.monotonic()

    def _form_group(self) -> None:
        """Once everybody waits: the group goes on with what the one that is furthest has."""
        if len(self.waiting) < len(self.children) or len(self.children) < len(self.shares):
            return
        source = max(self.waiting, key=lambda rank: (*self.waiting[rank], -rank))
        self.waiting.clear()
        for child in self.children:
            child.tell(("group", self.groups, source))
        self.groups += 1
        self.initial_state = None
        if self.lost_at:
            self.event(f"the replicas go on together, {time.monotonic() - self.lost_at:.1f} s after the loss")
            self.lost_at = 0.0

    def _replace_hung(self) -> None:
        for rank in self.waiting:  # it is others that they wait for
            self.heard[rank] = self._now()
        super()._replace_hung()

    def _ask_all(self, with_envs: bool) -> dict[int, State]:
        """The states of all replicas, of the same iteration; with nobody alive, nothing."""
        self.question += 1
        self.answers.clear()
        for child in self.children:
            child.tell(("state", self.question, with_envs))
        deadline = time.monotonic() + LONGEST_ANSWER
        while any(child.is_reachable and rank not in self.answers for rank, child in enumerate(self.children)):
            if time.monotonic() > deadline:
                raise RunError(f"the replicas do not tell their states within {LONGEST_ANSWER:g} s")
            for rank in self._ready(0.2):
                answer = self._hear(rank)
                if answer is not None and answer[0] == "report":
                    self.backlog.append(self._as_of_now(answer[1]))
            self._replace_hung()
        return dict(self.answers)

    def _newest(self, answers: dict[int, State]) -> State:
        """The answer of a replica that is furthest; before the first group, what the run begins with."""
        known = [answer for answer in answers.values() if answer.joined]
        if known:
            return max(known, key=lambda answer: int(answer.store["version"]))
        weights, store = self.initial_state or (self.model.named_tensors(), {})
        answer = next(iter(answers.values()), None)
        return State(0, False, weights, store or (answer.store if answer else {}), self.clocks.rows[0], None)


class Member:
    """A replica's part in the team: it iterates together with the others, whoever they are."""

    def __init__(
        self,
        replica: Replica,
        clocks: LockstepClocks,
        parent: Parent,
        share: Share,
        invitation: GroupInvitation,
        timeout: float,
    ) -> None:
        store = replica.store
        assert isinstance(store, AllReduceStore)
        self.replica = replica
        self.store = store
        self.clocks = clocks
        self.parent = parent
        self.share = share
        self.nccl = invitation.nccl
        self.timeout = timeout  # seconds for which it waits for others within an iteration
        self.mailbox = Mailbox(parent)
        self.meeting = meeting_point(invitation.port)
        self.joined = False
        self.agreements = 0
        self.question, self.with_envs = invitation.question, True  # the newest that was heard
        self.last_answered = 0
        self.newest_question_of_all = 0  # the newest that all have heard
        clocks.gather = self.agree

    def run(self, last_step: int) -> None:
        """The loop of a replica. When a member of the group is lost, the rest of the iteration is given up."""
        self.join()
        while self.clocks.now().steps < last_step:
            try:
                self.mailbox.post(self.replica.iterate(run_ahead=False))
            except PeerLost:
                self.join()
            if self.newest_question_of_all > self.last_answered:
                self.answer()
        self.mailbox.post_the_rest()
        while True:
            self.hear()
            self.answer()

    def join(self) -> None:
        """Leave the group, if there is one, and wait for the next; a group that does not come about is given up."""
        while True:
            self.store.leave()
            self.parent.tell(("waiting", (self.joined, self.store.version)))
            self.answer()
            while (order := self.hear()) is None:
                self.answer()
            number, source = order
            try:
                group = Group(
                    self.meeting,
                    number,
                    self.share.rank,
                    self.share.count,
                    self.timeout,
                    self.nccl,
                )
                self.store.join(group, source)
                self.agreements = 0
                self.clocks.reach(self.store.version)
                self.clocks.agree()
            except PeerLost:
                continue
            self.joined = True
            return

    def agree(self, row: np.ndarray) -> np.ndarray:
        """Everybody's row of the clocks. With it goes what was heard of the parent, and now and then a checksum."""
        if self.store.group is None:
            raise PeerLost("the group was left")
        while select.select([self.parent.control], [], [], 0)[0]:
            self.hear()
        check = self.store.checksum() if self.agreements % CHECK_EVERY == 0 else 0
        self.agreements += 1
        rows = self.store.group.gather(np.array([*row, self.question, check]))
        if len(set(rows[:, -1].tolist())) > 1:
            raise RunError(
                f"the replicas differ after update {self.clocks.now().updates}, which must not happen: the memory of "
                "this machine may be damaged; resume from the newest checkpoint"
            )
        self.newest_question_of_all = int(rows[:, -2].min())
        return rows[:, :-2]

    def hear(self) -> tuple[int, int] | None:
        """The next message of the parent: the number of a group and whose parameters it begins with, or a question,
        which is answered later."""
        kind, *content = self.parent.hear()
        if kind == "group":
            return content[0], content[1]
        self.question, self.with_envs = content
        return None

    def answer(self) -> None:
        """Tell the parent what it has asked for."""
        if self.question <= self.last_answered:
            return
        state = self.replica.state() if self.with_envs else None
        weights, store = self.replica.weights(), self.store.state()
        answer: Answer = ("state", State(self.question, self.joined, weights, store, self.clocks.own.copy(), state))
        self.parent.tell(answer)
        self.last_answered = self.question
