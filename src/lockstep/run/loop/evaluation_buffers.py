"""Buffers in an evaluation: a model that changes them there starts each micro-batch from what they were."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from lockstep.strategies import same
from lockstep.torch_private import own_buffers, version_of

#: On a CPU, so many bytes are compared by value after each micro-batch, about 10 us; else a change through ``.data`` or
#: by a kernel is found at the end.
_SMALL_BYTES = 1 << 18


class EvaluationBuffers:
    """The buffers of ``models``, as they are now and after each micro-batch of an evaluation.

    Else what a micro-batch gives would depend on those that this rank had before it, and ranks would part.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        modules = dict.fromkeys(module for model in models for module in model.modules())
        self._homes = [
            (module, name, buffer)
            for module in modules
            for name, buffer in own_buffers(module).items()
            if buffer is None or not buffer.is_meta  # those of another rank's stage
        ]
        self._before = [None if b is None else b.detach().clone() for _, _, b in self._homes]
        self._versions = [None if b is None else version_of(b) for _, _, b in self._homes]
        held = [b for b in self._before if b is not None]
        self._small = (
            all(b.device.type == "cpu" for b in held)
            and sum(b.numel() * b.element_size() for b in held) <= _SMALL_BYTES
        )
        self.moved: set[str] = set()  #: names of those that were put back

    def put_back(self, *, by_value: bool = False) -> None:
        """All are what they were. With ``by_value``, also those that have changed without a trace."""
        for place, ((module, name, buffer), before) in enumerate(zip(self._homes, self._before, strict=True)):
            here = own_buffers(module).get(name)
            if here is buffer and (buffer is None or before is None or self._is_unmoved(place, buffer, by_value)):
                continue
            self.moved.add(f"{name} of {type(module).__name__}")
            own_buffers(module)[name] = buffer
            if buffer is not None and before is not None:
                with torch.no_grad():
                    buffer.copy_(before)
                self._versions[place] = version_of(buffer)

    def _is_unmoved(self, place: int, buffer: torch.Tensor, by_value: bool) -> bool:
        if not (by_value or self._small):
            return version_of(buffer) == self._versions[place]
        before = self._before[place]
        return before is None or same(buffer, before)
