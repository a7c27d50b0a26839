"""What `Run.train` and `Run.evaluate` hand out: an iterator that knows its length, for progress bars and schedules."""

from __future__ import annotations

import dis
import gc
import itertools
import os
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from types import CodeType
from typing import Final, NoReturn, Self

import numpy as np
import torch

from lockstep.batch import MicroBatchPosition
from lockstep.data import Data
from lockstep.errors import UsageError

_FOR: Final = dis.opmap["GET_ITER"]
_RANGE: Final = type(iter(range(0)))
_known_places: Final[set[tuple[CodeType, int]]] = set()
_ARRAYS: Final = (torch.Tensor, np.ndarray)
_PLAIN: Final = (str, bytes, int, float, np.generic)


class MicroBatches(Iterator[Data]):
    """This rank's micro-batches of one pass. Nothing begins before the first is asked for.

    Its length is how many this rank is handed out from the pass's first step on, those of padding among them, and those
    that are computed twice counted once. It may be asked for at any time, also before the first, and does not change on
    the way.

    Left by ``break``, a loop over it drops it, and with it the pass is closed at once.

    Args:
        batches: the micro-batches.
        length: their number; None: nobody knows.
        count_refused: raises an error if a script may not end the pass after a number of micro-batches.
    """

    __slots__ = ("_batches", "_count_refused", "_handed_on_at", "_length", "_process")

    def __init__(
        self,
        batches: Generator[Data],
        length: Callable[[], int | None],
        count_refused: Callable[[], None] = lambda: None,
    ) -> None:
        self._batches: Final = batches
        self._length: Final = length
        self._count_refused: Final = count_refused
        self._process: Final = os.getpid()
        # Where a function such as `enumerate` was given it, and has not asked for a micro-batch since.
        self._handed_on_at: tuple[CodeType, int] | None = None

    def __iter__(self) -> Self:
        caller = sys._getframe(1)
        at = caller.f_code, caller.f_lasti
        # Who holds it takes some 20 ms to find out: once for each place where no `for` loop asks.
        if caller.f_code.co_code[caller.f_lasti] != _FOR and at not in _known_places:
            self._handed_on_at = at
        return self

    def __next__(self) -> Data:
        if os.getpid() != self._process:
            _end_copy()
        if self._handed_on_at is not None:
            at, self._handed_on_at = self._handed_on_at, None
            if any(map(_counts, gc.get_referrers(self))):
                self._count_refused()
            else:
                _known_places.add(at)
        return next(self._batches)

    def __len__(self) -> int:
        length = self._length()
        if length is None:
            raise TypeError(
                "the number of micro-batches is known at the end only, as an iterable data set does "
                "not know its length; give it a method __len__"
            )
        return length

    def close(self) -> None:
        """End the pass here, as leaving a loop over it by ``break`` does."""
        self._batches.close()


def refuse_count(of: int) -> None:
    """The script takes the first n of them by `itertools.islice`; a step has ``of`` on all ranks.

    Raises:
        UsageError: if a step has several.
    """
    if of > 1:
        raise UsageError(
            "itertools.islice(run.train(...), n), or zip(range(n), run.train(...)), counts micro-batches of this "
            f"rank: one rank has {of} in a step, and several have fewer, so the steps would depend on the number "
            "of ranks. Count steps: `for _ in run.steps(n):` around the loop, or `if run.step(loss) and "
            "run.progress.step == n: break` in it"
        )


def _counts(holder: object) -> bool:
    """Whether ``holder`` of an iterator ends after a number of its items: an ``islice``, or a ``zip`` with a range."""
    if isinstance(holder, tuple) and any(isinstance(other, _RANGE) for other in holder):
        return any(isinstance(each, zip) for each in gc.get_referrers(holder))
    return isinstance(holder, itertools.islice)


def _end_copy() -> NoReturn:
    """End a process that was forked in the loop's body and has come back to the loop.

    It is no rank. What it read would be missing where its original reads, and at its end it would close for that
    whatever they share, such as loader processes.
    """
    sys.stderr.write(
        f"process {os.getpid()}, which was forked in the body of a loop over a run's micro-batches, has come back to "
        "the loop and is ended: it is no rank. Let it end by os._exit(...) where its work is done\n"
    )
    sys.stderr.flush()
    os._exit(1)


class LeftOutSamples:
    """Compares rows with samples from one micro-batch to the next of a pass; some microseconds each.

    A micro-batch has fewer rows where a collate function leaves out what it cannot read. A loss without a count is
    weighed by the samples that were picked. That is right where each row is one sample, and where all micro-batches
    make rows of samples alike, such as pairs; not where some have lost rows.
    """

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
