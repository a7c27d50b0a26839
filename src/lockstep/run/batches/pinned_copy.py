"""Values of a GPU that the host reads later, without a wait for what is queued after them."""

from __future__ import annotations

from typing import Final

import torch


class PinnedCopy:
    """``values``, of one dimension, on their way to page-locked memory, behind what is queued on their GPU now."""

    def __init__(self, values: torch.Tensor) -> None:
        with torch.cuda.device(values.device):
            on_cpu = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._on_cpu: Final = on_cpu.copy_(values, non_blocking=True)
            self._arrived: Final = torch.cuda.Event(blocking=True)  # else a core spins while the GPU computes
            self._arrived.record()

    def read(self) -> list[float]:
        """The values; waits until they have arrived, and for nothing that was queued since."""
        self._arrived.synchronize()
        values: list[float] = self._on_cpu.tolist()
        return values
