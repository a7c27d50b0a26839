"""A copy of a GPU's values that the host reads later, without a wait for later work on the GPU."""

from __future__ import annotations

from typing import Final

import torch


class PinnedCopy:
    """A copy of ``values``, of one dimension, to page-locked memory, queued on their GPU behind present work."""

    def __init__(self, values: torch.Tensor) -> None:
        with torch.cuda.device(values.device):
            on_cpu = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
            self._on_cpu: Final = on_cpu.copy_(values, non_blocking=True)
            self._arrived: Final = torch.cuda.Event(blocking=True)  # else a core spins while the GPU computes
            self._arrived.record()

    def read(self) -> list[float]:
        """The values; waits until they have arrived, but not for later work on the GPU."""
        self._arrived.synchronize()
        values: list[float] = self._on_cpu.tolist()
        return values
