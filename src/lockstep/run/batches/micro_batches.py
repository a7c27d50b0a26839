"""The iterator of `Run.train` and `Run.evaluate`, with a length, for progress bars and schedules."""

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
    """This rank's micro-batches of a pass, which begins when the first micro-batch is asked for.

    The length is this rank's number of micro-batches from the pass's first step on, including padding, and counting
    replayed micro-batches once. The length may be asked for at any time, also before the first micro-batch, and does
    not change in the pass.

    A loop that is left by ``break`` drops the iterator, which closes the pass at once.

    Args:
        batches: the micro-batches.
        length: number of micro-batches; None: not known.
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
        # The place where a function such as `enumerate` got the iterator, and has not asked for a micro-batch since.
        self._handed_on_at: tuple[CodeType, int] | None = None

    def __iter__(self) -> Self:
        caller = sys._getframe(1)
        at = caller.f_code, caller.f_lasti
        # Finding the holder takes some 20 ms: done once for each place where no `for` loop asks.
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
        """End the pass, as leaving a loop by ``break`` does."""
        self._batches.close()


def refuse_count(of: int) -> None:
    """Refuse taking the first n micro-batches by `itertools.islice`; a step has ``of`` micro-batches on all ranks.

    Raises:
        UsageError: if a step has several micro-batches.
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

    The forked process is no rank. Micro-batches that it read would be missing in the original process, and at its end
    it would close shared resources, such as loader processes.
    """
    sys.stderr.write(
        f"process {os.getpid()}, which was forked in the body of a loop over a run's micro-batches, has come back to "
        "the loop and is ended: it is no rank. Let it end by os._exit(...) where its work is done\n"
    )
    sys.stderr.flush()
    os._exit(1)


class LeftOutSamples:
    """Compares the numbers of rows and samples of a pass's micro-batches; takes some microseconds each.

    A micro-batch has fewer rows if a collate function leaves out unreadable samples. A loss without a count is weighted
    by the picked samples, which is right if each row is one sample, or if all micro-batches make rows of samples in the
    same way, such as pairs, but not if some micro-batches have lost rows.
    """

    def __init__(self) -> None:
        self.new_pass()

    def new_pass(self) -> None:
        """A pass begins: its data may be of another kind."""
        self._known = True  # whether rows may be samples
        self._rows = self._samples = 0  # of the first micro-batch
        self._lost: tuple[int, int, int, int] | None = (
            None  # rows and samples of a micro-batch that has lost rows, and of one that has not
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
        """Check a micro-batch whose loss came without a count.

        Raises:
            UsageError: if the micro-batch or the first micro-batch of the pass has lost samples, and not both.
        """
        if self._lost is not None:
            rows, samples, others, of = self._lost
            raise UsageError(
                f"the tensors of a micro-batch of {samples} samples have {rows} rows, and those of another one of {of} "
                f"have {others}: the collate function leaves out some, and run.step(loss) would weigh the loss by the "
                "samples that were picked. Say over how many items each loss is the mean: run.step(loss, count=len(x))"
            )


def _rows(data: Data, samples: int) -> int | None:
    """The first dimension of all tensors in ``data``; None if they differ, or if that dimension is not of samples."""
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
        shapes.append(())  # such as a graph, whose rows are unknown
