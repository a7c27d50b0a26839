"""Plans of the bytes that each rank writes or reads, as values, without touching a file.

A tensor that every rank holds whole is written by one rank; the shares of ranks have about equal bytes. Of a tensor
that is divided among ranks, each rank writes its box:

    tensors          a 40    b 30    c 20    d 6    and e 8, whose rows 0..2 rank 0 holds, and rank 1 row 3
    2 ranks          part-00000:  a 40, d 6, e[0:3] 6      part-00001:  b 30, c 20, e[3:4] 2

In a file the tensors with the widest elements come first. So each tensor begins at a multiple of its element's size
without padding: every byte of a file belongs to its head or to a tensor, and is covered by a checksum.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from lockstep.checkpoint.manifest import Block, Manifest, Piece

#: Pairs of boxes that are compared, about 1 us each.
_MOST_COMPARED = 1_000_000
#: Largest number of boxes times dimensions for which an element not held exactly once is searched.
_MOST_TO_NAME = 4_000


@dataclass(frozen=True, slots=True)
class Extent:
    """The size of a tensor in a plan."""

    length: int  #: in bytes
    element: int  #: bytes of one element


@dataclass(frozen=True, slots=True)
class Box:
    """Neighbouring elements of a tensor, one range in each of its dimensions."""

    start: tuple[int, ...]  #: first element in the tensor
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        """The index after the box's last element, in each dimension."""
        return tuple(first + size for first, size in zip(self.start, self.shape, strict=True))


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor's place in a file."""

    tensor: int  #: its number in the tree
    offset: int  #: in bytes, behind the file's head
    length: int  #: in bytes


@dataclass(frozen=True, slots=True)
class File:
    """The file of a rank; without tensors, no file is made."""

    name: str
    tensors: tuple[Placed, ...]
    length: int  #: in bytes, without its head


def common_box(one: Box, other: Box) -> Box | None:
    """The intersection of two boxes of a tensor; None if it is empty."""
    start = tuple(map(max, one.start, other.start))
    end = tuple(map(min, one.end, other.end))
    if any(first >= last for first, last in zip(start, end, strict=True)):
        return None
    return Box(start, tuple(last - first for first, last in zip(start, end, strict=True)))


def runs_within(stored: Box, wanted: Box, element: int) -> Iterator[tuple[int, int, int]]:
    """The ranges of bytes that two boxes of a tensor have in common, in the order of both.

    Each box's elements lie row by row, without gaps.

    Args:
        stored: the box that is stored.
        wanted: the box to be filled.
        element: bytes of one element.

    Yields:
        First byte and the byte after the last in ``stored``, and the first byte in ``wanted``.
    """
    common = common_box(stored, wanted)
    if common is None or not common.elements:
        return
    split = len(common.shape)  # both boxes cover all later dimensions
    while split and common.shape[split - 1] == stored.shape[split - 1] == wanted.shape[split - 1]:
        split -= 1
    split = max(0, split - 1)
    length = math.prod(common.shape[split:]) * element
    outer = (range(first, end) for first, end in zip(common.start[:split], common.end[:split], strict=True))
    for index in itertools.product(*outer):
        at = (*index, *common.start[split:])
        first = _offset(at, stored) * element
        yield first, first + length, _offset(at, wanted) * element


def _offset(at: Sequence[int], box: Box) -> int:
    """The number of elements of ``box`` before ``at``."""
    offset = 0
    for place, first, size in zip(at, box.start, box.shape, strict=True):
        offset = offset * size + place - first
    return offset


def lay_out(rank: int, tensors: Iterable[tuple[int, Extent]]) -> File:
    """The layout of the file of ``rank``: the place of each of its numbered tensors or boxes."""
    placed, offset = [], 0
    for number, extent in sorted(tensors, key=lambda t: (-t[1].element, t[0])):
        placed.append(Placed(number, offset, extent.length))
        offset += extent.length
    return File(f"part-{rank:05d}.safetensors", tuple(placed), offset)


def coverage_error(boxes: Sequence[tuple[str, Box]], shape: tuple[int, ...]) -> str:
    """The fault of ``boxes``, each with its holder's name, that do not cover a tensor of ``shape`` exactly once.

    Empty if the boxes cover the tensor. Otherwise names an element and its holders, but not for very many boxes, which
    could take very long. Boxes without elements cover nothing. Without a fault, costs about n log n for n boxes that
    divide one dimension.
    """
    for who, box in boxes:
        inside = len(box.start) == len(shape) == len(box.shape) and all(
            0 <= first <= end <= size for first, end, size in zip(box.start, box.end, shape, strict=True)
        )
        if not inside:
            return f"{who} holds {box.shape} at {box.start}, which is not within {shape}"
    full = [(who, box) for who, box in boxes if box.elements]
    try:
        if sum(box.elements for _, box in full) == math.prod(shape) and _disjoint([box for _, box in full]):
            return ""
        if len(full) * len(shape) > _MOST_TO_NAME:
            return f"its {len(full)} boxes do not cover it exactly once"
    except TimeoutError as error:
        return str(error)
    fault = _first_fault(full, shape, 0)
    assert fault is not None
    at, holders = fault
    return f"element {at} is held by {' and by '.join(holders) or 'no rank'}"


def _disjoint(boxes: Sequence[Box]) -> bool:
    """Whether no two boxes, none of them empty, share an element.

    Raises:
        TimeoutError: if the comparison would take long.
    """
    dims = len(boxes[0].shape) if boxes else 0
    if not dims:
        return len(boxes) <= 1
    # Along the dimension in which boxes begin at the most places, few boxes overlap.
    along = max(range(dims), key=lambda d: len({box.start[d] for box in boxes}))
    still_open: list[Box] = []
    compared = 0
    for box in sorted(boxes, key=lambda b: b.start[along]):
        still_open = [other for other in still_open if other.end[along] > box.start[along]]
        compared += len(still_open)
        if compared > _MOST_COMPARED:
            raise TimeoutError(f"its {len(boxes)} boxes lie beside each other as no strategy divides a tensor")
        if any(_meet(box, other) for other in still_open):
            return False
        still_open.append(box)
    return True


def _meet(one: Box, other: Box) -> bool:
    ends = zip(one.start, one.end, other.start, other.end, strict=True)
    return all(first < other_end and other_first < end for first, end, other_first, other_end in ends)


def _first_fault(
    boxes: Sequence[tuple[str, Box]], shape: tuple[int, ...], dim: int
) -> tuple[tuple[int, ...], list[str]] | None:
    """The first element that not exactly one of ``boxes`` holds, from dimension ``dim`` on, and its holders."""
    if dim == len(shape):
        return None if len(boxes) == 1 else ((), [who for who, _ in boxes])
    cuts = {0, shape[dim], *(box.start[dim] for _, box in boxes), *(box.end[dim] for _, box in boxes)}
    for first, end in itertools.pairwise(sorted(cuts)):
        inside = [(who, box) for who, box in boxes if box.start[dim] <= first and end <= box.end[dim]]
        fault = _first_fault(inside, shape, dim + 1)
        if fault is not None:
            return (first, *fault[0]), fault[1]
    return None


def share_of_blocks(manifest: Manifest, rank: int, ranks: int) -> Iterator[tuple[Piece, Block]]:
    """The blocks of a checkpoint that ``rank`` verifies, file by file in the order of their bytes.

    Each block is in the share of one of the ``ranks``, and shares are neighbouring blocks of about equally many bytes.
    """
    pieces = sorted((p for t in manifest.tensors for p in t.pieces), key=lambda p: (p.file, p.offset, p.length))
    total, before = sum(piece.length for piece in pieces), 0
    for piece in pieces:
        for block in piece.blocks:
            if before * ranks // max(1, total) == rank:
                yield piece, block
            before += block.end - block.first
