"""synchronous with several replicas that torchrun starts, on one host or on many: every process is a replica.

    rank 0                                         rank 1, 2, ...
    the session: records, checkpoints, signals
    "iterate"  ------------------------------->    collect, agree on the clocks, gradients, mean, rule: as on one host
    takes in everybody's reports  <------------    report
    "state"    ------------------------------->    the state of the replica, for a checkpoint
    "leave"    ------------------------------->    ends

A process that dies ends all others at once, with a checkpoint and its rank in their last words; torchrun may then start
all of them again (`--max-restarts`), and they go on from that checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.config import Experiment
from phalanx.errors import RunError, UserError, require, tell
from phalanx.parameters.allreduce import AllReduceStore
from phalanx.probe import check_pieces, resolve_precision
from phalanx.replica.build import make_replica
from phalanx.replica.replica import Replica
from phalanx.replica.report import Report, Snapshot
from phalanx.replica.team import EMPTY
from phalanx.runs.checkpoint import Loaded
from phalanx.runs.directory import locked, new_directory, run_checkpoints
from phalanx.runs.keeper import as_state
from phalanx.runs.metrics import ScoreWindow
from phalanx.runs.session import Session
from phalanx.runtime.affinity import confine_to, cores_by_node
from phalanx.runtime.child import die_with_parent
from phalanx.runtime.clocks import LockstepClocks, sum_in_lockstep
from phalanx.runtime.device import Compute, choose_compute
from phalanx.runtime.group import LOOK, Group, PeerLost
from phalanx.runtime.launch import Launch
from phalanx.runtime.share import Share, divide_cores
from phalanx.seams import VectorEnvs
from phalanx.topologies.asynchronous import make_envs
from phalanx.topologies.lockstep import choose_nccl, make_store, own_gpus, settings
from phalanx.types import Progress

FORMING_TIMEOUT = 120.0  # seconds for which processes wait for each other at first: hosts differ in speed
LONGEST_WAIT = 3600.0  # seconds that rank 0 may take between two iterations, for an evaluation or a checkpoint
HEARTBEAT = 0.25  # seconds between two signs of life
SILENCE = 10.0  # seconds without one after which a process is dead, though its connections are open
FAREWELL = 5.0  # seconds that the last of them may take
ROLL_CALL = 1.2  # seconds without one after which a process is dead; a signal to stop leaves two for everything


def train(launch: Launch, experiment: Experiment, directory: Path | None = None) -> int:
    """A process of the job, whichever it is; the exit code. Rank 0's experiment is that of all, and `directory` that of
    a run which is resumed."""
    require(
        directory is not None or bool(experiment.run.name),
        "under torchrun give the run a name, so that a restart finds it: --run.name NAME",
    )
    end_with_launcher(launch)
    topology = dataclasses.replace(settings(experiment), replicas=launch.size)
    experiment = resolve_precision(dataclasses.replace(experiment, topology=topology).validate())
    if launch.rank == 0:
        check_pieces(experiment)
    place = directory or Path(experiment.run.directory) / experiment.run.name
    with Job(launch, place) as job:
        try:
            experiment = job.group.object_of(0, experiment)
            job.choose_exchange(experiment)
            return lead(job, experiment, directory) if launch.rank == 0 else follow(job, experiment)
        except PeerLost:
            if job.has_ended():  # rank 0 has said why
                return 0
            raise RunError(f"{job.find_dead_ranks()}, before the run began") from None


def end_with_launcher(launch: Launch) -> None:
    """Nobody may go on when torchrun was killed on this host: rank 0 then ends the run as after any signal, and the
    others of its host with it; those of another host are missed by it."""
    if launch.rank == 0:
        die_with_parent(signal.SIGTERM)
    elif launch.rank >= launch.local_size:
        die_with_parent()


class Job:
    """The processes that torchrun has started together, as one of them sees them."""

    def __init__(self, launch: Launch, directory: Path) -> None:
        self.launch = launch
        self.directory = directory
        cores = divide_cores(cores_by_node(), launch.local_size)[launch.local_rank]
        confine_to(cores)
        gpus = torch.cuda.device_count()
        device = f"cuda:{launch.local_rank % gpus}" if gpus > 1 else None
        self.share = Share(launch.rank, launch.size, cores, device)
        self.meeting = launch.meeting_point()
        self.nccl = False
        self.alive = set(range(launch.size))
        self.lost = False  # did a process die?
        self.heartbeat_keys = [f"heartbeats-{launch.restarts}-{rank}" for rank in range(launch.size)]
        self.end_key = f"ended-{launch.restarts}"
        self.counts = [0] * launch.size  # everybody's signs of life, as the heartbeat's thread last read them
        self.counts_before = list(self.counts)
        self.silences = [0.0] * launch.size  # seconds since the count of each was another one
        self.looked_at = time.monotonic()
        self.read_counts = threading.Event()  # somebody waits for the others, and wants to know whether they are alive
        self.ends = threading.Event()
        self.heartbeat_thread = threading.Thread(target=self._send_heartbeats, name="heartbeat", daemon=True)

    def __enter__(self) -> Job:
        self.heartbeat_thread.start()
        try:
            self.group = Group(
                self.meeting,
                self.launch.restarts,
                self.launch.rank,
                self.launch.size,
                LONGEST_WAIT,
                address=self.launch.address,
                forming=FORMING_TIMEOUT,
                watch=self.watch,
            )
        except PeerLost:
            words = f"{self.find_dead_ranks()}, before the run began"
            self._stop_heartbeats()
            raise RunError(words) from None
        except BaseException:
            self._stop_heartbeats()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        """The interpreter aborts if it ends while a thread of torch still needs it: the heartbeat within torch's store,
        or one of gloo that lets go of the tensors it has sent."""
        if self.launch.rank == 0 and not self.lost:
            self.end()
        self._stop_heartbeats()
        self.group.close()

    def choose_exchange(self, experiment: Experiment) -> None:
        """NCCL or gloo, as rank 0 decides when it knows whether every process has a GPU to itself."""
        own = own_gpus(choose_compute(experiment.run), self.launch.local_size)
        everybody = bool(self.group.gather(np.array([int(own)])).all())
        self.nccl = self.group.object_of(0, self.launch.rank == 0 and choose_nccl(experiment, everybody))
        if self.nccl:
            self.group.use_nccl()

    def end(self) -> None:
        """Rank 0 leaves the others, wherever they are: what they lose then has not died."""
        with contextlib.suppress(RuntimeError):  # the meeting point is gone
            self.meeting.set(self.end_key, "")
        self.group.close()

    def has_ended(self) -> bool:
        """Has rank 0 left without having lost anybody?"""
        with contextlib.suppress(RuntimeError):
            return not self.lost and bool(self.meeting.check([self.end_key]))
        return False

    def watch(self) -> None:
        """Called every second while this process waits for others: raises a `PeerLost` when one of them gives no sign
        of life, as on a host that was switched off."""
        now = time.monotonic()
        passed, self.looked_at = (
            min(now - self.looked_at, 2 * LOOK),
            now,
        )  # a job that was stopped, and continues, lives
        counts = list(self.counts)
        for rank, (count, before) in enumerate(zip(counts, self.counts_before, strict=True)):
            self.silences[rank] = 0.0 if count != before else self.silences[rank] + passed
        self.counts_before = counts
        self.read_counts.set()
        if max(self.silences) > SILENCE:
            self.lost = True
            raise PeerLost(f"no sign of life for {SILENCE:g} s")

    def find_dead_ranks(self) -> str:
        """Somebody is lost: who, in words."""
        unreachable = "a process of the job died, and the host where they meet cannot be reached"
        if self.lost:  # and known from its silence
            if self.silences[self.launch.rank] > SILENCE:  # its own signs of life do not arrive either
                return unreachable
            self.alive = {rank for rank, silence in enumerate(self.silences) if silence <= SILENCE}
        else:
            self.lost = True
            try:
                before = [self.meeting.add(name, 0) for name in self.heartbeat_keys]
                time.sleep(ROLL_CALL)
                self.alive = {
                    rank for rank, name in enumerate(self.heartbeat_keys) if self.meeting.add(name, 0) > before[rank]
                }
            except RuntimeError:  # the meeting point was on the host that is gone
                return unreachable
        dead = sorted(set(range(self.launch.size)) - self.alive)
        return f"rank {', '.join(map(str, dead))} died" if dead else "the processes of the job lost each other"

    def _stop_heartbeats(self) -> None:
        self.ends.set()
        self.heartbeat_thread.join(FAREWELL)

    def _send_heartbeats(self) -> None:
        with contextlib.suppress(RuntimeError):  # nobody is left to see it
            while not self.ends.wait(HEARTBEAT):
                self.meeting.add(self.heartbeat_keys[self.launch.rank], 1)
                if self.read_counts.is_set():
                    self.read_counts.clear()
                    self.counts = [self.meeting.add(name, 0) for name in self.heartbeat_keys]

    def make_replica(self, experiment: Experiment, envs: VectorEnvs, compute: Compute, event: Any) -> Replica:
        clocks = LockstepClocks(np.zeros((self.launch.size, 4), np.int64), self.launch.rank, self.group.gather)
        store = make_store(self.launch.size, self.nccl)
        replica = make_replica(experiment, envs, compute, event, store, clocks, self.share)
        assert isinstance(replica.store, AllReduceStore)
        replica.store.join(self.group, source=0)
        clocks.agree()
        return replica


def lead(job: Job, experiment: Experiment, directory: Path | None) -> int:
    """Rank 0: the session, and a replica of its own."""
    loaded: Loaded | None = None
    checkpoints = run_checkpoints(experiment, job.directory, tell)
    if directory is not None or (job.launch.restarts and any((job.directory / "checkpoints").glob("step-*"))):
        loaded = checkpoints.load()
    else:
        new_directory(experiment)
    with locked(job.directory):
        session = Session(experiment, job.directory, checkpoints, loaded)
        return session.run(lambda experiment, session: run(job, experiment, session))


def run(job: Job, experiment: Experiment, session: Session) -> None:
    """The loop of rank 0."""
    own = job.share.part(job.group.object_of(0, experiment))  # perhaps with another seed, if it is resumed
    compute = choose_compute(own.run).install()
    with (
        make_envs(own, compute, session.event, job.share) as envs,
        job.make_replica(own, envs, compute, session.event) as replica,
    ):
        leader = Leader(job, replica)
        with session.recording(leader, envs.spec, compute):
            while session.goes_on():
                session.note(leader.iterate())
        leader.dismiss()


class Leader:
    """All replicas of the job, as the session of rank 0 records them."""

    def __init__(self, job: Job, replica: Replica) -> None:
        self.job = job
        self.group = job.group
        self.replica = replica
        self.together = True  # is nobody lost, and nobody within what was given up?

    def iterate(self) -> Report:
        """One iteration of all replicas."""
        with self._naming_the_dead():
            self.group.object_of(0, ("iterate",))
            return reduce(Report.merged_with, reversed(self.group.objects(self.replica.iterate(run_ahead=False))))

    @property
    def progress(self) -> Progress:
        return self.replica.progress

    @property
    def pulse(self) -> object:
        return self.replica.pulse

    @property
    def quiescent(self) -> bool:
        return True

    def notes(self) -> list[str]:
        through = "NCCL" if self.job.nccl else "gloo"
        return [f"{self.job.launch.size} processes of torchrun in lock step over {through}", *self.replica.notes()]

    def weights(self) -> dict[str, Tensor]:
        return self.replica.weights()

    def snapshot(self, with_envs: bool = True) -> Snapshot:
        """Everybody's state; without environments nobody is asked, as perhaps nobody is there."""
        states, clocks = [EMPTY] * self.job.launch.size, self.progress
        if with_envs and self.together:
            with self._naming_the_dead():
                self.group.object_of(0, ("state",))
                answers = self.group.objects((self.replica.state(), self.replica.clocks.own))
            states = [state for state, _ in answers]
            clocks = sum_in_lockstep(np.stack([row for _, row in answers]))  # with the games of the last iteration
        return Snapshot(self.weights(), clocks, self.replica.store.state(), states)

    def restore(self, snapshot: Snapshot, directory: Path) -> None:
        with self._naming_the_dead():
            self.group.object_of(0, ("restore", snapshot))
            restore(self.replica, self.job, snapshot)

    def leave(self) -> None: ...

    def dismiss(self) -> None:
        if self.together:
            with self._naming_the_dead():
                self.group.object_of(0, ("leave",))

    @contextlib.contextmanager
    def _naming_the_dead(self) -> Iterator[None]:
        """Around whatever all do together: who died meanwhile, as the error that ends the run. After any other error,
        or an interruption, the others are somewhere within what was begun: they cannot be asked again."""
        try:
            yield
        except PeerLost:
            self.together = False
            raise RunError(
                f"{self.job.find_dead_ranks()}; the others end, too: resume the run, or let torchrun restart it"
            ) from None
        except BaseException:
            self.together = False
            self.job.end()
            raise


def follow(job: Job, experiment: Experiment) -> int:
    """Any other rank: does what rank 0 says, for as long as all are alive."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # they reach the whole job; rank 0 decides
        signal.signal(number, signal.SIG_IGN)
    own = job.share.part(job.group.object_of(0))
    compute = choose_compute(own.run).install()
    with make_envs(own, compute, tell, job.share) as envs, job.make_replica(own, envs, compute, tell) as replica:
        commands: dict[str, Callable[..., Any]] = {
            "iterate": lambda: job.group.objects(replica.iterate(run_ahead=False)),
            "state": lambda: job.group.objects((replica.state(), replica.clocks.own)),
            "restore": lambda snapshot: restore(replica, job, snapshot),
        }
        try:
            while (command := job.group.object_of(0))[0] != "leave":
                commands[command[0]](*command[1:])
            return 0
        except PeerLost:
            if job.has_ended():
                return 0
            words = job.find_dead_ranks()
            if 0 not in job.alive and job.launch.rank == min(job.alive):
                words += f"; {save_for_rank_0(job, experiment, replica)}"
            raise RunError(words) from None


def restore(replica: Replica, job: Job, snapshot: Snapshot) -> None:
    """Parameters and clocks of the run, and the part of it that is this replica's."""
    mine = [snapshot.replicas[job.launch.rank]] if len(snapshot.replicas) == job.launch.size else []
    clocks = (
        snapshot.clocks if job.launch.rank == 0 else Progress(0, snapshot.clocks.updates, snapshot.clocks.version, 0)
    )
    replica.restore(dataclasses.replace(snapshot, clocks=clocks, replicas=mine), Path())
    replica.clocks.agree()


def save_for_rank_0(job: Job, experiment: Experiment, replica: Replica) -> str:
    """The checkpoint that rank 0 cannot write any more, where this process reaches the run's directory; in words."""
    snapshot = Snapshot(replica.weights(), replica.progress, replica.store.state(), [EMPTY] * job.launch.size)
    memory = {"scores": ScoreWindow(100).state(), "time_s": 0.0}
    checkpoints = run_checkpoints(experiment, job.directory, tell)
    with contextlib.suppress(UserError):  # there is none yet
        newest = checkpoints.load()
        if newest.steps >= snapshot.clocks.steps:
            return f"the checkpoint is {newest.path}"
        memory = {name: newest.state[name] for name in memory}  # only rank 0 knew more
    try:
        path = checkpoints.write(snapshot.weights, {**as_state(snapshot), **memory}, snapshot.clocks.steps, None)
    except (RunError, UserError) as error:
        return f"the run's last checkpoint could not be written ({error})"
    return f"the checkpoint is {path}"
