"""Micro-batches with fewer rows than samples, as where a collate function leaves out what it cannot read.

A loss without a count is weighed by the samples that were picked. That is right where each row is one sample, and where
all micro-batches make rows of samples alike, such as pairs; not where some have lost rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import torch

from lockstep.batch import MicroBatchPosition
from lockstep.data import Data
from lockstep.errors import UsageError

_ARRAYS: Final = (torch.Tensor, np.ndarray)
_PLAIN: Final = (str, bytes, int, float, np.generic)


class LeftOutSamples:
    """Compares rows with samples from one micro-batch to the next of a pass; some microseconds each."""

    def __init__(self) -> None:
        self.new_pass()

    def new_pass(self) -> None:
        """A pass begins: its data may be of another kind."""
        self._known = True  # whether rows may be samples
        self._rows = self._samples = 0  # of the first micro-batch
        self._lost: tuple[int, int, int, int] | None = (
            None  # the same of one that has lost some, and of one that has not
        )

    def note(self, position: MicroBatchPosition, data: Data) -> None:
        """The script gets ``data``."""
        self._lost = None
        if position.is_padding:
            return
        rows = _rows(data, position.samples) if self._known else None
        self._known = rows is not None and rows <= position.samples
        if rows is None or not self._known:
            return
        if not self._samples:
            self._rows, self._samples = rows, position.samples
        elif rows * self._samples != self._rows * position.samples:
            now, first = (rows, position.samples), (self._rows, self._samples)
            self._lost = (*now, *first) if rows * self._samples < self._rows * position.samples else (*first, *now)

    def refuse(self) -> None:
        """Check the micro-batch, whose loss came without a count.

        Raises:
            UsageError: if it, or the first one of the pass, has lost samples that the other one has not.
        """
        if self._lost is not None:
            rows, samples, others, of = self._lost
            raise UsageError(
                f"the tensors of a micro-batch of {samples} samples have {rows} rows, and those of another one of {of} "
                f"have {others}: the collate function leaves out some, and run.step(loss) would weigh the loss by the "
                "samples that were picked. Say over how many items each loss is the mean: run.step(loss, count=len(x))"
            )


def _rows(data: Data, samples: int) -> int | None:
    """The first dimension of all tensors in ``data``; None where they differ, or the first one is no sample's."""
    shapes: list[tuple[int, ...]] = []
    _add_shapes(data, shapes)
    for shape in shapes:  # without generators, which cost a microsecond each in every micro-batch
        if not shape or shape[0] != shapes[0][0]:
            return None
        if len(shape) > 1 and shape[1] == samples != shape[0]:
            return None
    return shapes[0][0] if shapes else None


def _add_shapes(value: object, shapes: list[tuple[int, ...]]) -> None:
    if isinstance(value, _ARRAYS):
        shapes.append(value.shape)
    elif isinstance(value, Mapping):
        for inner in value.values():
            _add_shapes(inner, shapes)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _add_shapes(inner, shapes)
    elif value is not None and not isinstance(value, _PLAIN):
        shapes.append(())  # such as a graph: nobody knows what its rows are
