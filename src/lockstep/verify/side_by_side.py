"""Several tasks at the same time, each in a copy of this process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import TypeVar

from lockstep.errors import LaunchError
from lockstep.launch import die_with_parent

T = TypeVar("T")


def side_by_side(tasks: Sequence[Callable[[], T]], at_once: int) -> Iterator[tuple[int, T]]:
    """The number and the result of each task, in the order in which they end; so many run ``at_once``.

    When this is left, also by an error, none of them goes on.

    Raises:
        LaunchError: if a copy has died, or its task has failed.
    """
    context = multiprocessing.get_context("fork")
    waiting = list(enumerate(tasks))[::-1]
    running: dict[Connection, tuple[int, ForkProcess]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                number, task = waiting.pop()
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_carry_out, args=(task, theirs, os.getpid()))
                with warnings.catch_warnings():
                    # Python warns of other threads, such as those of a test runner; the copy does not use them.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
                theirs.close()
                running[ours] = number, process
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                number, process = running.pop(ready)
                with ready:
                    try:
                        result, error = ready.recv()
                    except EOFError:
                        result, error = None, "its process died"
                process.join()
                process.close()
                if error:
                    raise LaunchError(f"a run could not be made: {error}")
                yield number, result
    finally:
        for connection, (_, process) in running.items():
            connection.close()
            process.terminate()
            process.join()
            process.close()


def _carry_out(task: Callable[[], object], pipe: Connection, parent: int) -> None:
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the original ends its copies
    try:
        pipe.send((task(), ""))
    except Exception as error:  # noqa: BLE001 - whatever it is, the original says it
        pipe.send((None, f"{type(error).__name__}: {error}"))
