"""Waiting in tests: for something to happen, never for a time to pass."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: For what takes a second on an idle machine.
DEADLINE_S = 90.0


def wait_until(
    happened: Callable[[], T],
    what: str | Callable[[], str] = "it",
    *,
    deadline_s: float = DEADLINE_S,
    every_s: float = 0.02,
) -> T:
    """The first true value that ``happened`` returns.

    Args:
        happened: called again and again.
        what: what is waited for, for the error.
        deadline_s: after which it is an error.
        every_s: between two calls.

    Raises:
        AssertionError: if it does not happen in time.
    """
    end_s = time.monotonic() + deadline_s
    while not (value := happened()):
        if time.monotonic() > end_s:
            raise AssertionError(f"waited {deadline_s:g} s for {what() if callable(what) else what}")
        time.sleep(every_s)
    return value
