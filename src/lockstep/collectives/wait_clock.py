"""The time in which this rank's main thread has waited for other ranks, for code that measures parts of a step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final

import torch.distributed as dist


class WaitClock:
    """Counts the seconds in which the main thread waits for other ranks, within ``with wait_clock():``.

    Counting takes about a microsecond per wait. A wait within another wait counts once; a wait of another thread does
    not count.
    """

    def __init__(self) -> None:
        self.seconds = 0.0  #: since the process began
        self._main: Final = threading.main_thread().ident
        self._depth = 0
        self._began = 0.0

    def __enter__(self) -> None:
        if threading.get_ident() == self._main:
            self._depth += 1
            if self._depth == 1:
                self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if threading.get_ident() == self._main:
            self._depth -= 1
            if not self._depth:
                self.seconds += time.perf_counter() - self._began

    def count_torchs_own(self) -> Callable[[], None]:
        """Also count the waits of torch's own code, such as FSDP; the returned function ends this."""
        torchs_wait = dist.Work.wait

        def wait(work: dist.Work, *arguments: Any, **options: Any) -> object:
            with self:
                return torchs_wait(work, *arguments, **options)

        def restore() -> None:
            dist.Work.wait = torchs_wait  # type: ignore[method-assign]

        dist.Work.wait = wait  # type: ignore[assignment, method-assign]
        return restore


_CLOCK: Final = WaitClock()


def wait_clock() -> WaitClock:
    """The wait clock of this process."""
    return _CLOCK
