"""The private names of Python's standard library that Lockstep uses: each is taken here, and nowhere else.

A release of Python may change any of them. So each function says what it is for, and what goes wrong if the name is
gone; `tests/ranks/test_private_names.py` calls each of them. All were tried with Python 3.11.
"""

from __future__ import annotations

import argparse
import atexit
import subprocess
import threading
import weakref
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.popen_fork import Popen
    from multiprocessing.process import BaseProcess

# ---- argparse

ArgumentGroup = argparse._ArgumentGroup


def actions_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """The options and arguments of ``parser``. Without it, no command knows the options of another one."""
    return parser._actions


def add_action(parser: argparse.ArgumentParser, action: argparse.Action) -> None:
    """Let ``parser`` have an option of another parser."""
    parser._add_action(action)


def actions_by_option(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """The options of ``parser`` by their spellings, to which other spellings can be added."""
    return parser._option_string_actions


# ---- processes


def interpreter_flags() -> list[str]:
    """The flags of this Python, such as ``-O``. Without it, ranks run under other flags than their launcher."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return flags


def children_of_multiprocessing() -> Collection[Any]:
    """The processes that `multiprocessing` has started here, also those that have ended and were not waited for."""
    from multiprocessing import process

    children: Collection[Any] = process._children  # type: ignore[attr-defined]
    return children


def launch_fork(process: BaseProcess) -> Popen:
    """``process`` as a copy of this one, without a flush of the standard streams before."""
    from multiprocessing.popen_fork import Popen

    started: Popen = object.__new__(Popen)
    started.returncode, started.finalizer = None, None
    started._launch(process)  # type: ignore[attr-defined]
    return started


def set_temporary_directory(directory: str) -> None:
    """Let `multiprocessing` make its sockets in ``directory``. Without it, a killed rank leaves them behind."""
    from multiprocessing import current_process

    current_process()._config["tempdir"] = directory  # type: ignore[attr-defined]


# ---- the end of the interpreter


def wait_for_threads() -> None:
    """Wait for the threads that are no daemons, as the interpreter does first at its end."""
    threading._shutdown()  # type: ignore[attr-defined]


def run_exit_handlers() -> None:
    """Run what was registered with `atexit`, and forget it, in a process that leaves by `os._exit` afterwards."""
    _leaving_at_once.set()
    atexit._run_exitfuncs()


_leaving_at_once = threading.Event()


def leaves_at_once() -> bool:
    """Within an exit handler: whether the process leaves by `os._exit`, so that no interpreter ends."""
    return _leaving_at_once.is_set()


def forget_exit_handlers() -> None:
    """Forget what was registered for the end of the process, but let `multiprocessing` end what it has started."""
    from multiprocessing import util

    forget_finalizers()
    atexit._clear()
    atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]
    atexit.register(util._exit_function)  # type: ignore[attr-defined]


def forget_finalizers() -> None:
    """Let no object of today be finalized by `weakref.finalize` at the end of this process, or of copies of it.

    Without it each rank takes 30 ms longer to end: it takes apart the libraries of operations that torch has made in
    the process of which the rank is a copy.
    """
    for one in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        one.atexit = False
