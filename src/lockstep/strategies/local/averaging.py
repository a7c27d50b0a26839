"""Sums and means over ranks of tensors that each rank holds whole, such as its parameters.

Torch has averagers for this (`torch.distributed.algorithms.model_averaging`). Torch's averagers are not used, because
they sum in the order of the backend, average only parameters with a gradient, which may differ between ranks, and leave
out buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from lockstep.collectives import Group, RankOrderAllReduce, translating_peer_errors
from lockstep.strategies.local.flat_ranges import by_dtype, cut, gather, scatter, sizes_of
from lockstep.torch_private import foreach_div_

#: MiB that are summed at once by default: enough for any link, and little compared with a model.
_BUCKET_MB = 25.0


class RankAverager:
    """Sums and means over the ranks of ``group``, in an order that is fixed for their number. Collective."""

    def __init__(self, group: Group, bucket_mb: float | None) -> None:
        self.group: Final = group
        self._bucket_bytes: Final = (bucket_mb or _BUCKET_MB) * 2**20
        self._sums: Final = RankOrderAllReduce(group)

    def begin(self, flat: torch.Tensor) -> None:
        """Begin the sum of every rank's ``flat``, one-dimensional; after `finish`, ``flat`` holds the sum."""
        with translating_peer_errors("the exchange of parameters"):
            for chunk in flat.split(self._at_once(flat)):
                self._sums.begin(chunk)

    def finish(self) -> None:
        """Wait for all sums that were begun."""
        with translating_peer_errors("the exchange of parameters"):
            self._sums.finish()

    def sums(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The sum of each tensor over all ranks, in new memory; all ranks must give tensors of equal shapes."""
        results = [torch.empty_like(t, requires_grad=False) for t in tensors]
        for places in by_dtype(tensors):
            tensors_of_type, out = [tensors[place] for place in places], [results[place] for place in places]
            sizes = sizes_of(tensors_of_type)
            bytes_all = sum(t.numel() * t.element_size() for t in tensors_of_type)
            for ranges in cut(sizes, max(1, -int(-bytes_all // self._bucket_bytes))):
                flat = gather(tensors_of_type, ranges, self.group.device)
                if flat.numel():
                    self.begin(flat)
                    self.finish()
                    scatter(out, ranges, flat)
        return results

    def means(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """As `sums`, divided by the number of ranks."""
        results = self.sums(tensors)
        if results:
            foreach_div_(results, self.group.size)
        return results

    def close(self) -> None:
        """End threads and connections; no sum is begun afterwards."""
        self._sums.close()

    def _at_once(self, flat: torch.Tensor) -> int:
        return max(1, int(self._bucket_bytes) // flat.element_size())
