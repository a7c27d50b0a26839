"""What `Run.train` and `Run.evaluate` hand out: an iterator that knows its length, for progress bars and schedules."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Final, Self

from lockstep.data import Data


class MicroBatches(Iterator[Data]):
    """This rank's micro-batches of one pass. Nothing begins before the first is asked for.

    Its length is how many this rank is handed out from the pass's first step on, those that count for nothing among
    them. It may be asked for at any time, also before the first, and does not change on the way.

    Left by ``break``, a loop over it drops it, and with it the pass is closed at once.
    """

    __slots__ = ("_batches", "_length")

    def __init__(self, batches: Generator[Data], length: Callable[[], int | None]) -> None:
        self._batches: Final = batches
        self._length: Final = length

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Data:
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
