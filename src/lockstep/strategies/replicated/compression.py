"""Gradients that are compressed before ranks send them, and summed over ranks.

A rank first adds up the gradients of its own micro-batches uncompressed; only the sent sum is compressed. So the result
depends on the number of ranks, and is equal, bit for bit, in each training with this number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

import torch
from torch import nn

from lockstep.collectives import Group, NativeAllReduce, RankOrderAllReduce
from lockstep.strategies.strategy import StateDict


class Compression(ABC):
    """How the gradients of each step are summed over ranks, bucket by bucket.

    What is not overridden is that of compressions which accept any model, leave no gradient unsent and open nothing.
    """

    def setup_model(self, model: nn.Module) -> None:  # noqa: B027 - most accept any
        """Prepare for the gradients of ``model``. Collective, with equal models in the same order."""

    @abstractmethod
    def begin(self, flat: torch.Tensor, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        """Begin the sum of this rank's gradients of some parameters.

        Args:
            flat: one-dimensional, the same length on every rank; the sum will arrive in it.
            parameters: all of one model.
            gradients: of ``parameters``, views of ``flat``.

        Collective, for the same parameters in the same order.
        """

    @abstractmethod
    def finish(self) -> None:
        """Wait for every begun sum, over all gradients of each model, with equal bits on all ranks. Collective."""

    def state_dict(self) -> StateDict:
        """The state that the next steps depend on. Collective."""
        return {}

    def load_state_dict(self, state: StateDict) -> None:  # noqa: B027 - most have none
        """Load `state_dict`, in which every tensor is whole; empty: start over. Collective."""

    def close(self) -> None:  # noqa: B027 - not all open any
        """End threads and connections; no sum is begun afterwards."""


class Uncompressed(Compression):
    """Gradients are sent as they are, through torch's own all-reduce."""

    def __init__(self, group: Group) -> None:
        self._sums: Final = NativeAllReduce(group)

    def begin(self, flat: torch.Tensor, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        """Begin torch's all-reduce of ``flat``."""
        self._sums.begin(flat)

    def finish(self) -> None:
        """Wait for every sum that was begun."""
        self._sums.finish()


class Cast(Compression):
    """Gradients sent and added as numbers of two bytes: half of the traffic of fp32, a quarter of fp64.

    Gradients are rounded once before they are sent and once by each addition. bf16 has the range of fp32 and 8 bits of
    precision. fp16 has 11 bits; below 6e-8 it is zero and above 65504 infinite, which the loss scale of
    ``precision="fp16"`` sees and skips. The summands are shares of the mean over the global batch, so more ranks bring
    no number nearer to this limit.
    """

    def __init__(self, group: Group, dtype: torch.dtype) -> None:
        self._dtype: Final = dtype
        self._sums: Final = RankOrderAllReduce(group)
        self._begun: list[tuple[torch.Tensor, torch.Tensor]] = []  # the target of each sum, and the sent tensor

    def begin(self, flat: torch.Tensor, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        """Begin the sum of ``flat`` in the smaller type."""
        sent = flat.to(self._dtype) if flat.dtype.itemsize > self._dtype.itemsize else flat
        self._sums.begin(sent)
        if sent is not flat:
            self._begun.append((flat, sent))

    def finish(self) -> None:
        """Wait for every begun sum, and convert each back to its own type."""
        begun, self._begun = self._begun, []
        self._sums.finish()
        for flat, sent in begun:
            flat.copy_(sent)

    def close(self) -> None:
        """End the threads and connections."""
        self._sums.close()
