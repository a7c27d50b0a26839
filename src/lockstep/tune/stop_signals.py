"""Signals that ask a worker of a search to stop, between its trials and within them."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Final

_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)


class Interrupted(BaseException):
    """A signal asks to stop, and no run is there that would save first."""


class StopSignals:
    """Signals that ask a worker to stop, as long as no run listens to them itself."""

    def __init__(self) -> None:
        self.asked = False
        self._interrupts = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Within, signals are taken note of; in the main thread, as Python allows it only there."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._note) for number in _STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """Within, a signal raises an error at once: what runs could not save anything anyway."""
        self._interrupts = True
        try:
            yield
        finally:
            self._interrupts = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if self._interrupts:
            raise Interrupted(signal.Signals(number).name)
