"""All-reduce along the tree over ranks that share one machine's memory: no tensor passes through a socket.

    begin      each rank copies the sums of its nodes into the area   area  | node 0 | node 1 | node 2 | ... |
    ---------- all have copied them                                            ||       ||       ||
    finish     each rank folds all nodes of a small sum itself       each rank  a   +    b    +   c
               of a large one its chunk, in place                      rank 0  a0  +    b0   +   c0
                                                                       rank 1  a1  +    b1   +   c1
    ---------- all have folded (where there is a large one): the sum lies where node 0 was
               each rank copies it out
    ---------- all have read: the area may be used again; this is only waited for when it is

Each dashed line is a barrier. A barrier costs an early rank a sleep and, with more busy processes than cores, the time
until the rank gets a core again: so a small sum is folded by every rank, which takes only one barrier.

A rank that dies closes its sockets, so the others know at once which one it is. The memory has no name in any file
system and is gone with the last process.

Ranks also exchange, or gather, parts of flat tensors there:

    exchange    each rank has its values in its slot    | rank 0: a0 a1 | rank 1: b0 b1 |
    ---------   all have them there
                each rank works on its part of each     rank 0: a0 b0       rank 1: a1 b1

    gather      each rank has its part in its place     | rank 0 | rank 1 |
    ---------   all have: the whole is there, for every rank to copy out of

Then a dashed line is the only barrier: areas take turns, and one is written again when all ranks have shown, by
coming to a later barrier, that they are done with it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import socket
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist

from lockstep.collectives.group import Group
from lockstep.collectives.reduction_plan import ReductionPlan, ReductionPlans, Runs
from lockstep.collectives.reduction_tree import fold
from lockstep.collectives.wait_clock import wait_clock
from lockstep.errors import MismatchError, PeerLost

_TOKEN = b"."
_PAGE = mmap.PAGESIZE
_ALIGN = 64  # bytes: sums begin on cache lines of their own
#: Bytes of all nodes up to which each rank folds a sum itself, which is quicker than a barrier. A sum of two nodes
#: always is, since that reads no more memory than folding a half and copying the whole.
_FOLDED_BY_ALL = 1 << 20
_WORDS: Final = 4  # that each rank says of a gather
_WORD: Final = 8  # bytes
_MOST_REUSED: Final = 62  # areas whose end a word has a bit for; more are not written again


@dataclass(frozen=True, slots=True)
class _BegunSum:
    """A begun sum, whose nodes are being copied into shared memory."""

    out: torch.Tensor
    plan: ReductionPlan
    area: torch.Tensor  #: of shape (nodes, elements), the same memory on all ranks

    @property
    def is_folded_by_all(self) -> bool:
        """Whether each rank folds the whole sum, not only a chunk."""
        return len(self.area) <= 2 or self.area.numel() * self.area.element_size() <= _FOLDED_BY_ALL

    def fold(self) -> None:
        """Fold the sum into ``out``; the shared memory does not change, since other ranks read it, too."""
        nodes = self.area.unbind()
        if len(nodes) == 2:
            torch.add(*nodes, out=self.out)
        else:
            self.out.copy_(fold(self.plan.micro_batches, self.plan.all_nodes, nodes, torch.add))

    def fold_chunk(self) -> None:
        """Fold this rank's chunk of the sum, in place of the first node's chunk."""
        first, end = self.plan.cuts(self.out.numel())[self.plan.rank]
        if first < end:
            chunks = [node[first:end] for node in self.area.unbind()]
            fold(self.plan.micro_batches, self.plan.all_nodes, chunks, lambda left, right: left.add_(right))


class SharedMemoryAllReduce:
    """An `AllReduce` for the CPUs of one machine. All additions are in `finish`, since no link must be kept busy."""

    def __init__(self, group: Group, runs: Runs) -> None:
        self._rank: Final = group.rank
        self._plans: Final = ReductionPlans(group.rank, group.size, runs)
        self._arena: Final = SharedMemoryArena(group, "the reduction")
        self._areas: list[mmap.mmap] = []  # filled in turn by the sums of a step
        self._free = (0, 0)  # the first byte that this step has not used: number of the area, and offset in it
        self._begun: list[_BegunSum] = []
        self._area_is_free = True

    def begin(self, out: torch.Tensor, partials: Sequence[torch.Tensor], micro_batches: int) -> None:
        """Copy the sums of this rank's nodes into shared memory."""
        if not self._area_is_free:
            self._arena.wait()
            self._area_is_free = True
        plan = self._plans(micro_batches)
        area = self._area(len(plan.all_nodes), out)
        for place, partial in zip(plan.places[self._rank], partials, strict=True):
            area[place].copy_(partial)
        self._begun.append(_BegunSum(out, plan, area))

    def finish(self) -> None:
        """Wait until all ranks have copied their sums in, fold all sums, and copy the results out."""
        if not self._begun:
            return
        begun, self._begun, self._free = self._begun, [], (0, 0)
        self._arena.arrive()
        self._arena.wait()
        in_chunks = [each for each in begun if not each.is_folded_by_all]
        if in_chunks:
            for each in in_chunks:
                each.fold_chunk()
            self._arena.arrive()
            self._arena.wait()
        for each in begun:
            if each.is_folded_by_all:
                each.fold()
            else:
                each.out.copy_(each.area[0])
        self._arena.arrive()
        self._area_is_free = False

    def close(self) -> None:
        """Close the connections to the other ranks."""
        self._arena.close()

    def _area(self, nodes: int, out: torch.Tensor) -> torch.Tensor:
        """Room for the step's next sum, of shape (nodes, elements), in the same memory on all ranks.

        The sums of a step share areas, whatever their sizes: DDP cuts its buckets again after the first step, so that
        one sum of all gradients becomes many.
        """
        size = nodes * out.numel() * out.element_size()
        number, offset = self._free
        while number < len(self._areas) and offset + size > len(self._areas[number]):
            number, offset = number + 1, 0
        if number == len(self._areas):
            self._areas.append(self._arena.allocate(size))
        self._free = number, offset + -(-size // _ALIGN) * _ALIGN
        whole = torch.frombuffer(self._areas[number], dtype=out.dtype, count=nodes * out.numel(), offset=offset)
        return whole.view(nodes, out.numel())


class SharedMemoryArena:
    """Memory that the ranks of a machine share, and a barrier between these ranks. The constructor is collective.

    Args:
        group: with all ranks on this machine.
        what: name of the operation, for errors.
    """

    def __init__(self, group: Group, what: str) -> None:
        self._rank: Final = group.rank
        self._what: Final = what
        self._peers: Final = _connect(group)

    def allocate(self, size: int) -> mmap.mmap:
        """Allocate at least ``size`` bytes on rank 0, and map them on every rank. Collective.

        Raises:
            PeerLost: naming a rank that is gone.
        """
        size = -(-size // _PAGE) * _PAGE
        if self._rank == 0:
            memory = os.memfd_create("lockstep-sums", os.MFD_CLOEXEC)
            os.ftruncate(memory, size)
            for rank, peer in self._peers.items():
                try:
                    socket.send_fds(peer, [_TOKEN], [memory])
                except OSError as error:
                    raise PeerLost(f"rank {rank} left during {self._what} ({error})") from error
        else:
            try:
                received, descriptors, _, _ = socket.recv_fds(self._peers[0], 1, 1)
            except OSError as error:
                raise PeerLost(f"no message from rank 0 during {self._what} ({error})") from error
            if not received:
                raise PeerLost(f"rank 0 left during {self._what}")
            (memory,) = descriptors
        area = mmap.mmap(memory, size)
        os.close(memory)
        return area

    def arrive(self) -> None:
        """Notify every other rank that this rank has arrived; does not wait.

        A rank that is gone is noticed by the next `wait`, unless it had arrived before: then neither it nor the others
        lack data.
        """
        for peer in self._peers.values():
            with contextlib.suppress(ConnectionError):
                peer.sendall(_TOKEN)

    def wait(self) -> None:
        """Block until all other ranks have arrived.

        Raises:
            PeerLost: naming the rank that is gone or does not arrive in time.
        """
        with wait_clock():
            for rank, peer in self._peers.items():
                try:
                    received = peer.recv(1)
                except TimeoutError as error:
                    raise PeerLost(f"no message from rank {rank} during {self._what} ({error})") from error
                except ConnectionError:
                    received = b""  # closed before it had read our byte
                if not received:
                    raise PeerLost(f"rank {rank} left during {self._what}")

    def close(self) -> None:
        """Close the connections to the other ranks."""
        for peer in self._peers.values():
            peer.close()


def _connect(group: Group) -> dict[int, socket.socket]:
    """A socket to each other rank, by rank. Collective."""
    name = group.broadcast_object(secrets.token_hex(16), "name of the shared memory")
    peers: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(_address(name, group.rank))
        door.listen(group.size)
        door.settimeout(group.timeout_s)
        group.barrier("doors to the shared memory")
        for rank in range(group.rank):
            peers[rank] = socket.socket(socket.AF_UNIX)
            peers[rank].connect(_address(name, rank))
            peers[rank].sendall(group.rank.to_bytes(4, "little"))
        for _ in range(group.rank + 1, group.size):
            peer, _ = door.accept()
            peers[int.from_bytes(peer.recv(4, socket.MSG_WAITALL), "little")] = peer
    for peer in peers.values():
        peer.settimeout(group.timeout_s)
    return dict(sorted(peers.items()))


def _address(name: str, rank: int) -> str:
    return f"\0lockstep-{name}-{rank}"  # with no file behind it


class SharedMemoryExchange:
    """A `PartExchange` without a copy: what a rank writes into its slot, the others read there."""

    def __init__(self, group: Group) -> None:
        self._rank, self._size = group.rank, group.size
        self._arena: Final = SharedMemoryArena(group, "the reduction of gradients")
        self._areas: Final[list[mmap.mmap | None]] = [None, None]
        self._number = 0  # of the next exchange

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """This rank's slot of the area that is next, for one value a rank. Collective, where the area grows."""
        return self._slots(1, numel, dtype)[self._rank, 0]

    def __call__(
        self, values: Sequence[torch.Tensor], counts: Sequence[int], like: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        """Copy in what is not there yet, wait for the others, and look at this rank's part of everything."""
        part = like.numel() // self._size
        slots = self._slots(max(counts), like.numel(), like.dtype)
        for slot, value in zip(slots[self._rank], values, strict=False):
            if slot.data_ptr() != value.data_ptr():
                slot.copy_(value)
        self._number += 1
        self._arena.arrive()
        self._arena.wait()
        mine = slice(self._rank * part, (self._rank + 1) * part)
        return [slots[rank, place, mine] for rank, count in enumerate(counts) for place in range(count)]

    def close(self) -> None:
        """Close the connections."""
        self._arena.close()

    def _slots(self, values: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The area that is next, of shape (ranks, values, elements)."""
        turn, count = self._number % 2, self._size * values * numel
        area = self._areas[turn]
        if area is None or len(area) < count * dtype.itemsize:
            area = self._areas[turn] = self._arena.allocate(count * dtype.itemsize)
        return torch.frombuffer(area, dtype=dtype, count=count).view(self._size, values, numel)


@dataclass(slots=True)
class _Area:
    """Memory for one whole tensor."""

    memory: mmap.mmap
    tensor: weakref.ref[torch.Tensor] | None = None  #: what was handed out; dead, once this rank is done with it
    is_free: bool = True  #: whether every rank was done with it before the newest gather


class SharedMemoryGather:
    """Gathers parts of one length from all ranks, in the protocol of torch's ``FSDPModule.set_custom_all_gather``.

    Ranks gather the same tensors in the same order, which is compared in each gather. When a rank lets go of a tensor
    is up to Python and autograd, and not the same on all ranks. So each says in a gather which areas it is done with,
    and the next gathers write those again with which all are.
    """

    def __init__(self, group: Group) -> None:
        self._rank, self._size = group.rank, group.size
        self._arena: Final = SharedMemoryArena(group, "the gathering of parameters")
        # What ranks say of a gather; two rows a rank, since the next gather may begin before all have read this one's.
        self._said: Final = memoryview(self._arena.allocate(2 * self._size * _WORDS * _WORD)).cast("q")
        self._areas: Final[list[_Area]] = []
        self._number = 0  # of the next gather
        self._next = 0  # the area that it takes

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate a whole tensor, into which this rank copies its part. Collective, where there is no free area."""
        count = int(size[0])
        needed = count * dtype.itemsize
        free = [i for i, area in enumerate(self._areas) if area.is_free]
        if not free:
            self._areas.append(_Area(self._arena.allocate(needed)))
        self._next = free[0] if free else len(self._areas) - 1
        area = self._areas[self._next]
        if len(area.memory) < needed:
            area.memory = self._arena.allocate(needed)
        whole = torch.frombuffer(area.memory, dtype=dtype, count=count)
        area.tensor, area.is_free = weakref.ref(whole), False
        return whole

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Wait until each rank's part is in ``output_tensor``. Collective.

        Raises:
            MismatchError: if ranks gather other tensors.
        """
        reused = enumerate(self._areas[:_MOST_REUSED])
        free = sum(1 << i for i, area in reused if _is_dead(area) and i != self._next)
        row = self._number % 2 * self._size
        words = (self._number, self._next, output_tensor.numel(), free)
        for place, word in enumerate(words, (row + self._rank) * _WORDS):
            self._said[place] = word
        self._number += 1
        self._arena.arrive()
        self._arena.wait()
        for rank in range(self._size):
            said = tuple(self._said[(row + rank) * _WORDS : (row + rank + 1) * _WORDS])
            if said[:-1] != words[:-1]:
                raise MismatchError(
                    f"rank {rank} gathers {said[2]} numbers in gather {said[0]}, and rank {self._rank} {words[2]} in "
                    f"gather {words[0]}: forward() must call the same blocks in the same order on all ranks; where "
                    "that depends on the data, say run.model(model, find_unused_parameters=True), which gathers the "
                    "whole model at once"
                )
            free &= said[-1]
        for i, area in enumerate(self._areas):
            area.is_free = bool(free >> i & 1)

    def close(self) -> None:
        """Close the connections."""
        self._arena.close()


def _is_dead(area: _Area) -> bool:
    return area.tensor is None or area.tensor() is None
