"""The end of a script: what the script has left open is closed then, as a ``with`` statement would have closed it.

under lockstep run        the launcher runs the script within `closing`
under anything else       `sys.excepthook` gives the error that ended the script, `atexit` says that it is over

Both are needed. A rank of ``lockstep run`` has its exit code from what was raised, and that can come from closing, too.
Under other launchers nothing runs around the script.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import NoReturn

from lockstep.launch_contract import EXIT_FAILED

Close = Callable[[BaseException | None], None]

_open: list[tuple[int, Close]] = []  # each with the process that opened it; a copy of that process closes nothing
_hook_before = sys.excepthook


def close_at_script_end(close: Close) -> None:
    """Call ``close`` when the script ends, with the error that ends it or None, unless `forget` comes before."""
    global _hook_before
    _open.append((os.getpid(), close))
    atexit.register(_at_exit)
    if sys.excepthook is not _on_error:
        _hook_before, sys.excepthook = sys.excepthook, _on_error


def forget(close: Close) -> None:
    """``close`` was called, or another one will call it."""
    _open[:] = [entry for entry in _open if entry[1] != close]
    if not _open:
        atexit.unregister(_at_exit)
        if sys.excepthook is _on_error:
            sys.excepthook = _hook_before


def close_open() -> None:
    """Close what the script has left open, as at its end without an error."""
    _close_all(None)


@contextlib.contextmanager
def closing() -> Iterator[None]:
    """The script runs within; at its end, by an error or not, what it has left open is closed.

    Raises:
        BaseException: what closing raises, such as SystemExit with code 74.
    """
    try:
        yield
    except BaseException as error:
        _close_all(error)
        raise
    _close_all(None)


def _close_all(error: BaseException | None) -> None:
    """The last one that was opened first."""
    while _open:
        process, close = _open[-1]
        forget(close)
        if process == os.getpid():
            close(error)


def _on_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """`sys.excepthook`: the error is printed after closing, which may add a note to it."""
    if _is_interactive():
        _hook_before(kind, error, trace)
        return
    # Another hook that was put before this one calls it: then only what was there before is left to be called.
    is_first = sys.excepthook is _on_error
    _close_all(error)
    (sys.excepthook if is_first else _hook_before)(kind, error, trace)


def _is_interactive() -> bool:
    """Whether an error ends one line of a session, and not the script."""
    return hasattr(sys, "ps1") or bool(sys.flags.inspect)


def _at_exit() -> None:
    try:
        _close_all(None)
    except SystemExit as ending:
        # Python's own exit code is decided by now, and it does not ask exit handlers.
        leave(ending.code if isinstance(ending.code, int) else EXIT_FAILED)
    except BaseException as error:  # noqa: BLE001 - it ends the process, as it would have within the script
        sys.excepthook(type(error), error, error.__traceback__)
        leave(EXIT_FAILED)


def leave(code: int) -> NoReturn:
    """End this process with ``code``, without what an interpreter does at its end, but for writing what was printed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
