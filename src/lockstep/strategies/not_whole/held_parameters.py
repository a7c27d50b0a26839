"""Checks of the parameters that a block of `fully_shard` holds: divided, and gathered while the block computes.

what a script does                                         why it is refused
net.head.weight = net.words.weight                         fully_shard would set its own parameter again
torch.func.functional_call(net, others, (x,))              the same
loss = ...; net.head.weight.add_(0.1); run.step(loss)      what was gathered is dropped after the step
self.weight.data.clamp_(min=0), in forward()               the same; torch does not count writes through ``.data``
torch.autograd.grad(loss, net.parameters())                fully_shard frees what was gathered as its gradients come
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final, NoReturn, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from lockstep.collectives import local_part
from lockstep.errors import UsageError
from lockstep.strategies.not_whole.partial_models import replaced_parameters
from lockstep.torch_private import own_parameters, version_of

_PLACEMENTS: Final = (Shard(0),)


@dataclass(slots=True)
class _Marks:
    """Marks of a block's parameters before and after a forward pass."""

    before: list[torch.Tensor]
    after: list[torch.Tensor] = field(default_factory=list)


def _mark(tensor: torch.Tensor | None) -> torch.Tensor:
    """The sum of the bits of ``tensor``, which a write in a forward pass leaves unchanged only by chance."""
    if tensor is None:
        return torch.zeros((), dtype=torch.int64, device="cpu")
    flat = local_part(tensor.detach()).contiguous().view(-1).view(torch.uint8)
    whole = flat.numel() // 4 * 4
    return flat[:whole].view(torch.int32).sum(dtype=torch.int64) + flat[whole:].sum(dtype=torch.int64)


class HeldParameters:
    """Checks the parameters of one block, without asking other ranks.

    Args:
        model: that contains the block, or is the block.
        block: after `fully_shard`.
        own: the block's divided parameters, without those of inner blocks.
        strategy: name of the strategy.
    """

    def __init__(self, model: nn.Module, block: nn.Module, own: Collection[nn.Parameter], strategy: str) -> None:
        paths = {module: path for path, module in model.named_modules()}
        wanted = set(own)
        self._strategy: Final = strategy
        self._places: Final = [
            (module, attribute, f"{paths[module]}.{attribute}".lstrip("."), parameter)
            for module in block.modules()
            for attribute, parameter in own_parameters(module).items()
            if parameter is not None and parameter in wanted
        ]
        self._gathered: dict[nn.Parameter, tuple[nn.Parameter, int]] = {}  # with its version counter
        block.register_forward_pre_hook(self.check_held, prepend=True)
        # Last of all present hooks, so it finds the gathered parameters of `fully_shard`.
        self._first_forward: Final = block.register_forward_pre_hook(self._note_gathered)
        self.compares_marks = False  #: whether gathered parameters are compared around each forward pass
        self.computes_gradients = False  #: whether the strategy itself runs a backward pass
        self._marks: list[_Marks] = []
        block.register_forward_pre_hook(self._note_marks)
        block.register_forward_hook(self._add_marks, prepend=True)  # before `fully_shard` frees gathered parameters

    def check_held(self, *_: object) -> None:
        """Check that modules hold the divided parameters, or the parameters gathered from these.

        Raises:
            UsageError: if a module holds another parameter.
        """
        for module, attribute, name, parameter in self._places:
            value = own_parameters(module).get(attribute)
            if value is not parameter and (
                parameter not in self._gathered or value is not self._gathered[parameter][0]
            ):
                raise UsageError(f"{name}: {replaced_parameters(self._strategy)}")

    def check_values(self) -> None:
        """Check that parameters are still divided by rows, and that gathered parameters were not written to.

        Raises:
            UsageError: if an operation has made torch take a rank's rows for all rows, or has changed gathered values,
                which are dropped.
        """
        for _, _, name, parameter in self._places:
            if cast(DTensor, parameter).placements != _PLACEMENTS:
                raise UsageError(
                    f"the parameter {name} of shape {tuple(parameter.shape)} was changed in place by an operation that "
                    "torch does not compute with rows; write parameter.copy_(value), change it before run.model(...), "
                    "or use ddp or zero"
                )
        for _, _, name, parameter in self._places:
            gathered, version = self._gathered.get(parameter, (None, 0))
            if gathered is not None and version_of(gathered) != version:
                self._refuse_write(name, parameter)

    def compare_marks(self) -> None:
        """Check that no compared forward pass has written to gathered parameters.

        Raises:
            UsageError: if a forward pass has.
        """
        seen, self._marks = [marks for marks in self._marks if len(marks.after)], []
        if not seen:
            return
        changed = torch.stack([torch.stack(marks.before) != torch.stack(marks.after) for marks in seen]).any(0)
        for (_, _, name, parameter), is_changed in zip(self._places, changed.tolist(), strict=True):
            if is_changed:
                self._refuse_write(name, parameter)

    def _refuse_write(self, name: str, parameter: nn.Parameter) -> NoReturn:
        raise UsageError(
            f"the parameter {name} of shape {tuple(parameter.shape)} was changed in the model's forward pass, or "
            f"between it and the backward pass, while strategy {self._strategy} had gathered it, and what is "
            "gathered is dropped: change parameters where run.step(loss) has returned True. A weight that forward() "
            "limits or derives is a parametrization (torch.nn.utils.parametrize) before run.model(...), and what "
            "forward() moves by itself, such as a codebook, a buffer (register_buffer); a weight that the first batch "
            "sets is set before the loop"
        )

    def _note_marks(self, *_: object) -> None:
        if self.compares_marks:
            self._marks.append(_Marks(self._marks_now()))

    def _add_marks(self, *_: object) -> None:
        if self.compares_marks and self._marks and not self._marks[-1].after:
            self._marks[-1].after = self._marks_now()

    def _marks_now(self) -> list[torch.Tensor]:
        """For each parameter as its module holds it, a number that differs after a write to values; on its device."""
        return [_mark(own_parameters(module)[attribute]) for module, attribute, *_ in self._places]

    def _note_gathered(self, *_arguments: object) -> None:
        for module, attribute, _, parameter in self._places:
            value = own_parameters(module)[attribute]
            if value is not None and value is not parameter and not value.is_inference():
                self._gathered[parameter] = value, version_of(value)
                if value.requires_grad:
                    value.register_hook(self._require_own_backward)
        if self._gathered:
            self._first_forward.remove()

    def _require_own_backward(self, _gradient: torch.Tensor) -> None:
        """Refuse gradients that the script computes by itself: `fully_shard` would take the pass for the step's.

        Raises:
            UsageError: if the strategy has not begun this backward pass.
        """
        if not self.computes_gradients:
            raise UsageError(
                f"gradients by parameters were computed outside of run.step(...) and run.backward(...), as by "
                f"torch.autograd.grad(loss, model.parameters()): strategy {self._strategy} frees the gathered "
                "parameters in that pass, and a step could not go on with them. Use ddp or zero"
            )
