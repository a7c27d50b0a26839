"""Operations of the script between ranks: sums, means, gather, broadcast, barrier, and work that one rank does first.

Each operation is named after the line of the script that called it, so that a rank which waits says where.
"""

from __future__ import annotations

import contextlib
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, TypeVar, cast

import numpy as np
import torch

from lockstep.batch import MicroBatchPosition
from lockstep.collectives import Group
from lockstep.errors import LockstepError, UsageError
from lockstep.heartbeat import find_user_frame
from lockstep.nested import leaves
from lockstep.run.checks.divergence import checksums
from lockstep.run.metrics.metric_means import PassMetrics
from lockstep.world import World

T = TypeVar("T")
_NO_DEADLINE_S = 7 * 24 * 3600.0


class RankOperations:
    """Collectives over any picklable value or tensor, on the CPU for all but tensors.

    Args:
        group: all ranks.
        world: the place of this rank.
        metrics: know the micro-batches of the step.
        require: called with the name of the operation before each of them: raises where ranks are not together.
        agree: called after it.
        warn: tells the user something, once.
        used_for: what the training computes from a call at a place; "" for nothing, None where that is not known.
    """

    def __init__(
        self,
        group: Group,
        world: World,
        metrics: PassMetrics,
        require: Callable[[str], None],
        agree: Callable[[], None],
        warn: Callable[[str], None],
        used_for: Callable[[str], str | None],
    ) -> None:
        self._group: Final = group
        self._require: Final = require
        self._agree: Final = agree
        self._warn: Final = warn
        self._used_for: Final = used_for
        self._told: Final[set[str]] = set()  # calls of which the user was told, and broadcasts that were looked at
        self._world: Final = world
        self._metrics: Final = metrics
        self._leader_firsts = 0

    def sum(self, value: T) -> T:
        """The sum over ranks of a number or a tensor, the same bits on each. Collective."""
        return self._reduce(value, f"sum at {_caller()}")

    def mean(self, value: T) -> T:
        """The mean over ranks of a number or a tensor, each rank counting once; the same bits on each. Collective."""
        what = f"mean at {_caller()}"
        self._tell_parts(value, what)
        total = self._reduce(value, what)
        return cast(T, total / self._group.size)  # type: ignore[operator]

    def gather(self, value: T) -> list[T]:
        """The value of each rank, by rank, on all of them; any picklable object. Collective.

        Lists with what each micro-batch of the step has given come `in_order`, also in a dict or a tuple of lists.
        """
        self._before("gather")
        lists = _lists_in(value)
        indices = {key: found for key, each in lists.items() if (found := self._indices(each)) is not None}
        what = f"gather at {_caller()}"
        gathered = self._group.gather_objects((value, indices), what)
        self._tell_parts(value, what)
        values: list[Any] = [value for value, _ in gathered]
        ordered = [key for key in indices if all(key in each for _, each in gathered)]
        for key in ordered:
            parts = [(_lists_in(part)[key], each[key]) for part, each in gathered]
            ends = in_order(parts, self._metrics.bodies(lists[key])[-1][0].of)
            values = [_with(part, key, each) for part, each in zip(values, ends, strict=True)]
        if len(ordered) < max(1, len(lists)) and self._metrics.depends_on_ranks(value):
            self._tell_order(value, what)
        return values

    def _indices(self, value: list[Any]) -> list[int | None] | None:
        """The index of the micro-batch that has given each item of ``value``; None where this is not known."""
        bodies = self._metrics.bodies(value)
        if not bodies:
            return None
        added = self._metrics.added_in(value)
        if added is not None:
            return [at.index if counts else None for at, counts in added]
        return _indices(value, bodies, self._metrics.asked_counts)

    def broadcast(self, value: T) -> T:
        """The leader's value, on all ranks; any picklable object. Collective.

        The first time at each line, ranks that give other numbers or tensors than the leader are told.
        """
        self._before("broadcast")
        what = f"broadcast at {_caller()}"
        if self._group.size > 1 and what not in self._told:
            self._told.add(what)
            used_for = self._used_for(_place(what))
            # A seed or a port is no number that is computed.
            own = _numbers_in(value, whole=bool(used_for))
            self._tell_other_numbers(self._group.gather_objects(own, what), what, used_for)
        return self._group.broadcast_object(value, what)

    def barrier(self) -> None:
        """Wait until every rank has called `barrier`. Collective."""
        self._before("barrier")
        self._group.barrier(f"barrier at {_caller()}")

    @contextlib.contextmanager
    def leader_first(self) -> Iterator[None]:
        """A context that the first rank of each node runs first, and the node's other ranks after it. Collective."""
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

    def _before(self, name: str) -> None:
        self._require(name)
        self._agree()

    def _tell_other_numbers(self, by_rank: Sequence[tuple[int, str] | None], what: str, used_for: str | None) -> None:
        first = by_rank[0]
        other = next((rank for rank, own in enumerate(by_rank) if own is not None and own != first), None)
        if self._group.leads and first is not None and other is not None and used_for != "":
            computed = f", and {used_for} is computed from it" if used_for else ""
            self._warn(
                f"run.{what}: rank 0 gives {first[1]}, and rank {other} another one. A value that rank 0 has from its "
                f"own micro-batches depends on the number of ranks{computed}: bring the parts of all ranks together by "
                "run.sum(...) or run.gather(...). A value that rank 0 alone knows is given as "
                "run.broadcast(value if run.leads else None)"
            )

    def _tell_parts(self, value: object, what: str) -> None:
        """Tell of one number of each rank, if the training is computed from these."""
        is_one = isinstance(value, float) or (isinstance(value, torch.Tensor) and value.numel() == 1)
        if not is_one or what in self._told or self._group.size == 1 or not self._group.leads:
            return
        if (used_for := self._used_for(_place(what))) and _is_fractional(value):
            self._told.add(what)
            self._warn(
                f"run.{what} brings together one number of each rank, and {used_for} is computed from these: which "
                "samples a number is of depends on the number of ranks. Give the samples' values to run.measure(...), "
                "whose means are the same on any number of ranks, and read run.metrics"
            )

    def _tell_order(self, value: object, what: str) -> None:
        """Tell of several numbers of each rank, in an order that depends on their number, likewise."""
        if what in self._told or self._group.size == 1 or not self._group.leads:
            return
        if (used_for := self._used_for(_place(what))) and any(_is_fractional(each) for _, each in leaves(value)):
            self._told.add(what)
            self._warn(
                f"run.{what} gives numbers of this pass by rank, so that their order depends on the number of ranks, "
                f"and with it the last digits of a sum; {used_for} is computed from them. Give the samples' values to "
                "run.measure(...), whose means are the same on any number of ranks, and read run.metrics; or gather in "
                "each step a list to which each body adds, which comes in the order of micro-batches"
            )

    def _reduce(self, value: T, what: str) -> T:
        total = self._sum(value, what)
        # Once told, not looked at again: to look at a sum on a GPU is to wait for it.
        if self._group.size > 1 and self._group.leads and what not in self._told and _is_fractional(total):
            self._told.add(what)
            self._warn(
                f"run.{what} adds up numbers that are not whole, of which each rank has rounded its own part: the last "
                "digits depend on the number of ranks. Where the training depends on them, give the samples' values to "
                "run.measure(...), whose sums are exact, and read run.metrics"
            )
        return total

    def _sum(self, value: T, what: str) -> T:
        self._before(what.partition(" ")[0])
        if isinstance(value, torch.Tensor):
            shapes = self._group.gather_objects((tuple(value.shape), str(value.dtype)), what)
            if len(set(shapes)) > 1:
                raise UsageError(f"{what}: ranks give tensors of different shape or type: {shapes}")
            is_whole = not (value.is_floating_point() or value.is_complex())
            total = self._group.sum_tensor(value.long() if is_whole else value, what)
            # Ranks add up on their device; what the script counts on the CPU it reads there.
            return cast(T, total.to(value.device))
        # Small integer types of NumPy's would wrap around.
        if isinstance(value, np.generic):
            value = value.item()
        elif isinstance(value, np.ndarray) and value.dtype.kind in "biu" and value.itemsize < 8:
            value = cast(T, value.astype(np.int64))
        return cast(T, sum(self._group.gather_objects(value, what)))


def _lists_in(value: object) -> dict[object, list[Any]]:
    """The lists in a dict or a tuple, by their keys or places, or ``value`` itself under None, if a list."""
    if type(value) is list:
        return {None: value}
    items = value.items() if type(value) is dict else enumerate(value) if type(value) is tuple else ()
    return {key: each for key, each in items if type(each) is list}


def _with(value: Any, key: Any, each: list[Any]) -> object:
    """``value`` with another list at a ``key`` of `_lists_in`."""
    if type(value) is dict:
        return {**value, key: each}
    return (*value[:key], each, *value[key + 1 :]) if type(value) is tuple else each


def _numbers_in(value: object, *, whole: bool) -> tuple[int, str] | None:
    """A checksum of the numbers and tensors in ``value``, and the first in words; None for no such.

    Numbers of Python's that are ``whole`` count if asked for.
    """
    given = [each for _, each in leaves(value) if _is_comparable(each) or (whole and type(each) is int)]
    if not given:
        return None
    sums = checksums([e if isinstance(e, torch.Tensor) else torch.as_tensor(e, device="cpu") for e in given])
    return zlib.crc32(repr(sums).encode()), f"{given[0]:.6g}" if isinstance(
        given[0], int | float
    ) else "an array of numbers"


def _is_comparable(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.layout == torch.strided and not hasattr(value, "to_local")
    return isinstance(value, float) or (isinstance(value, np.ndarray) and value.dtype.kind in "biufc")


def _is_fractional(total: object) -> bool:
    """Whether some numbers in ``total`` are no whole numbers."""
    if isinstance(total, torch.Tensor):
        total = torch.view_as_real(total) if total.is_complex() else total
        return total.is_floating_point() and bool((total.frac() != 0).any())
    if isinstance(total, np.ndarray):
        return total.dtype.kind in "fc" and bool(np.any(total != np.round(total)))
    return isinstance(total, float) and not total.is_integer()


def in_order(lists: Sequence[tuple[list[Any], list[int | None]]], of: int) -> list[list[object]]:
    """The lists of all ranks, re-divided as if each rank had computed neighbouring micro-batches.

    Args:
        lists: of each rank, with the index of the micro-batch of each item; None: the micro-batch does not count.
        of: how many micro-batches the step has.
    """
    parts = [
        [(index, item) for item, index in zip(items, indices, strict=True) if index is not None]
        for items, indices in lists
    ]
    flat = [pair for part in parts for pair in part]
    if any(later[0] < earlier[0] for earlier, later in pairwise(flat)):
        flat.sort(key=lambda pair: pair[0])
        ends = [of * (rank + 1) // len(lists) for rank in range(len(lists))]
        parts = [
            [pair for pair in flat if first <= pair[0] < end] for first, end in zip([0, *ends], ends, strict=False)
        ]
    return [[item for _, item in part] for part in parts]


def _indices(
    value: list[Any], bodies: Sequence[tuple[MicroBatchPosition, bool]], asked_counts: bool
) -> list[int | None] | None:
    """The index of the micro-batch of each item of ``value``; None for a micro-batch that counts for nothing.

    The result is None if ``value`` is no list with one or more tensors for the samples of each of the step's
    ``bodies``: of the bodies that count, if the script has read `Run.counts`, else of all.
    """
    counted = [body for body in bodies if body[1]]
    # Items that replays append to the script's lists are removed again, where these lists are found.
    played = [body for body in bodies if not body[0].is_replay]
    for chosen in (counted, played, bodies) if asked_counts else (played, bodies):
        if not value and not chosen:
            return []
        each, rest = divmod(len(value), len(chosen) or 1)
        placed = [body for body in chosen for _ in range(each)]
        if len(placed) != len(value) or rest or not each:
            continue
        lengths = zip(map(_length, value), placed, strict=True)
        if all(length == at.samples if counts else length is not None for length, (at, counts) in lengths):
            return [at.index if counts else None for at, counts in placed]
    return None


def _length(item: object) -> int | None:
    """The size of the first dimension of a tensor or array, or of the first tensor in a tuple, list or dict."""
    while isinstance(item, Mapping | tuple | list) and item:
        item = next(iter(item.values() if isinstance(item, Mapping) else item))
    return len(item) if isinstance(item, torch.Tensor | np.ndarray) and item.ndim else None


def _place(what: str) -> str:
    return what.rpartition(" ")[2]


def _caller() -> str:
    """The user's file and line of the call."""
    return find_user_frame(sys._getframe())[0].short
