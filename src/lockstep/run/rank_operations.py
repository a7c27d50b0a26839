"""What the script does between ranks: sums, means, gathering, broadcasts, barriers, and work that one rank does first.

Each is named after the line of the script that called it, so that a rank which waits says where.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TypeVar, cast

import numpy as np
import torch

from lockstep.collectives import Group
from lockstep.errors import LockstepError, UsageError
from lockstep.world import World

T = TypeVar("T")
_NO_DEADLINE_S = 7 * 24 * 3600.0
_PACKAGE = __name__.rpartition(".")[0]


class RankOperations:
    """Collectives over any value, on the CPU for what is no tensor."""

    def __init__(self, group: Group, world: World) -> None:
        self._group: Final = group
        self._world: Final = world
        self._leader_firsts = 0

    def sum(self, value: T) -> T:
        """The sum over ranks of a number or a tensor, the same bits on each. Collective."""
        return self._reduce(value, f"sum at {_caller()}")

    def mean(self, value: T) -> T:
        """The mean over ranks of a number or a tensor, each rank counting once; the same bits on each. Collective."""
        total = self._reduce(value, f"mean at {_caller()}")
        return cast(T, total / self._group.size)  # type: ignore[operator]

    def gather(self, value: T) -> list[T]:
        """The value of each rank, by rank, on all of them; any picklable object. Collective."""
        return self._group.gather_objects(value, f"gather at {_caller()}")

    def broadcast(self, value: T) -> T:
        """The leader's value, on all ranks; any picklable object. Collective."""
        return self._group.broadcast_object(value, f"broadcast at {_caller()}")

    def barrier(self) -> None:
        """Wait until every rank has come here. Collective."""
        self._group.barrier(f"barrier at {_caller()}")

    @contextlib.contextmanager
    def leader_first(self) -> Iterator[None]:
        """Within it, the first rank of each node goes ahead and the others of the node wait for its end. Collective."""
        self._leader_firsts += 1
        key = f"{self._leader_firsts}/{self._world.node_rank}"
        store = self._group.store("leader-first")
        if self._world.leads_node:
            try:
                yield
            finally:
                failed = sys.exception() is not None
                store.set(key, "failed" if failed else "done")
        else:
            if store.get(key, _NO_DEADLINE_S) == "failed":
                raise LockstepError("the leader of this node failed inside run.leader_first(); see its error")
            yield

    def _reduce(self, value: T, what: str) -> T:
        if isinstance(value, torch.Tensor):
            shapes = self._group.gather_objects((tuple(value.shape), str(value.dtype)), what)
            if len(set(shapes)) > 1:
                raise UsageError(f"{what}: ranks give tensors of different shape or type: {shapes}")
            is_whole = not (value.is_floating_point() or value.is_complex())
            return cast(T, self._group.sum_tensor(value.long() if is_whole else value, what))
        # Small integer types of NumPy's would wrap around.
        if isinstance(value, np.generic):
            value = value.item()
        elif isinstance(value, np.ndarray) and value.dtype.kind in "biu" and value.itemsize < 8:
            value = cast(T, value.astype(np.int64))
        return cast(T, sum(self._group.gather_objects(value, what)))


def _caller() -> str:
    """The user's file and line that called: the first frame outside of this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_PACKAGE):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
