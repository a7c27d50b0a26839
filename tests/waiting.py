"""Waiting in tests: for something to happen, never for a time to pass."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: For what takes a second on an idle machine.
DEADLINE_S = 90.0


def wait_until(happened: Callable[[], T], why: str = "", deadline_s: float = DEADLINE_S) -> T:
    """The first true value that ``happened`` returns.

    Args:
        happened: called again and again, some fifty times a second.
        why: what is waited for, for the error.
        deadline_s: after which it is an error.

    Raises:
        AssertionError: if it does not happen in time.
    """
    end_s = time.monotonic() + deadline_s
    while not (value := happened()):
        assert time.monotonic() < end_s, f"{why or 'what was waited for'} did not happen within {deadline_s:g} s"
        time.sleep(0.02)
    return value
