"""The agreement of ranks that read a stream on the samples of each step, for many steps ahead at a time.

    blocks of steps        | 0 | 1 2 | 3 4 5 6 | 7 8 9 10 11 12 13 14 | ...   up to 32 steps, or 16 MiB on a rank
    the ranks compare      ^   ^     ^         ^                              what they found for the block that begins
    and read meanwhile      1 2  3..6   7..14                                 the next block, some steps for each

One gather of pickled numbers costs about 3 ms on two ranks, more than many steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

import numpy as np
import torch

from lockstep.batch import BatchPlan
from lockstep.data.indexed.sampling import Data
from lockstep.data.iterable.iterable_dataset import StreamStep, sizes_of
from lockstep.errors import DataError

#: Collective: each rank gives its numbers, and gets those of every rank, in the order of ranks.
Agree = Callable[[list[int]], list[list[int]]]

#: Of each rank: the mark of its step, and the numbers of samples of its micro-batches in the step.
RanksFound = list[tuple[int, list[int]]]

_SMALL_OBJECT: Final = 64  # bytes
_MOST_STEPS: Final = 32
_MOST_BYTES: Final = 16 * 2**20  # of a block on one rank; samples read by loader processes lie in /dev/shm


def agreed_steps(
    found: Iterator[StreamStep],
    agree: Agree,
    first_step: int,
    full: int,
    samples_of: Callable[[int, RanksFound], int],
    note_length: Callable[[int, int], None],
) -> Iterator[tuple[StreamStep, int]]:
    """Each step that this rank ``found``, with its samples over all ranks, up to the first step that is not full.

    All ranks must read the whole iterator. A block is read while the block before is computed, so no rank waits for a
    whole block at once. Collective, once for each block.

    Args:
        found: the steps that this rank finds from ``first_step`` on, without end: steps without samples after the last.
        agree: tells the other ranks.
        first_step: of the pass, within the epoch.
        full: samples of a full step.
        samples_of: gives the samples of a step over all ranks, from its number and the findings of each rank; raises an
            error for wrong findings.
        note_length: is called on every rank for each shard whose end some rank has seen, with the shard's number and
            its number of samples.
    """
    step, block = first_step, [next(found)]
    while True:
        everyone = [_Told.of(numbers, len(block)) for numbers in agree(_numbers_of(block))]
        for told in everyone:
            for shard, length in told.lengths:
                note_length(shard, length)
        size = min(told.next_size for told in everyone)
        following: list[StreamStep] = []
        for done, own in enumerate(block, 1):
            samples = samples_of(step, [told.steps[done - 1] for told in everyone])
            yield own, samples
            if samples < full:
                return
            step += 1
            while len(following) * len(block) < size * done:
                following.append(next(found))
        block = following


class _Told(NamedTuple):
    """The findings of a rank for a block."""

    next_size: int
    lengths: list[tuple[int, int]]
    steps: RanksFound  # of this rank, one for each step

    @classmethod
    def of(cls, numbers: list[int], steps: int) -> _Told:
        next_size, shards, *rest = numbers
        lengths = list(zip(rest[: 2 * shards : 2], rest[1 : 2 * shards : 2], strict=True))
        rest = rest[2 * shards :]
        each = len(rest) // steps
        return cls(next_size, lengths, [(rest[at], rest[at + 1 : at + each]) for at in range(0, len(rest), each)])


def _numbers_of(block: list[StreamStep]) -> list[int]:
    lengths = [number for step in block for length in step.lengths for number in length]
    steps = [number for step in block for number in (step.mark, *step.counts)]
    return [_next_size(block), len(lengths) // 2, *lengths, *steps]


def _next_size(block: list[StreamStep]) -> int:
    """The number of steps of the next block that this rank could hold."""
    of_step = max(sum(map(bytes_of, each.batches)) for each in block)
    return max(1, min(2 * len(block), _MOST_STEPS, _MOST_BYTES // max(1, of_step)))


def samples_of_dealt_step(plan: BatchPlan, step: int, ranks: RanksFound) -> int:
    """The samples of a full step; 0 if a micro-batch is missing, which means that the deal ended before the step."""
    return plan.global_batch if all(count == plan.micro_batch for _, counts in ranks for count in counts) else 0


def samples_of_stream_step(plan: BatchPlan, name: str, epoch: int, step: int, ranks: RanksFound) -> int:
    """The samples of a step over all ranks, after a check that ranks read the same stream.

    Raises:
        DataError: if ranks read different streams, or the stream is empty.
    """
    found = {
        index: count
        for rank, (_, of_rank) in enumerate(ranks)
        for index, count in zip(plan.run(rank), of_rank, strict=True)
    }
    counts = [found[index] for index in range(len(found))]
    samples, where = sum(counts), f"in step {step} of epoch {epoch}"
    if counts != sizes_of(plan, samples):
        raise DataError(
            f"the ranks read different streams: {where} their micro-batches hold {counts} samples; {name} must "
            "give every rank the whole stream in the same order (no division by rank in the data set), or have a "
            "method stride(start, step)"
        )
    if len({mark for mark, _ in ranks}) > 1:
        raise DataError(
            f"the ranks read different streams: {where} {name} gives them different samples; if it shuffles by "
            "itself, give it a seed, such as shuffle(..., seed=0); if it is divided by rank, leave that out: every "
            "rank is to be given the whole stream in the same order"
        )
    if samples == 0 and step == 0:
        raise DataError(
            f"the data set gave no sample in epoch {epoch}; it needs at least one, and __iter__ must start over "
            "each time it is called"
        )
    return samples


def bytes_of(data: Data) -> int:
    """The approximate bytes of ``data``: of tensors, arrays and texts, also in containers and data classes."""
    match data:
        case torch.Tensor() | np.ndarray():
            return int(data.nbytes)
        case str() | bytes():
            return len(data)
        case Mapping():
            return sum(map(bytes_of, data.values()))
        case list() | tuple():
            return sum(map(bytes_of, data))
        case _ if dataclasses.is_dataclass(data):
            return sum(bytes_of(getattr(data, field.name, None)) for field in dataclasses.fields(data))
        case _:
            return _SMALL_OBJECT
