"""The parameter store of a single learner: it owns the way from a gradient to new parameters.

Learner -> push(gradient) -> finite check -> norm clip -> rule -> FlatParameters.flat, of which the model's parameters
are views -> version + 1
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx.errors import NotFinite, UserError
from phalanx.parameters.flat import FlatParameters
from phalanx.parameters.rules import Clip, Rule
from phalanx.types import Gradient


class LocalStore:
    """Applies every gradient at once to the learner's own vector; the model sees the new version without a pull."""

    capturable = True

    def __init__(self, parameters: FlatParameters, rule: Rule, clip: Clip) -> None:
        self.parameters = parameters
        self.rule = rule
        self.clip = clip
        self.version = 0
        self.rule_state = rule.init(parameters.flat.numel(), parameters.flat.device)
        self._rule_state_backup: dict[str, Tensor] = {}

    def push(self, gradient: Gradient, learning_rate: float) -> int:
        gradient.norm = self.clip(gradient.flat)
        if not bool(torch.isfinite(gradient.loss + gradient.norm)):
            raise NotFinite("the loss or the gradient norm is not finite", None)
        self._apply(gradient.flat, learning_rate)
        return self.count_push()

    # What follows until `pull`, and `mutated_tensors`, are for a CUDA graph: skip them on a first reading.

    def launch(self, gradient: Gradient, learning_rate: Tensor, good: Tensor) -> None:
        """The device's part of a push, which never waits, so that a CUDA graph can hold it; `count_push` is the host's.
        `good` becomes false with the first gradient that is not finite; neither that one nor any after it moves the
        parameters."""
        gradient.norm = self.clip(gradient.flat)
        good.logical_and_(torch.isfinite(gradient.loss + gradient.norm))
        gradient.flat.masked_fill_(~good, 0.0)
        self._apply(gradient.flat, learning_rate * good)

    def count_push(self) -> int:
        """One gradient more was applied; the new version."""
        self.version += 1
        return self.version

    def _apply(self, gradient: Tensor, learning_rate: float | Tensor) -> None:
        self.rule.apply(self.parameters.flat, gradient, self.rule_state, learning_rate)
        self.parameters.refresh()

    def pull(self, parameters: FlatParameters) -> int:
        """Copy the newest parameters into another vector; the learner's own has them already."""
        if parameters is not self.parameters:
            parameters.flat.copy_(self.parameters.flat)
            parameters.refresh()
        return self.version

    def mutated_tensors(self) -> list[Tensor]:
        """Everything that `launch` changes."""
        return [self.parameters.flat, *self.rule_state.values()]

    def back_up_rule_state(self) -> None:
        """Before the launches of an iteration. After a gradient that is not finite the rule is still applied, to zeros,
        and its running averages decay; `put_rule_state_back` undoes that."""
        for key, value in self.rule_state.items():
            backup = self._rule_state_backup.get(key)
            self._rule_state_backup[key] = value.clone() if backup is None else backup.copy_(value)

    def put_rule_state_back(self) -> None:
        for key, backup in self._rule_state_backup.items():
            self.rule_state[key].copy_(backup)

    def state(self) -> dict[str, Any]:
        """Copies of everything an update reads besides the parameters; vectors are in the order of the flat vector."""
        return {"version": self.version, "rule": {key: value.clone() for key, value in self.rule_state.items()}}

    def restore(self, state: dict[str, Any]) -> None:
        ours, saved = self.rule_state, state["rule"]
        if {k: v.shape for k, v in ours.items()} != {k: v.shape for k, v in saved.items()}:
            raise UserError(
                f"the saved optimiser state holds {', '.join(saved) or 'nothing'}, but this rule keeps "
                f"{', '.join(ours) or 'nothing'} for {self.parameters.flat.numel()} parameters; "
                "use the optimiser and model configuration it was saved with"
            )
        for key, value in saved.items():
            ours[key].copy_(value)
        self.version = state["version"]
