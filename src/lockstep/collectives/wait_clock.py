"""How long the main thread of this rank has waited for other ranks, for whoever takes a step apart."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch.distributed as dist


class WaitClock:
    """Counts the seconds in which the main thread waits. Each wait costs 0.2 microseconds more by it."""

    def __init__(self) -> None:
        self.seconds = 0.0  #: since the process began
        self._main: Final = threading.main_thread().ident
        self._inside = False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """What runs inside is a wait for other ranks; one within another counts once."""
        if self._inside or threading.get_ident() != self._main:
            yield
            return
        self._inside, began = True, time.perf_counter()
        try:
            yield
        finally:
            self._inside = False
            self.seconds += time.perf_counter() - began

    def count_torchs_own(self) -> Callable[[], None]:
        """Count, too, what torch's own code waits for, such as FSDP; the function that is returned ends that."""
        torchs_wait = dist.Work.wait

        def wait(work: dist.Work, *arguments: Any, **options: Any) -> Any:
            with self.waiting():
                return torchs_wait(work, *arguments, **options)

        def restore() -> None:
            dist.Work.wait = torchs_wait  # type: ignore[method-assign]

        dist.Work.wait = wait  # type: ignore[assignment, method-assign]
        return restore


_CLOCK: Final = WaitClock()


def wait_clock() -> WaitClock:
    """The wait clock of this process."""
    return _CLOCK
