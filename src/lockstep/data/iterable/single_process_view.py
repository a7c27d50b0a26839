"""What a stream sees of the world while it is read: one process that reads everything.

Streams try to divide themselves: ``datasets`` and ``webdataset`` ask torch which loader process they are in, or
the environment which rank, and give, or shuffle, each its own part. How a stream is divided is decided by its reader,
so here every process appears to it to be the only one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.torch_private import without_worker_info

#: What launchers, and webdataset for its loader processes, tell each process of its place.
_ALONE = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_RANK": "0",
    "NODE_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "WORKER": "0",
    "NUM_WORKERS": "1",
}


@contextmanager
def single_process_view() -> Iterator[None]:
    """Within, this process seems to be the only rank and no loader process; afterwards all is as it was.

    The environment's variables are the process's own: no other thread may read them, or enter here, meanwhile. Those
    that are not set stay so. About 15 us.
    """
    environment = os.environ
    hidden = {name: environment[name] for name in _ALONE if name in environment}
    environment.update({name: _ALONE[name] for name in hidden})
    try:
        with without_worker_info():
            yield
    finally:
        environment.update(hidden)
