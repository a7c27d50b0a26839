"""Waits until gloo's threads rest, so that none of them needs Python's lock while the interpreter ends.

    main thread     the collective is over ─► destroy ─► interpreter ends
    gloo's thread       └─► lets go of its tensors ─ ─ ─ ─ ─ ─ ─ ┴─ needs the lock, and aborts the process

A thread of gloo lets go of the tensors of a collective after the main thread knows that the collective is over. For a
tensor that Python knows, too, it needs Python's global lock. If a thread asks for this lock while the
interpreter ends, Python before 3.14 ends the thread in a way that C++ answers by aborting the process: "terminate
called without an active exception", SIGABRT (https://github.com/pytorch/pytorch/issues/190489). Destroying a process
group ends its threads only where nothing else refers to it, and models and strategies do.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group

#: The name of these threads in the system.
_NAME = "pt_gloo_runloop"
#: They rest within a millisecond. Where a peer is gone, one may wait for it for minutes: that is a rest, too.
_PATIENCE_S = 2.0


def destroy_process_groups(*, abort: bool = False) -> None:
    """Destroy all process groups of torch, and wait until gloo's threads rest; for 2 s at most, mostly 11 ms.

    With ``abort``, what is under way over NCCL is broken off. Else it is waited for, up to the timeout of collectives,
    where another rank does not take part in it any more.
    """
    if abort:
        _abort_process_group()
    else:
        dist.destroy_process_group()
    end_s = time.monotonic() + _PATIENCE_S
    before = None
    while (now := _activity()) and (now != before or not all(map(_rests, now.values()))):
        if time.monotonic() > end_s:
            break
        before = now
        # A thread that waits for Python's lock wakes once in each switch interval, and that is counted.
        time.sleep(2.2 * sys.getswitchinterval())


def _activity() -> dict[str, tuple[str, ...]]:
    """The state of each of gloo's threads, and how often it was woken; nothing where the system does not say."""
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
