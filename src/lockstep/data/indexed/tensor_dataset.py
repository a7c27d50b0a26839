"""Data sets in memory as tensors: whole micro-batches by index, without collating single samples.

No random numbers are drawn, so nothing is seeded; and since a gather of one micro-batch takes microseconds, no loader
process would help.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from lockstep.data.indexed.sampling import Data, UserDataset
from lockstep.errors import DataError

_SMALL: Final = 1 << 26  # bytes of a tensor of which all rows are compared


@dataclass(frozen=True, slots=True)
class TensorColumns:
    """Tensors of equal length; sample ``i`` is row ``rows[i]`` of each, or row ``i`` if ``rows`` is None."""

    tensors: tuple[Tensor, ...]
    rows: Tensor | None
    build: Callable[[list[Tensor]], Data]  #: the user's own shape around the tensors: list, tuple, dict...

    def __len__(self) -> int:
        return len(self.tensors[0]) if self.rows is None else len(self.rows)

    def spread(self) -> list[Tensor]:
        """Rows of each tensor: all of a tensor of up to 64 MiB, and about a thousand of a larger one."""
        length = len(self)
        steps = [1 if t[:1].nbytes * length <= _SMALL else max(1, length // 1000) for t in self.tensors]
        if self.rows is None:
            return [t[::step] for t, step in zip(self.tensors, steps, strict=True)]
        rows = self.rows.to(self.tensors[0].device)
        return [t.index_select(0, rows[::step]) for t, step in zip(self.tensors, steps, strict=True)]

    def arranged(self, order: Tensor | range) -> Tensor | range:
        """The rows in ``order``, on the tensors' device; called once an epoch, so that a micro-batch is one gather."""
        if isinstance(order, range) and self.rows is None:
            return order
        rows = self.rows if isinstance(order, range) else order if self.rows is None else self.rows[order]
        assert rows is not None
        return rows.to(self.tensors[0].device)

    def take(self, rows: Tensor | range) -> Data:
        """Copies of ``rows``, a part of the result of `arranged`.

        Neighbouring rows are copied, too: the loop may change its batch in place without changing the data set, and
        memory always begins at an allocator's boundary, since some kernels round differently on unaligned memory.
        """
        if isinstance(rows, range):
            return self.build([t[rows.start : rows.stop].clone() for t in self.tensors])
        return self.build([t.index_select(0, rows) for t in self.tensors])


def columns_of(dataset: UserDataset) -> TensorColumns | None:
    """``dataset`` as columns, or None if its samples have to be read singly.

    Columns are: a `TensorDataset`, a `Subset` of a `TensorDataset` (also nested), a tensor, a tuple or a dict of
    tensors, and a list of tensors that differ in shape or type (a list of equal shapes and types may be a list of
    samples, and is refused).

    Raises:
        DataError: for tensors that differ in length, or a tuple or dict in which only some items are tensors.
    """
    # A subclass may override __getitem__, for example to augment: only the plain classes are accepted.
    if type(dataset) is TensorDataset:
        return _columns(dataset.tensors, list)
    if type(dataset) is Subset:
        inner = columns_of(dataset.dataset)
        return None if inner is None else _part(inner, dataset.indices)
    if isinstance(dataset, Tensor):
        return _columns((dataset,), lambda tensors: tensors[0])
    if isinstance(dataset, dict) and any(isinstance(value, Tensor) for value in dataset.values()):
        names = tuple(dataset)
        return _columns(tuple(dataset.values()), lambda tensors: dict(zip(names, tensors, strict=True)))
    if isinstance(dataset, tuple) and any(isinstance(value, Tensor) for value in dataset):
        return _columns(dataset, getattr(type(dataset), "_make", tuple))
    if isinstance(dataset, list) and dataset and all(isinstance(value, Tensor) and value.ndim for value in dataset):
        return _columns_of_list(dataset)
    return None


def _columns(tensors: Sequence[Any], build: Callable[[list[Tensor]], Data]) -> TensorColumns:
    odd = next((value for value in tensors if not isinstance(value, Tensor)), None)
    if odd is not None:
        raise DataError(
            f"a data set of tensors also holds a {type(odd).__name__}; turn it into a tensor with one row per sample, "
            "or pass a data set with __getitem__ and __len__"
        )
    if any(t.ndim == 0 for t in tensors):
        raise DataError("a data set of tensors holds one without dimensions; each needs one row per sample")
    if len({len(t) for t in tensors}) > 1:
        lengths = ", ".join(str(len(t)) for t in tensors)
        raise DataError(f"the tensors of the data set differ in length ({lengths}); each needs one row per sample")
    return TensorColumns(tuple(tensors), None, build)


def _columns_of_list(tensors: list[Tensor]) -> TensorColumns | None:
    lengths = {len(t) for t in tensors}
    if len(lengths) > 1:
        return None  # samples of different sizes
    if len({(t.shape, t.dtype) for t in tensors}) == 1:
        raise DataError(
            f"a list of {len(tensors)} tensors of shape {tuple(tensors[0].shape)} may be columns or samples; "
            "for columns pass tuple(the_list), for samples torch.stack(the_list)"
        )
    return _columns(tensors, list)


def _part(whole: TensorColumns, indices: Sequence[int]) -> TensorColumns:
    rows = torch.as_tensor(indices, dtype=torch.int64, device="cpu")
    length = len(whole)
    if len(rows) and not -length <= int(rows.min()) <= int(rows.max()) < length:
        raise DataError(
            f"a Subset takes samples {int(rows.min())} to {int(rows.max())} of a data set of {length}; "
            "its indices must lie within the data set"
        )
    rows = torch.where(rows < 0, rows + length, rows)
    return TensorColumns(whole.tensors, rows if whole.rows is None else whole.rows[rows], whole.build)
