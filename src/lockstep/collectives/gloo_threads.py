"""Gloo's threads: the interpreter ends while they rest, and no forked process destroys what they belong to.

    main thread     the collective is over ─► destroy ─► interpreter ends
    gloo's thread       └─► lets go of its tensors ─ ─ ─ ─ ─ ─ ─ ┴─ needs the lock, and aborts the process

A thread of gloo releases the tensors of a collective after the main thread knows that the collective is over. To
release a tensor that Python knows, too, the thread needs Python's global lock. If a thread asks for this lock while the
interpreter ends, Python before 3.14 ends the thread in a way that C++ answers by aborting the process: "terminate
called without an active exception", SIGABRT (https://github.com/pytorch/pytorch/issues/190489). Destroying a process
group ends its threads only if no other object refers to the group, and models and strategies do.

A forked process, such as a loader process, has the process groups without their threads. There a process group that is
destroyed waits for its threads without end, or reads what is no more: a segmentation fault. The garbage collector would
destroy those that are garbage in the rank at the time of the fork. So nothing that a forked process has inherited
becomes its garbage, from the fork on.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
import threading
import time
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group

from lockstep.cpython_private import leaves_at_once

#: The name of these threads in the system.
_NAME = "pt_gloo_runloop"
#: The threads rest within a millisecond. If a peer is gone, a thread may wait for it for minutes, which is a rest, too.
_PATIENCE_S = 2.0

_destroyed = threading.Event()  # process groups were destroyed
_forks = threading.RLock()  # for the length of a fork; a signal's handler may fork once more
_collected: list[bool] = []  # whether the garbage collector was on, before each of the forks under way


def _before_fork() -> None:
    _forks.acquire()
    _collected.append(gc.isenabled())
    gc.disable()  # the forked process executes some Python before its own part of this


def _after_fork() -> None:
    if _collected.pop():
        gc.enable()
    _forks.release()


def _after_fork_in_child() -> None:
    gc.freeze()
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)


def destroy_process_groups(*, abort: bool = False) -> None:
    """Destroy all process groups of torch; where the interpreter ends, it waits until gloo's threads rest.

    With ``abort``, collectives under way over NCCL are aborted. Else they are waited for, up to the timeout of
    collectives if another rank does not take part any more.
    """
    if abort:
        _abort_process_group()
    else:
        dist.destroy_process_group()
    _destroyed.set()


def _wait_for_rest() -> None:
    """At the end of the interpreter: wait until gloo's threads rest; for 2 s at most, mostly 11 ms."""
    if not _destroyed.is_set() or leaves_at_once():
        return
    end_s = time.monotonic() + _PATIENCE_S
    before = None
    while (now := _activity()) and (now != before or not all(map(_rests, now.values()))):
        if time.monotonic() > end_s:
            break
        before = now
        # A thread that waits for Python's lock wakes once in each switch interval, which the system counts.
        time.sleep(2.2 * sys.getswitchinterval())


# Now, so that the threads rest after all that the script does at its end, such as closing a run.
atexit.register(_wait_for_rest)


def _activity() -> dict[str, tuple[str, ...]]:
    """The state of each of gloo's threads, and how often the thread was woken; empty if the system does not say."""
    found = {}
    for thread in Path("/proc/self/task").glob("*"):
        # A thread may end meanwhile.
        with contextlib.suppress(OSError):
            if (thread / "comm").read_text().strip() == _NAME:
                lines = (thread / "status").read_text().splitlines()
                found[thread.name] = tuple(line for line in lines if line.startswith(("State", "voluntary", "nonvol")))
    return found


def _rests(activity: tuple[str, ...]) -> bool:
    return any("(sleeping)" in line for line in activity)
