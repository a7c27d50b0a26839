"""The order of samples and its division into steps and micro-batches: pure functions, no rank number in what they hold.

    order of epoch 3      | 7 2 9 0 4 1 | 8 5 3 6 |        global_batch 6, micro_batch 2
    step                  |      0      |    1    |
    micro-batch           | 0    1    2 | 0     1 |        the last step is short, not padded
    rank of 3, training   | 0    1    2 | 1     2 |        rank 0 has none there: it may compute a padding micro-batch
    rank of 3, evaluation | 0    1    1 | 2     2 |        no step to finish together: one block of the pass each

All ranks draw the same order, so it is never sent from one to another.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lockstep.batch import BatchPlan, MicroBatchPosition
from lockstep.errors import DataError
from lockstep.seeding import seed_of

Padding = Literal["none", "one", "even"]
"""Whether a rank computes padding: micro-batches of weight zero, so that every rank joins the same collectives. None;
one, in a short step that holds no micro-batch for the rank; or as many as make all ranks compute equally many in every
step."""


class MicroBatch(NamedTuple):
    """The samples of one forward and backward pass, and where in the step they stand."""

    position: MicroBatchPosition
    data: Any  #: what the loop hands out, such as ``(images, labels)``


def order_of(length: int, seed: int, epoch: int, *, shuffle: bool) -> Tensor | range:
    """The order in which an epoch visits ``length`` samples: int64 on the CPU, or a range where it is sequential.

    Global generators are neither read nor moved. A permutation costs about 10 ms for a million samples.
    """
    if not shuffle:
        return range(length)
    generator = torch.Generator().manual_seed(seed_of(seed, "order", epoch))
    return torch.randperm(length, generator=generator)


def epoch_positions(
    plan: BatchPlan, rank: int, length: int, *, drop_last: bool, first_step: int, padding: Padding
) -> Iterator[MicroBatchPosition]:
    """This rank's micro-batches of one epoch from ``first_step`` on, in the order it computes them.

    Raises:
        DataError: if the epoch has fewer than ``first_step`` steps.
    """
    steps = plan.steps(length, drop_last=drop_last)
    if not 0 <= first_step <= steps:
        raise DataError(
            f"first_step={first_step}, but an epoch of {length} samples has {steps} steps of {plan.global_batch}; "
            "was the data set or global_batch changed since the checkpoint? Then begin with a fresh one"
        )
    for step in range(first_step, steps):
        yield from step_positions(plan, rank, step, min(plan.global_batch, length - step * plan.global_batch), padding)


def step_positions(
    plan: BatchPlan, rank: int, step: int, samples: int, padding: Padding
) -> Iterator[MicroBatchPosition]:
    """This rank's run of the micro-batches of one step of ``samples``, after its padding."""
    of = -(-samples // plan.micro_batch)
    run = plan.run(rank, of)
    before = padding_of(plan, rank, of, padding)
    for number, index in enumerate([of - 1] * before + [*run]):
        last = number == before + len(run) - 1
        yield plan.position(step, samples, index, last=last, is_padding=number < before)


def evaluation_positions(
    plan: BatchPlan, rank: int, length: int, *, drop_last: bool, padding: Padding
) -> Iterator[MicroBatchPosition]:
    """This rank's block of the epoch's micro-batches, those of all steps end to end.

    The blocks of all ranks, one after another, are the whole pass in its order, also where some are empty. Padding is
    as in a step that holds all these micro-batches.
    """
    of = evaluation_length(plan, length, drop_last=drop_last)
    before = padding_of(plan, rank, of, padding)
    numbers = [of - 1] * before + [*plan.run(rank, of)]
    for i, number in enumerate(numbers):
        step, index = divmod(number, plan.micro_batches)
        samples = min(plan.global_batch, length - step * plan.global_batch)
        last = i == len(numbers) - 1 or numbers[i + 1] // plan.micro_batches != step
        yield plan.position(step, samples, index, last=last, is_padding=i < before)


def evaluation_length(plan: BatchPlan, length: int, *, drop_last: bool) -> int:
    """Micro-batches of a whole pass, over all ranks."""
    full, rest = divmod(length, plan.global_batch)
    return full * plan.micro_batches + (0 if drop_last else len(plan.sizes(rest)))


def padding_of(plan: BatchPlan, rank: int, micro_batches: int, padding: Padding) -> int:
    """How many padding micro-batches ``rank`` computes in a step of so many micro-batches, before its own."""
    own = len(plan.run(rank, micro_batches))
    if padding == "even":
        return -(-micro_batches // plan.world_size) - own
    return int(padding == "one" and not own and micro_batches > 0)


def count_of_rank(plan: BatchPlan, rank: int, micro_batches: int, padding: Padding) -> int:
    """How many micro-batches ``rank`` computes of so many, its padding among them."""
    return len(plan.run(rank, micro_batches)) + padding_of(plan, rank, micro_batches, padding)


def count_from_step(plan: BatchPlan, rank: int, full: int, tail: int, *, first_step: int, padding: Padding) -> int:
    """How many micro-batches ``rank`` computes from ``first_step`` on, its padding among them.

    The epoch is one of ``full`` steps, and of one more if that holds ``tail`` micro-batches.
    """
    whole = max(0, full - first_step) * count_of_rank(plan, rank, plan.micro_batches, padding)
    return whole + (count_of_rank(plan, rank, tail, padding) if first_step <= full else 0)
