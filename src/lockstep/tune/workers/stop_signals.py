"""Signals that ask a worker of a search to stop, between its trials and within them."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Final

from lockstep.launch import without_ignored_hangup

_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)


class Interrupted(BaseException):
    """A signal asks to stop while no `Run` is open that would save a checkpoint first."""


class StopSignals:
    """Handles signals that ask a worker to stop while no `Run` is open, which handles them itself.

    Args:
        by_driver: a driver has started this worker, and would ask it to stop before it interrupts it; else it is its
            user who presses Ctrl-C.
    """

    def __init__(self, *, by_driver: bool) -> None:
        self.asked = False
        self._by_driver: Final = by_driver
        self._interrupts = False

    def means_stop(self, error: BaseException) -> bool:
        """Whether ``error``, which the objective has raised, asks the worker to stop, and not this trial to fail."""
        if isinstance(error, KeyboardInterrupt):
            return self.asked or not self._by_driver
        return isinstance(error, Interrupted)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Within, a signal sets ``asked``. Python allows it in the main thread only; elsewhere nothing happens."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._note) for number in without_ignored_hangup(_STOP_SIGNALS)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """Within, a signal also raises `Interrupted`: without a `Run` there is nothing to save first."""
        self._interrupts = True
        try:
            yield
        finally:
            self._interrupts = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if self._interrupts:
            raise Interrupted(signal.Signals(number).name)
