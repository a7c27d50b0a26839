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
    """Handles signals that ask a worker to stop while no `Run` is open, which handles them itself."""

    def __init__(self) -> None:
        self.asked = False
        self._interrupts = False

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
