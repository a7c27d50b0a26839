"""Buffers that the forward pass changes, such as the running statistics of BatchNorm.

    base ──► forward of micro-batch 0 ──► b0     each micro-batch starts from the same base;
    base ──► forward of micro-batch 1 ──► b1     new base = base + mean over the step of (bm - base),
    base ──► ...                                 summed along the tree

So they do not depend on which rank computed what, and no rank's statistics overwrite those of the others. Integer
buffers, such as the count of batches, take the value after one micro-batch: one step counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from lockstep.collectives import Exchange, Fold
from lockstep.errors import UsageError
from lockstep.strategies.gradients import Turn


class Buffers:
    """The buffers of the replicas' models over one step after another.

    Args:
        exchange: sums what the replicas have.
        agree: raises if ranks differ.
        device: where sums are made, for buffers on several GPUs of a rank; None: where the buffers are.
    """

    def __init__(
        self, exchange: Exchange, agree: Callable[[str, object], None], device: torch.device | None = None
    ) -> None:
        self._device: Final = device
        self._exchange: Final = exchange
        self._agree: Final = agree
        self._all: list[torch.Tensor] = []
        self._homes: list[tuple[nn.Module, str]] = []  # whose buffer each is, and its name there
        self._base: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._always: Final[set[int]] = set()  # places of the buffers that any forward pass may change unseen
        self._moving: tuple[int, ...] = ()  # places of the buffers that are kept in step, as far as this rank knows
        self._agreed: tuple[int, ...] = ()  # the same, as all ranks have said
        self._fold: Fold[torch.Tensor] | None = None

    def adopt(self, model: nn.Module) -> None:
        """Keep the buffers of ``model`` in step from now on."""
        # torch's normalisation kernels change running statistics without a trace in `Tensor._version`.
        silent = {id(b) for m in model.modules() if isinstance(m, _NormBase) for b in m.buffers()}
        for path, buffer in model.named_buffers():
            if id(buffer) in silent:
                self._always.add(len(self._all))
            owner, _, name = path.rpartition(".")
            self._homes.append((model.get_submodule(owner), name))
            self._all.append(buffer)
        self._moving = self._agreed = tuple(sorted(self._always.union(self._agreed)))
        self.rebase()

    def rebase(self) -> None:
        """What the buffers hold now is the base of the next step."""
        self._bring_home()
        self._base = [b.detach().clone() for b in self._all]
        self._versions = [b._version for b in self._all]
        self._fold = None

    def lend(self) -> None:
        """The next forward pass changes copies, which `settle` brings home.

        For where other forward passes come before its backward pass: autograd keeps what it has seen, and it must stay.
        """
        for i in self._moving:
            owner, name = self._homes[i]
            owner._buffers[name] = self._all[i].clone()

    def settle(self, turn: Turn) -> None:
        """After ``turn`` the base is back; after the rank's last one, moved by the step's mean. All ranks, then."""
        self._find_moving()
        # Not before the last turn: ranks have different numbers of turns, and others may wait in the reduction.
        if turn.last and self._moving != self._agreed:
            self._agreed = self._moving
            self._agree("which buffers the forward pass changes", self._agreed)
        if not self._moving:
            return
        with torch.no_grad():
            self._gather(turn)
        self._put_back()

    def restore(self) -> None:
        """The base is back, and what was gathered in this step is forgotten."""
        self._fold = None
        self._find_moving()
        self._put_back()

    def _bring_home(self) -> None:
        """What was assigned, as by ``self.mean = 0.9 * self.mean + ...``, goes into the tensor that is kept in step."""
        for buffer, (owner, name) in zip(self._all, self._homes, strict=True):
            held = owner._buffers.get(name)
            if held is None or held is buffer:
                continue
            if held.shape != buffer.shape:
                raise UsageError(
                    f"the buffer {name} of {type(owner).__name__} changed its shape from {tuple(buffer.shape)} to "
                    f"{tuple(held.shape)}: buffers are averaged over the step, so keep the shape, or hold the value in "
                    "a plain attribute and give it to run.keep(...)"
                )
            with torch.no_grad():
                buffer.copy_(held)
            owner._buffers[name] = buffer

    def _find_moving(self) -> None:
        self._bring_home()
        changed = {i for i, b in enumerate(self._all) if b._version != self._versions[i]}
        if not changed.issubset(self._moving):
            self._moving = tuple(sorted(changed.union(self._moving)))

    def _put_back(self) -> None:
        if not self._moving:
            return
        with torch.no_grad():
            torch._foreach_copy_([self._all[i] for i in self._moving], [self._base[i] for i in self._moving])
        for i in self._moving:
            self._versions[i] = self._all[i]._version

    def _gather(self, turn: Turn) -> None:
        real = [i for i in self._moving if self._all[i].is_floating_point()]
        if real and not turn.shadow:
            moved = torch._foreach_sub([self._all[i] for i in real], [self._base[i] for i in real])
            if self._fold is None:
                self._fold = Fold(turn.of, lambda left, right: left.add_(right))
            self._fold.push((turn.index, turn.index + 1), self._end_to_end(moved))
        if real and turn.last:
            sums = self._fold.sums if self._fold is not None else []
            out = sums[-1] if sums else self._end_to_end([self._base[i] for i in real])
            self._exchange.begin(out, sums, turn.of)
            self._exchange.finish()
            bases = [self._base[i] for i in real]
            pieces = out.div_(turn.of).split([b.numel() for b in bases])
            torch._foreach_add_(bases, [p.view_as(b).to(b.device) for p, b in zip(pieces, bases, strict=True)])
            self._fold = None
        if turn.last:
            for i in set(self._moving).difference(real):
                self._base[i].copy_(self._all[i])

    def _end_to_end(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([tensor.reshape(-1).to(self._device or tensor.device) for tensor in tensors])
