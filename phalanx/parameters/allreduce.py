"""The parameter store of learners that make every update together, each with parameters of its own.

    gradient -> mean over all learners -> finite check, clip, rule, version + 1, in every learner alike

Everything after the mean is what a single learner's store does. The mean has the same bits everywhere, so all learners
raise the same error, clip by the same factor and keep the same parameters, with nobody to ask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.algorithms import Peers
from phalanx.parameters.flat import FlatParameters
from phalanx.parameters.local import LocalStore
from phalanx.parameters.rules import Clip, Rule
from phalanx.runtime.group import Group, PeerLost
from phalanx.types import Gradient


class AllReduceStore(LocalStore):
    """`LocalStore` behind an exchange. It joins a group before the first push, and another one when that has lost a
    member."""

    def __init__(self, parameters: FlatParameters, rule: Rule, clip: Clip, learners: int, capturable: bool) -> None:
        super().__init__(parameters, rule, clip)
        self.capturable = capturable
        self.group: Group | None = None
        self.peers = Peers(learners, self._mean)
        flat = parameters.flat
        self._sent = torch.zeros(flat.numel() + 1, device=flat.device)  # a gradient and its loss

    def join(self, group: Group, source: int) -> None:
        """From now on this learner updates together with the group, beginning with what its member `source` has."""
        self.leave()
        self.group = group
        version = torch.tensor(self.version)
        for tensor in (version, self.parameters.flat, *self.rule_state.values()):
            group.broadcast(tensor, source)
        self.version = int(version)
        self.parameters.refresh()

    def leave(self) -> None:
        """Whoever waits for this learner gets a `PeerLost`."""
        if self.group is not None:
            self.group.close()
            self.group = None

    def push(self, gradient: Gradient, learning_rate: float) -> int:
        self._exchange(gradient)
        return super().push(gradient, learning_rate)

    def launch(self, gradient: Gradient, learning_rate: Tensor, good: Tensor) -> None:
        self._exchange(gradient)
        super().launch(gradient, learning_rate, good)

    def checksum(self) -> int:
        """Of everything that must be the same in all learners."""
        tensors = [self.parameters.flat, *self.rule_state.values()]
        return sum(int(tensor.reshape(-1).view(torch.int32).sum(dtype=torch.int64)) for tensor in tensors)

    def _exchange(self, gradient: Gradient) -> None:
        self._sent[:-1] = gradient.flat
        self._sent[-1] = gradient.loss
        self._average(self._sent)
        gradient.flat.copy_(self._sent[:-1])
        gradient.loss = self._sent[-1].clone()

    def _mean(self, statistic: Tensor) -> Tensor:
        mean = statistic.detach().clone()
        self._average(mean)
        return mean

    def _average(self, tensor: Tensor) -> None:
        if self.group is None:
            raise PeerLost("the group of learners was left")
        self.group.average(tensor)
