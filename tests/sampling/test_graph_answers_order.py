"""The answers of a GPU from a device that is late: what stands in its streams is done when the host looks or waits, in
any order across them. What the host forgets to wait for is done too early or too late with some of the seeds. Only the
learner's stream is never late. More is in `test_graph_answers.py`, where graphs are played from a tape.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from phalanx.runtime.clocks import Clocks
from phalanx.runtime.timing import Timing
from phalanx.sampling.answers import EagerAnswers, make_buffer
from phalanx.sampling.collector import Collector, HandOver
from phalanx.sampling.graph_answers import GraphAnswers, LaunchSlot
from phalanx.sampling.slot import allocate_step
from phalanx.types import EnvSpec, EnvStep, PolicyOutput, Progress

Work = Callable[[], object]
Condition = Callable[[], bool]
ACTIONS = 5
STATES = 251  # of an environment, each with a frame of its own


class Device:
    """Streams are queues; it does one thing of one of them at a time, whichever may go on."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.streams: list[Stream] = []
        self.current: Stream  # where launches go

    def advance(self) -> bool:
        """Do one thing; False if there is none."""
        able = [stream for stream in self.streams if stream.queue and stream.queue[0][0]()]
        if able:
            self.chance.choice(able).queue.popleft()[1]()
        return bool(able)

    def wait(self, is_over: Condition) -> None:
        while not is_over():
            assert self.advance(), "it will never be"

    def finish(self, *streams: Stream) -> None:
        """All of some streams, of all if none is named, and as much of the others as happens meanwhile."""
        self.wait(lambda: not any(stream.queue for stream in streams or self.streams))

    @contextlib.contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        self.current = stream
        yield
        del self.current

    def capture(self, work: Work, undo: Work, stream: Stream) -> Work:
        """As `Capturer`: the work is done some times and undone; a launch puts it into the stream."""
        for _ in range(2):
            work()
            undo()
        return lambda: self.current.put(work)


class Stream:
    """Things to do one after the other, and when each may be done."""

    def __init__(self, device: Device, priority: int) -> None:
        self.queue: deque[tuple[Condition, Work]] = deque()
        device.streams.append(self)

    def put(self, work: Work, may_go: Condition = lambda: True) -> None:
        self.queue.append((may_go, work))

    def wait_event(self, event: Event) -> None:
        self.put(lambda: None, event.is_over)

    def wait_stream(self, learners: Any) -> None:
        """That one is never late."""


class Event:
    """The device goes on a little whenever the host looks at one."""

    def __init__(self, device: Device, blocking: bool) -> None:
        self.device = device
        self.is_over: Condition = lambda: True

    def record(self, stream: Stream) -> None:
        reached: list[bool] = []
        stream.put(lambda: reached.append(True))
        self.is_over = lambda: any(reached)

    def query(self) -> bool:
        while self.device.chance.random() < 0.6 and self.device.advance():
            pass
        return self.is_over()

    def synchronize(self) -> None:
        self.device.wait(self.is_over)


class LateEnvs:
    """Environments whose course depends on all their actions, in groups that are back after some looks."""

    def __init__(self, case: Any, chance: random.Random) -> None:
        self.spec, self.case, self.chance = EnvSpec(case.shape, case.dtype, ACTIONS), case, chance
        self.groups = list(itertools.starmap(slice, itertools.pairwise(itertools.accumulate([0, *case.groups]))))
        rows = np.arange(sum(case.groups))
        step, action = allocate_step(self.spec, len(rows)), np.zeros(len(rows), np.int32)
        self.exchange = SimpleNamespace(step=step, action=action, memory_array=np.zeros(1, np.uint8))
        pixels = np.arange(STATES)[:, None] * 3 + np.arange(math.prod(case.shape))
        self.frames = (pixels % STATES).reshape(STATES, *case.shape)
        self.states, self.steps = (rows * 37 + 5) % STATES, np.zeros_like(rows)
        step.observation[:] = self.frames[self.states]
        self.stepping: set[int] = set()

    def go_on(self, stopped: LateEnvs) -> None:
        """Where others stopped. What new workers begin with still stands in the step buffer."""
        self.states, self.steps = stopped.states, stopped.steps
        step = self.exchange.step
        step.observation[:], step.reward[:], step.first[:], step.cut[:] = 99, 55, True, True

    def send(self, group: int, actions: np.ndarray) -> None:
        self.exchange.action[self.groups[group]] = actions
        self.request(group)

    def request(self, group: int) -> None:
        """The actions are read now, or at any time until the group is back."""
        self.stepping.add(group)
        if self.chance.random() < 0.3:
            self._step(group)

    def ready(self, groups: Sequence[int], wait: bool = True) -> int | None:
        order = self.chance.sample(groups, len(groups))
        back = [group for group in order if group not in self.stepping or self.chance.random() >= self.case.late]
        group = next(iter(back or order[:wait]), None)
        if group in self.stepping:
            self._step(group)
        return group

    def recv(self, group: int) -> EnvStep:
        assert group not in self.stepping
        return self.exchange.step[self.groups[group]]

    def unbalanced(self) -> bool:
        return self.chance.random() < 0.2

    def balance(self) -> None:
        """Nobody may rely on the actions that stood there."""
        assert not self.stepping
        self.exchange.action[:] = 77

    def _step(self, group: int) -> None:
        self.stepping.remove(group)
        rows = self.groups[group]
        step, actions = self.exchange.step[rows], self.exchange.action[rows]
        self.steps[rows] += 1
        states = (self.states[rows] * 31 + actions * 7 + self.steps[rows] + np.arange(rows.start, rows.stop)) % STATES
        step.reward[:], step.cut[:], kind = states % 7 - 3, states % 17 == 3, states % self.case.ends
        step.terminated[:], step.truncated[:] = kind == 0, kind == 1
        step.first[:] = step.terminated | step.truncated | step.cut
        step.score[:] = np.where(step.first, self.steps[rows], np.nan)
        step.last_observation[:] = self.frames[states]
        self.states[rows] = np.where(step.first, (states * 5 + 1) % STATES, states)
        step.observation[:] = self.frames[self.states[rows]]


class IntegerPolicy:
    """What it says depends on each frame of the episode in the stack, the random number, the row and the parameters."""

    def __init__(self, rows: int) -> None:
        self.parameters = torch.zeros(2, dtype=torch.int64)
        self.rows = torch.arange(rows)

    def begin(self, progress: Progress) -> None:
        self.parameters[:] = torch.tensor([progress.steps % 97 * 5, progress.version * 11])

    def value(self, stacks: Tensor, history: Tensor) -> Tensor:
        depth, pixels = torch.arange(stacks.shape[1]), stacks.flatten(2).long()  # [K, S, pixels]
        frames = (pixels * (torch.arange(pixels.shape[2]) * 3 + 4)).sum(2) % 1009
        frames *= depth >= len(depth) - history[:, None].long()
        return (((frames * 7**depth).sum(1) + history.long() * 13 + self.parameters.sum()) % 100_003).float()

    def act(self, stacks: Tensor, history: Tensor, uniform: Tensor, rows: slice | Tensor) -> PolicyOutput:
        value = self.value(stacks, history)
        action = (value.long() + (uniform * 1000).long() + self.rows[rows] * 3) % ACTIONS
        return PolicyOutput(action, value % 101 + uniform, value)


def put_in_place(device: Device, case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the answers the late device, and have the host wait where a real one would make it wait."""
    run, stream = GraphAnswers._run, GraphAnswers.stream

    def run_late(answers: GraphAnswers, name: str, slot: LaunchSlot, work: Callable[[LaunchSlot], None]) -> None:
        if (name, slot) not in answers.launches:
            device.finish()  # before a capture frames are read, in the slot's stream after all it waits for; here now
        run(answers, name, slot, work)

    def stream_late(answers: GraphAnswers) -> Any:
        device.finish(answers.streams[0])  # the collector's work runs there, and the host waits for what it says
        return stream(answers)

    stand_ins = {
        "torch.cuda.Stream": partial(Stream, device),
        "torch.cuda.Event": partial(Event, device),
        "torch.cuda.current_stream": lambda: SimpleNamespace(wait_stream=device.finish),
        "torch.cuda.synchronize": device.finish,
        "phalanx.sampling.graph_answers.on_stream": device.on_stream,
        "phalanx.sampling.graph_answers.Capturer": lambda what, report: device,
        "phalanx.sampling.graph_answers.GraphAnswers._run": run_late,
        "phalanx.sampling.graph_answers.GraphAnswers.stream": stream_late,
        "phalanx.sampling.graph_answers.lock_pages": lambda memory: None,
        "phalanx.sampling.graph_answers.unlock_pages": lambda memory: None,
        "phalanx.sampling.graph_answers.mapped": lambda array, device: torch.from_numpy(array),
        "phalanx.sampling.graph_answers.LARGEST_LAUNCH": case.together,
        "phalanx.sampling.graph_answers.SLOTS": case.slots,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(name, stand_in)


def as_it_is(frames: Tensor) -> Tensor:
    return frames


def collected(kind: Any, case: Any, chance: random.Random, resume: int | None) -> list[dict[Any, Tensor]]:
    """All that some rollouts hold. Before a resume nobody may be ahead."""
    clocks, timing, results, rows = Clocks(), Timing(), [], sum(case.groups)

    def make() -> tuple[LateEnvs, Collector]:
        envs = LateEnvs(case, chance)
        buffers = [
            make_buffer(IntegerPolicy(rows), envs.spec, rows, case.stack, case.horizon, torch.device("cpu"))
            for _ in range(case.buffers)
        ]
        parts = {"envs": envs, "buffers": buffers, "stack": case.stack, "decode": as_it_is, "timing": timing}
        numbers = {"generator": torch.Generator().manual_seed(3), "run_environments": rows, "columns": slice(0, rows)}
        return envs, Collector(**parts, **numbers, answers=kind(**parts), clocks=clocks)

    def hand_over() -> HandOver:
        """The parameters of the next rollout are there, or a part of them, or nothing yet."""
        told = chance.choice(list(HandOver)) if len(results) + 1 != resume else HandOver.WAIT
        clocks.reach(clocks.version + (told is HandOver.BEGIN))
        return told

    companion = SimpleNamespace(work_in_gap=lambda: None, hand_over=hand_over)
    envs, collector = make()
    while len(results) < 8:
        rollout = collector.collect(companion)
        numbers = {"scores": torch.tensor(collector.take_scores()), "steps": torch.tensor(clocks.now().steps)}
        everything = {**rollout.tensors(), **rollout.last_frames, **numbers}
        results.append({name: value.clone() for name, value in everything.items()})
        clocks.reach(len(results))
        if len(results) == resume:
            state, stopped = collector.state(), envs
            collector.close()
            envs, collector = make()
            collector.restore(state)
            envs.go_on(stopped)
    collector.close()
    return results


def drawn(seed: int, **given: Any) -> SimpleNamespace:
    """What is collected and how late everybody is, by chance unless it is given."""
    chance = random.Random(seed)
    sizes = [chance.randint(1, 4) for _ in range(chance.randint(1, 6))]
    groups = chance.choice([sizes, sizes[:1] * len(sizes)])  # rows of each
    rollout = {"horizon": chance.randint(1, 6), "stack": chance.randint(1, 4), "buffers": chance.randint(1, 2)}
    launch = {"together": chance.choice([1, 2, 5, 64]), "slots": chance.choice([1, 2, 3, 3, 5])}
    frame = {"shape": chance.choice([(3,), (1, 2, 2)]), "dtype": chance.choice([np.uint8, np.float32])}
    late = chance.choice([0.0, 0.3, 0.9])  # chance that a group is not back when somebody looks
    ends = chance.choice([4, 9, 40])  # of so many states one terminates an episode, and one truncates it
    resume = chance.choice([None, None, 2, 4])  # after so many rollouts
    case = {"groups": groups, **rollout, **launch, **frame, "late": late, "ends": ends, "resume": resume}
    return SimpleNamespace(**{**case, **given})


CASES = [
    *(pytest.param(seed, {}, id=f"seed {seed}") for seed in range(60)),
    pytest.param(60, {"buffers": 1, "horizon": 2, "stack": 4, "resume": 2}, id="horizon shorter than the stack"),
    pytest.param(61, {"buffers": 2, "horizon": 1}, id="horizon 1"),
]


@pytest.mark.parametrize(("seed", "given"), CASES)
def test_a_late_device_changes_nothing_that_is_collected(monkeypatch, seed, given):
    case, chance = drawn(seed, **given), random.Random(seed)
    theirs = collected(EagerAnswers, case, chance, resume=None)
    put_in_place(Device(chance), case, monkeypatch)
    ours = collected(partial(GraphAnswers, report=pytest.fail), case, chance, case.resume)
    for number, (mine, right) in enumerate(zip(ours, theirs, strict=True)):
        assert mine.keys() == right.keys()
        wrong = [name for name in right if not torch.equal(mine[name], right[name])]
        assert not wrong, f"in rollout {number} of {case}"
