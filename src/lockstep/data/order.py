"""The order of samples and its division into steps and micro-batches: pure functions, no rank number in what they hold.

    order of epoch 3      | 7 2 9 0 4 1 | 8 5 3 6 |        global_batch 6, micro_batch 2
    step                  |      0      |    1    |
    micro-batch           | 0    1    2 | 0     1 |        the last step is short, not padded
    rank of 3             | 0    1    2 | 1     2 |        rank 0's run is empty there: it may compute a shadow

All ranks draw the same order, so none has to be told.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lockstep.batch import BatchPlan
from lockstep.errors import DataError
from lockstep.randomness import seed_of

Shadows = Literal["none", "one", "even"]
"""Whether a rank computes shadows, micro-batches that count for nothing: none; one, in a short step that has none for
it; or as many as make all ranks compute equally many in every step."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The samples of one forward and backward, and where in the step they stand."""

    data: Any  #: what the loop gets, such as ``(images, labels)``
    index: int  #: of the micro-batch in its step, from 0
    of: int  #: micro-batches of that step, over all ranks
    samples: int  #: samples in it
    step_samples: int  #: samples of the whole step, over all ranks
    last: bool  #: this rank's last one of the step
    shadow: bool  #: counts for nothing: computed only so that this rank's collectives meet those of the others


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one micro-batch: positions ``[start, stop)`` in the epoch's order of samples."""

    index: int
    of: int
    start: int
    stop: int
    step_samples: int
    last: bool
    shadow: bool

    def filled(self, data: Any) -> MicroBatch:
        """The micro-batch that holds ``data``."""
        return MicroBatch(data, self.index, self.of, self.stop - self.start, self.step_samples, self.last, self.shadow)


def order_of(length: int, seed: int, epoch: int, *, shuffle: bool) -> Tensor | range:
    """The order in which an epoch visits ``length`` samples: int64 on the CPU, or a range where it is sequential.

    Global generators are neither read nor moved. A permutation costs about 10 ms for a million samples.
    """
    if not shuffle:
        return range(length)
    generator = torch.Generator().manual_seed(seed_of(seed, "order", epoch))
    return torch.randperm(length, generator=generator)


def slots_of(
    plan: BatchPlan, rank: int, length: int, *, drop_last: bool, first_step: int, shadows: Shadows
) -> Iterator[Slot]:
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
        yield from slots_of_step(plan, rank, step, min(plan.global_batch, length - step * plan.global_batch), shadows)


def slots_of_step(plan: BatchPlan, rank: int, step: int, samples: int, shadows: Shadows) -> Iterator[Slot]:
    """This rank's run of the micro-batches of one step of ``samples``, after its shadows."""
    of = -(-samples // plan.micro_batch)
    begin = step * plan.global_batch
    run = plan.run(rank, of)
    before = shadows_of(plan, rank, of, shadows)
    for number, index in enumerate([of - 1] * before + [*run]):
        start = index * plan.micro_batch
        stop = min(start + plan.micro_batch, samples)
        last = number == before + len(run) - 1
        yield Slot(index, of, begin + start, begin + stop, samples, last, number < before)


def shadows_of(plan: BatchPlan, rank: int, micro_batches: int, shadows: Shadows) -> int:
    """How many shadows ``rank`` computes in a step of so many micro-batches, before its own."""
    mine = len(plan.run(rank, micro_batches))
    if shadows == "even":
        return -(-micro_batches // plan.world_size) - mine
    return int(shadows == "one" and not mine and micro_batches > 0)


def run_length(plan: BatchPlan, rank: int, length: int, *, drop_last: bool, first_step: int, shadows: Shadows) -> int:
    """How many micro-batches `slots_of` gives, in no time at all."""
    full, rest = divmod(length, plan.global_batch)
    tail = 0
    if rest and not drop_last:
        tail = sum(1 for _ in slots_of_step(plan, rank, 0, rest, shadows))
    steps = plan.steps(length, drop_last=drop_last)
    each = len(plan.run(rank)) + shadows_of(plan, rank, plan.micro_batches, shadows)
    return max(0, full - first_step) * each + (tail if first_step < steps else 0)
