"""The course of the collection: which group of environments is at which step of which rollout.

    between -> starting -> asked -> stepping -> asked -> ... -> stepping -> between

A state machine without tensors. The collector moves groups along it; with several rollout buffers a group that has
finished its part of a rollout may begin the next one while others are still at the last.
"""

from __future__ import annotations


class Course:
    """Where each group is. Rollouts are numbered from 0 in the order in which they begin."""

    def __init__(self, group_sizes: list[int], horizon: int) -> None:
        self.sizes = group_sizes
        self.horizon = horizon
        self.begun = 0  # rollouts; beyond those collected: 0 between, 1 during a rollout, 2 where some groups run ahead
        self.collected = 0  # rollouts handed out
        self.finished = [0 for _ in group_sizes]  # by group: rollouts it has finished
        self.steps = [0 for _ in group_sizes]  # by group: steps it has taken of its present rollout
        self.between = list(range(len(group_sizes)))  # groups whose next rollout has not begun
        self.starting: list[int] = []  # groups whose rollout has begun and that wait for their first actions
        self.asked: list[int] = []  # groups whose actions are being chosen
        self.stepping: list[int] = []  # groups whose environments step, in the order in which they were sent

    @property
    def in_progress(self) -> bool:
        """Has a rollout begun that is not collected yet?"""
        return self.begun > self.collected

    @property
    def oldest_is_whole(self) -> bool:
        """Have all groups finished the oldest rollout that is not collected yet?"""
        return min(self.finished) > self.collected

    @property
    def steps_under_way(self) -> int:
        """Steps that environments have taken of rollouts which are not collected yet."""
        return sum(
            size * ((finished - self.collected) * self.horizon + steps)
            for size, finished, steps in zip(self.sizes, self.finished, self.steps, strict=True)
        )

    def rollout_of(self, group: int) -> int:
        """The number of the rollout that a group is at."""
        return self.finished[group]

    def begin(self) -> None:
        """The next rollout begins, for all groups that have finished the last."""
        self.begun += 1
        self._enter()

    def next_to_ask(self) -> int | None:
        """Returns the next group that is to be asked for its first actions, if there is one."""
        if not self.starting:
            return None
        group = self.starting.pop(0)
        self.asked.append(group)
        return group

    def send(self, group: int) -> None:
        """The group's actions were chosen, and its environments step."""
        self.asked.remove(group)
        self.stepping.append(group)

    def receive(self, group: int) -> int:
        """The group has stepped. Returns the number of steps it has taken of its rollout; it is asked again unless that
        was the last: then `finish` follows."""
        self.stepping.remove(group)
        self.steps[group] += 1
        if self.steps[group] < self.horizon:
            self.asked.append(group)
        return self.steps[group]

    def finish(self, group: int) -> None:
        """The group has finished its rollout; it goes on at once if the next one has begun."""
        self.steps[group] = 0
        self.finished[group] += 1
        self.between.append(group)
        self._enter()

    def end(self) -> int:
        """The oldest rollout is whole and handed out. Returns its number."""
        self.collected += 1
        return self.collected - 1

    def _enter(self) -> None:
        for group in [group for group in self.between if self.finished[group] < self.begun]:
            self.between.remove(group)
            self.starting.append(group)
