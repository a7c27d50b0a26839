"""The assignment of shards of unknown length to the places of a step: pure functions.

    shards, in the epoch's order    2 0 3 1 5 4 7 6        dealt to the places of a step, here two
    micro-batch 0                   2 3 5 7                reads these from beginning to end
    micro-batch 1                   0 1 4 6
                      after 9 steps: 6 was short, and what is left, 5 from its 30th sample on and 7, is dealt again;
                                     where too few shards are left, all places share them: the rest

A deal ends with the last step that every place can fill. So the order of samples depends on the shards and on the sizes
of a step, not on the number of ranks. The shards of each rank are known beforehand, and ranks agree ahead on the end of
a deal. The place of every shard is calculated from the lengths of the shards that were read to their end: a resume gets
these lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lockstep.errors import DataError

ShardsFound = dict[str, Any]
"""The findings about shards in a pass, as plain values: empty, or ``lengths`` by the number of a shard, as text, and
``ends``, the steps at which deals ended. A resume from any step that was handed out gets these findings back."""


class Piece(NamedTuple):
    """A shard from a sample on; the samples before were read in an earlier deal."""

    shard: int
    start: int = 0


class Deal(NamedTuple):
    """The shards that are read from ``first_step`` on."""

    first_step: int
    hands: tuple[tuple[Piece, ...], ...]  #: the pieces that each place of a step reads, one after another
    is_rest: bool = False  #: a single hand, which all places share, up to the end of the epoch


class HandPosition(NamedTuple):
    """The position of a place of a step in its hand."""

    left: list[Piece]  #: the first piece is being read
    read: int  #: samples read of the first piece


def first_deal(shards: Sequence[int], places: int) -> Deal:
    """The deal of all ``shards``, in the order of an epoch."""
    return _dealt(0, [Piece(shard) for shard in shards], places)


def next_deal(deal: Deal, end: int, micro_batch: int, found: ShardsFound) -> Deal:
    """The deal of the pieces that are left when ``deal`` ends before step ``end``."""
    samples = (end - deal.first_step) * micro_batch
    left = []
    for hand in deal.hands:
        pieces, read = position_in(hand, samples, found["lengths"])
        left += [Piece(piece.shard, piece.start + (read if piece is pieces[0] else 0)) for piece in pieces]
    # Each deal begins a shard for each place, so the number of deals is finite.
    return _dealt(end, left, len(deal.hands) if samples else len(left) + 1)


def position_in(hand: Sequence[Piece], samples: int, lengths: Mapping[str, int]) -> HandPosition:
    """The position after ``samples`` samples of ``hand``; ``lengths`` has all shards whose end was passed."""
    left = list(hand)
    while left:
        length = lengths.get(str(left[0].shard))
        if length is None or left[0].start + samples < length:
            break
        samples -= max(0, length - left[0].start)
        left.pop(0)
    return HandPosition(left, samples if left else 0)


def begin_pass(found: ShardsFound) -> bool:
    """Prepare ``found`` to be filled; returns whether it has findings already, and was not empty."""
    known = "lengths" in found
    found.setdefault("lengths", {})
    found.setdefault("ends", [])
    return known


def note_length(found: ShardsFound, shard: int, length: int, name: str) -> None:
    """Note the ``length`` of ``shard``, whose end was seen.

    Raises:
        DataError: if the shard had another length before.
    """
    before = found["lengths"].setdefault(str(shard), length)
    if before != length:
        raise DataError(
            f"shard {shard} of {name} holds {length} samples, and held {before} when it was read before: a shard must "
            "give the same samples each time in an epoch; what is left out or shuffled at random needs a seed"
        )


def _dealt(first_step: int, pieces: Sequence[Piece], places: int) -> Deal:
    """The deal of ``pieces`` to ``places``, or to all places as the rest if whole shards are too few."""
    whole = [piece for piece in pieces if not piece.start]
    begun = [piece for piece in pieces if piece.start]
    if len(whole) < places:
        return Deal(first_step, (tuple(pieces),), is_rest=True)
    return Deal(first_step, tuple((*whole[place::places], *begun[place::places]) for place in range(places)))
