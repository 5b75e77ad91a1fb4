"""The parameter store of a single process: it owns the optimiser's state and updates the model's own vector.

Learner -> push(gradient) -> rule -> FlatParameters.flat, which the model's parameters are views of
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from phalanx.errors import UserError
from phalanx.parameters.flat import FlatParameters
from phalanx.parameters.rules import Rule
from phalanx.types import Gradient


class LocalStore:
    """Applies every gradient at once; the model sees the new version without a pull."""

    def __init__(self, parameters: FlatParameters, rule: Rule) -> None:
        self.parameters = parameters
        self.rule = rule
        self.version = 0
        self.rule_state = rule.init(parameters.flat.numel(), parameters.flat.device)

    def push(self, gradient: Gradient, learning_rate: float) -> int:
        self.apply(gradient.flat, learning_rate)
        self.version += 1
        return self.version

    def apply(self, gradient: Tensor, learning_rate: float | Tensor) -> None:
        """The device's part of a push, which a CUDA graph can hold."""
        self.rule.apply(self.parameters.flat, gradient, self.rule_state, learning_rate)
        self.parameters.refresh()

    def pull(self, model: nn.Module) -> int:
        return self.version

    def state(self) -> dict[str, Any]:
        """Copies of everything an update reads; the rule's vectors are in the order of the flat vector."""
        rule = {key: value.clone() for key, value in self.rule_state.items()}
        return {"version": self.version, "parameters": self.parameters.named_tensors(), "rule": rule}

    def restore(self, state: dict[str, Any]) -> None:
        ours, saved = self.rule_state, state["rule"]
        if {k: v.shape for k, v in ours.items()} != {k: v.shape for k, v in saved.items()}:
            raise UserError(
                f"the saved optimiser state holds {', '.join(saved) or 'nothing'}, but this rule keeps "
                f"{', '.join(ours) or 'nothing'} for {self.parameters.flat.numel()} parameters; "
                "use the optimiser and model configuration it was saved with"
            )
        self.parameters.load(state["parameters"])
        for key, value in saved.items():
            ours[key].copy_(value)
        self.version = state["version"]
