"""Blocks that are gathered ahead of the computing block, in the order of their calls in the first forward pass."""

from __future__ import annotations

from typing import Final

from torch.distributed.fsdp import FSDPModule

from lockstep.torch_private import gather_aside


class Prefetch:
    """Lets blocks be gathered ahead, by torch's explicit prefetching.

    A block that is called in another order than in the first step is gathered at its call, and a block that is not
    called was gathered in vain.

    Args:
        ahead: number of blocks; 0: torch's own order is kept.
        over_cpu: whether blocks travel through the memory of the CPU: then in the background, since the CPU has no
            streams that could wait for blocks.
    """

    def __init__(self, ahead: int, *, over_cpu: bool) -> None:
        self._ahead: Final = ahead
        self._over_cpu: Final = over_cpu
        self._called: list[FSDPModule] = []  # in the first forward pass
        self._has_begun = not ahead

    def note_call(self, block: FSDPModule) -> None:
        """``block`` is called."""
        if not self._has_begun and block not in self._called:
            self._called.append(block)

    def begin(self) -> None:
        """The first forward pass is over: from now on blocks are gathered ahead."""
        if self._has_begun:
            return
        self._has_begun = True
        for place, block in enumerate(self._called):
            block.set_modules_to_forward_prefetch(self._called[place + 1 : place + 1 + self._ahead])
            block.set_modules_to_backward_prefetch(self._called[max(0, place - self._ahead) : place][::-1])
            if self._over_cpu:
                gather_aside(block)
        self._called = []
