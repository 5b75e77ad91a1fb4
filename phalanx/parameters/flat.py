"""All parameters of a model as one vector, and all its gradients as another.

Everything behind the learner (norm clip, update rule, stores, shards, checkpoints) works on these two vectors; the
model works on views of them, so nothing is gathered or scattered. Only where layers compute in bfloat16 (on a CPU the
large ones, on a GPU those of a model that only acts), the model holds rounded copies of its own: rounding once an
update, or once a rollout, costs less than rounding in every forward pass.

    clear -> backward -> gather -> rule on `flat` -> refresh

Whoever changes `flat` calls `refresh`, or the model computes with parameters of which some are older than others.
Build it after the model is on its device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from phalanx.errors import UserError


class FlatParameters:
    """Lays a module's parameters into `flat` [P] and their gradients into `grad` [P].

    autograd adds in place to a gradient that exists, so `backward` writes straight into `grad`; the one way to clear
    it is `clear` (`zero_grad` would drop the views). The model keeps `rounded` parameters as bfloat16 copies.
    """

    def __init__(self, model: nn.Module, channels_last: bool = True, rounded: Iterable[nn.Parameter] = ()) -> None:
        parameters = dict(model.named_parameters())
        device = next(iter(parameters.values())).device
        copied = {id(parameter) for parameter in rounded}
        self.slices: dict[str, slice] = {}
        self._views: dict[str, Tensor] = {}
        self._copies: list[tuple[nn.Parameter, Tensor, Tensor]] = []  # parameter, its part of flat, its part of grad
        self._added: list[slice] = []  # parts of grad that backward adds to
        self.flat = torch.empty(sum(p.numel() for p in parameters.values()), device=device)
        self.grad = torch.zeros_like(self.flat)
        start = 0
        for name, parameter in parameters.items():
            part = slice(start, start + parameter.numel())
            view = _shaped(self.flat[part], parameter.shape, channels_last)
            gradient = _shaped(self.grad[part], parameter.shape, channels_last)
            view.copy_(parameter.detach())
            if id(parameter) in copied:
                parameter.data = view.bfloat16()
                self._copies.append((parameter, view, gradient))
            else:
                parameter.data, parameter.grad = view, gradient
                last = self._added.pop() if self._added and self._added[-1].stop == start else part
                self._added.append(slice(last.start, part.stop))
            self.slices[name], self._views[name] = part, view
            start = part.stop

    def clear(self) -> None:
        """Before backward."""
        for part in self._added:
            self.grad[part].zero_()
        for parameter, _, _ in self._copies:
            parameter.grad = None

    def gather(self) -> None:
        """After backward: the gradients of the copies, too, go into `grad`."""
        for parameter, _, gradient in self._copies:
            assert parameter.grad is not None
            gradient.copy_(parameter.grad)

    def refresh(self) -> None:
        """After a change of `flat`: the copies follow. An autocast that is open, as at a poll within a rollout, forgets
        what it has rounded: it would not see that parameters changed."""
        for parameter, view, _ in self._copies:
            parameter.data.copy_(view)
        if torch.is_autocast_enabled(self.flat.device.type):
            torch.clear_autocast_cache()

    def named_tensors(self) -> dict[str, Tensor]:
        """A copy of each parameter by name, in its usual layout, for checkpoints."""
        return {name: view.clone(memory_format=torch.contiguous_format) for name, view in self._views.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over values from `named_tensors`; names and shapes must be this model's."""
        strangers = sorted(set(tensors) ^ set(self._views))
        if strangers:
            raise UserError(
                f"the saved parameters and this model differ in {', '.join(strangers)}; "
                "use the model configuration they were saved with"
            )
        for name, view in self._views.items():
            if tensors[name].shape != view.shape:
                raise UserError(
                    f"the saved parameter {name} has shape {tuple(tensors[name].shape)}, but this model needs "
                    f"{tuple(view.shape)}; use the environment and model configuration it was saved with"
                )
        for name, view in self._views.items():
            view.copy_(tensors[name])
        self.refresh()


def _shaped(part: Tensor, shape: torch.Size, channels_last: bool) -> Tensor:
    """A view of a slice in a parameter's shape; weights of convolutions may lie with their channels innermost."""
    if channels_last and len(shape) == 4:
        filters, channels, height, width = shape
        return part.view(filters, height, width, channels).permute(0, 3, 1, 2)
    return part.view(shape)
