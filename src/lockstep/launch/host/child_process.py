"""Shared by the launcher's own processes: command, environment, ending with the parent, and signals."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from lockstep.cpython_private import interpreter_flags
from lockstep.errors import SettingError
from lockstep.launch_contract import STOP_SIGNALS

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def require_linux(instead: str) -> None:
    """Check that processes can be started here that end with this one.

    Args:
        instead: what works on every system.

    Raises:
        SettingError: if this is not Linux.
    """
    if sys.platform != "linux":
        raise SettingError(f"starting ranks needs Linux, and this system is {sys.platform}; {instead}")


def without_ignored_hangup(signals: Iterable[signal.Signals]) -> list[signal.Signals]:
    """``signals`` without SIGHUP if this process ignores it, as under ``nohup``: it is to outlive its terminal."""
    nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signum for signum in signals if not (nohup and signum == signal.SIGHUP)]


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process, with SIGKILL, when its parent dies; it does so on Linux only.

    The parent is the *thread* that forked: it must live as long as the parent.

    Args:
        parent: the parent's process id, as the parent knew it before it forked.
    """
    if sys.platform != "linux":
        return
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before this was set.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def signal_when_parent_dies(signum: int) -> None:
    """Have the kernel send this process ``signum`` when the thread that forked it ends; on Linux only."""
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, signum)


@contextlib.contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """A process that is started inside this context gets none of `STOP_SIGNALS` until it unblocks them.

    A scheduler may signal every process of a job, also one that has not had the time to install its handlers.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def kill_group(process: int) -> None:
    """Kill ``process`` and the processes of its group, as far as they live."""
    # One that was started this very moment has no group of its own yet.
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(process, signal.SIGKILL)


def own_python(role: str, args: list[str]) -> list[str]:
    """The command for one of this package's own processes (see `lockstep.launch.__main__`)."""
    # -P: the current directory must not lend its random.py to us; the program's own path is set by its ranks.
    return [sys.executable, *_flags(), "-P", "-m", "lockstep.launch", role, *args]


def _flags() -> list[str]:
    """The flags of this Python, such as ``-O -X dev``, but for those that would keep another one from our package."""
    return [flag for flag in interpreter_flags() if flag not in ("-I", "-E", "-s", "-S", "-P")]


def with_this_package(env: Mapping[str, str]) -> dict[str, str]:
    """``env`` under which another Python finds the package that runs here, such as one that is not installed."""
    source = str(Path(__file__).parents[3])
    if source in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), site.getusersitepackages()):
        return dict(env)
    return {**env, "PYTHONPATH": os.pathsep.join(path for path in (env.get("PYTHONPATH"), source) if path)}


def name_process(name: str) -> None:
    """Set what ``top`` and ``ps -o comm`` show, at most 15 characters."""
    if sys.platform == "linux":
        buffer = ctypes.create_string_buffer(name.encode("ascii", "replace")[:15])
        _prctl(_PR_SET_NAME, ctypes.addressof(buffer))


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0)
