"""Ties a process's life to its parent's, and says which signals ask a run to stop."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator

#: Ask the whole run to stop. Schedulers send most of them as a warning before the end of a job, some to each process.
STOPS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGXCPU,
)

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process, with SIGKILL, when its parent dies; it does so on Linux only.

    The parent is the *thread* that forked: it must live as long as the parent.

    Args:
        parent: the parent's process id, as the parent knew it before it forked.
    """
    if sys.platform != "linux":
        return
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before the kernel was told.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def stops_held() -> Iterator[None]:
    """A process that is started meanwhile gets none of `STOPS` until it unblocks them.

    A scheduler may tell every process of a job to stop, also one that has not had the time to say what it does then.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def name_process(name: str) -> None:
    """Set what ``top`` and ``ps -o comm`` show, at most 15 characters."""
    if sys.platform == "linux":
        buffer = ctypes.create_string_buffer(name.encode("ascii", "replace")[:15])
        _prctl(_PR_SET_NAME, ctypes.addressof(buffer))


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0)
