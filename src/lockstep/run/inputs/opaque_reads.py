"""What a body may read that neither a look at objects nor a checkpoint knows: clocks, files, databases, queues."""

from __future__ import annotations

import time
from datetime import date, datetime
from typing import Final

from lockstep.run.source.reachable import mark_of
from lockstep.run.source.source_reads import Path

_CLOCKS: Final = (
    *(time.time, time.monotonic, time.perf_counter, time.process_time, time.thread_time, time.clock_gettime),
    *(time.time_ns, time.monotonic_ns, time.perf_counter_ns, time.process_time_ns),
    *(vars(datetime)["now"], vars(datetime)["utcnow"], vars(date)["today"]),
)
#: The modules of objects that hold such things.
_STORES: Final = {"sqlite3", "_io", "queue", "_queue", "shelve", "multiprocessing.queues"}


def opaque_read(path: Path, function: object, owner: object, *, ends_loop: bool) -> str:
    """What a call reads, in words; "" where that is nothing of these.

    Args:
        path: what is called.
        function: the same, if it is known.
        owner: the object whose method it is.
        ends_loop: whether that decides only how long a loop goes on: a clock may.
    """
    if not ends_loop and any(function is clock for clock in _CLOCKS):
        return f"the clock, by {path.text}()"
    if function is open:
        return f"what {path.text}(...) reads, which no checkpoint has"
    is_store = type(owner).__module__ in _STORES and mark_of(owner) is None
    return f"what {path.owner.text} holds, which no checkpoint has" if is_store else ""
