"""Who writes which bytes, and which bytes to read: plans as values, without touching a file.

Every rank holds the whole state. Each writes a share of it, about equal in bytes:

    tensors          a 40    b 30    c 20    d 6   e 4
    2 ranks          part-00000.bin:  a 40, d 6, e 4       part-00001.bin:  b 30, c 20

In a file the tensors with the widest elements come first. So each begins at a multiple of its element's size without
padding between them: every byte of a file belongs to a tensor, and a sum covers it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.checkpoint.manifest import Manifest, Piece


@dataclass(frozen=True, slots=True)
class Extent:
    """A tensor as the plan sees it."""

    length: int  #: in bytes
    element: int  #: bytes of one element


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor's place in a part."""

    tensor: int  #: its number in the tree
    offset: int  #: in bytes
    length: int  #: in bytes


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank writes: one file, or none if its share is empty."""

    file: str
    tensors: tuple[Placed, ...]
    length: int  #: in bytes


def layout(tensors: Sequence[Extent], ranks: int) -> tuple[Part, ...]:
    """One part for each rank; each tensor is in exactly one.

    The largest tensor goes first, each to the rank that has least so far: no rank has more than an equal share plus one
    tensor. A pure function of its arguments, so that all ranks make the same plan without talking.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for number in sorted(range(len(tensors)), key=lambda n: (-tensors[n].length, n)):
        load, rank = heapq.heappop(loads)
        shares[rank].append(number)
        heapq.heappush(loads, (load + tensors[number].length, rank))
    return tuple(_part(rank, share, tensors) for rank, share in enumerate(shares))


def _part(rank: int, share: list[int], tensors: Sequence[Extent]) -> Part:
    placed, offset = [], 0
    for number in sorted(share, key=lambda n: (-tensors[n].element, n)):
        placed.append(Placed(number, offset, tensors[number].length))
        offset += tensors[number].length
    return Part(f"part-{rank:05d}.bin", tuple(placed), offset)


@dataclass(frozen=True, slots=True)
class Read:
    """One piece to read for one tensor."""

    tensor: int  #: its number in the manifest
    piece: Piece


def reads(manifest: Manifest) -> tuple[Read, ...]:
    """All pieces of all tensors, file by file in the order of their bytes."""
    every = (Read(n, piece) for n, tensor in enumerate(manifest.tensors) for piece in tensor.pieces)
    return tuple(sorted(every, key=lambda read: (read.piece.file, read.piece.offset, read.piece.length)))
