"""The only place where batch sizes are divided.

    256 samples/step = 8 micro-batches x 32 = 3 ranks x 2..3

    micro-batch   0   1   2   3   4   5   6   7
    rank          0   0   1   1   1   2   2   2        run of rank r: [M*r // W, M*(r+1) // W)

A step is always the same list of micro-batches, no matter which ranks compute them: the micro-batch is the unit of
reproducibility. Where ranks take micro-batches in turn, those of a turn are neighbours, and the first turn is short:

    micro-batch       0   1   2   3   4   5   6   7
    rank, in_turn=3   1   2   0   1   2   0   1   2
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from typing import Self

from lockstep.errors import PlanError
from lockstep.formatting import plural

#: Micro-batches of a step by default: enough for a machine of eight devices, few enough to stay large.
DEFAULT_MICRO_BATCHES = 8


class StepCheck(IntEnum):
    """What is tried of a micro-batch: whether the loop's body is a function of it, as the promise needs.

    a rank's micro-batches of a checked step     0 1 2 0' 3        of one alone: 0' 0' 0        0' is a replay of 0
    of each second one, on one rank              0 0' 1 2 3                      0' 0' 0
    of each second one, on several ranks         0 1 2 4' 3                         4' 0        4 is the next rank's
    """

    NONE = 0
    STEP = 1  #: its step is checked: what the body must not change is compared
    REPLAYED = 2  #: likewise, and it is computed once more in this step
    REPLAY = 3  #: it is computed once more, only to be compared, and counts for nothing
    OTHER_RANKS = 4  #: likewise, and it is another rank's


@dataclass(frozen=True, slots=True)
class MicroBatchPosition:
    """Where one micro-batch stands in its step: one value for the loader, the training loop and the strategy."""

    index: int  #: of the micro-batch in its step, from 0
    of: int  #: micro-batches of that step, over all ranks
    last: bool  #: whether it is this rank's last one of the step
    is_padding: bool = False  #: counts for nothing: computed only so that this rank joins the others' collectives
    samples: int = 1  #: samples in it
    step_samples: int = 1  #: samples of the whole step, over all ranks
    step: int = 0  #: within the epoch, from 0
    check: StepCheck = StepCheck.NONE  #: what is tried of it
    audited: bool = False  #: whether its step is audited: those that are computed twice are compared before the update

    @property
    def is_checked(self) -> bool:
        """Whether its step is checked: what the body must not change is compared, on all ranks."""
        return self.check is not StepCheck.NONE and not self.audited

    @property
    def is_replay(self) -> bool:
        """Whether it is computed once more, only to be compared: it counts for nothing."""
        return self.check >= StepCheck.REPLAY

    @property
    def is_other_ranks(self) -> bool:
        """Whether it is a replay of what another rank computes in this step."""
        return self.check is StepCheck.OTHER_RANKS

    def samples_in(self, run: range) -> int:
        """How many samples the micro-batches ``run`` of the same step hold, if none but the step's last one is short.

        At the end of a stream others may be.
        """
        last = self.of - 1
        full = self.samples if self.index < last else (self.step_samples - self.samples) // max(1, last)
        short = full - (self.step_samples - last * full) if last in run else 0
        return len(run) * full - short

    def of_step(self, step: int) -> Self:
        """The same place of another ``step``."""
        # Spelt out, since `dataclasses.replace` would take four times as long, in each step.
        return type(self)(
            self.index,
            self.of,
            self.last,
            self.is_padding,
            self.samples,
            self.step_samples,
            step,
            self.check,
            self.audited,
        )


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The division of the samples of one optimizer step into micro-batches, and of these among ranks.

    There may be more ranks than a step has micro-batches: in an evaluation some get none. Training refuses it, by
    `require_work_for_all_ranks`.

    Raises:
        PlanError: if a size is not positive, or ``micro_batch`` exceeds ``global_batch``.
    """

    global_batch: int  #: samples per optimizer step, over all ranks
    micro_batch: int  #: samples of one forward and backward
    world_size: int  #: ranks that share them
    varies: bool = False  #: each step holds what a batch sampler says; global_batch is its largest in the first epoch
    #: so many neighbouring ranks, a divisor of all, take their common run of micro-batches in turn; 1: a run for each
    in_turn: int = 1

    def __post_init__(self) -> None:
        for name in ("global_batch", "micro_batch", "world_size"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name}={getattr(self, name)}: it must be at least 1")
        if self.micro_batch > self.global_batch and not self.varies:
            raise PlanError(
                f"micro_batch={self.micro_batch} is larger than global_batch={self.global_batch}; "
                f"micro_batch counts the samples of one forward: give at most {self.global_batch}"
            )

    @classmethod
    def of(
        cls, global_batch: int, micro_batch: int | None, world_size: int, *, varies: bool = False, in_turn: int = 1
    ) -> BatchPlan:
        """The plan for these sizes; without ``micro_batch`` a step is divided into `DEFAULT_MICRO_BATCHES`."""
        if micro_batch is None:
            micro_batch = max(1, -(-global_batch // DEFAULT_MICRO_BATCHES))
        return cls(global_batch, micro_batch, world_size, varies, in_turn)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a full step."""
        return self.micro_batches_of(self.global_batch)

    def micro_batches_of(self, samples: int) -> int:
        """Micro-batches of a step of ``samples``."""
        return -(-samples // self.micro_batch)

    def require_work_for_all_ranks(self) -> None:
        """Check that every rank has a micro-batch in a full step, as training needs.

        Raises:
            PlanError: if some have none.
        """
        if self.world_size <= self.micro_batches:
            return
        step = "the largest batch is of " if self.varies else "global_batch="
        has = (
            f"{plural(self.world_size, 'rank')} for {plural(self.micro_batches, 'micro-batch')} "
            f"({step}{self.global_batch}, micro_batch={self.micro_batch}): some ranks would have nothing to do"
        )
        fits = self.global_batch // self.world_size
        if fits:
            ranks = plural(self.micro_batches, "rank")
            raise PlanError(f"{has}; use micro_batch={fits} or less, or {ranks} or fewer")
        larger = "make larger batches" if self.varies else f"raise global_batch to {self.world_size} or more"
        raise PlanError(f"{has}; start at most {plural(self.global_batch, 'rank')}, or {larger}")

    def run(self, rank: int, micro_batches: int | None = None) -> range:
        """The micro-batches of ``rank``, in a step of ``micro_batches`` (default: a full step).

        Runs differ in length by at most one, and those that are shorter have no part in the first turn. Neighbouring
        ranks hold neighbouring runs, or take those of `in_turn` ranks in turn. In a short step, which may hold fewer
        micro-batches than there are ranks, some runs are empty.
        """
        m = self.micro_batches if micro_batches is None else micro_batches
        place, ranks = rank % self.in_turn, self.in_turn
        start, stop = (m * end // self.world_size for end in (rank - place, rank - place + ranks))
        return range(start + (place + stop - start) % ranks, stop, ranks)

    def block(self, rank: int, micro_batches: int) -> range:
        """The block of neighbouring ones that ``rank`` evaluates, of so many; blocks of all ranks follow each other."""
        return range(micro_batches * rank // self.world_size, micro_batches * (rank + 1) // self.world_size)

    def steps(self, samples: int, *, drop_last: bool = False) -> int:
        """Steps of an epoch of ``samples``; the last one is short unless ``drop_last`` leaves it out."""
        return samples // self.global_batch if drop_last else -(-samples // self.global_batch)

    def epoch(self, samples: int, *, drop_last: bool = False) -> EpochSteps:
        """The steps of an epoch of ``samples``."""
        steps, m = self.steps(samples, drop_last=drop_last), self.micro_batches
        samples = min(samples, steps * self.global_batch)
        last = samples - (steps - 1) * self.global_batch
        return EpochSteps(
            self,
            samples,
            range(0, steps * self.global_batch, self.global_batch),
            range(0, steps * m, m),
            (steps - 1) * m + self.micro_batches_of(last) if steps else 0,
        )

    def epoch_of_batches(self, sizes: Sequence[int]) -> EpochSteps:
        """The steps of an epoch, each of which is a batch of so many samples."""
        *starts, samples = accumulate(sizes, initial=0)
        *micro_starts, micro_batches = accumulate(map(self.micro_batches_of, sizes), initial=0)
        return EpochSteps(self, samples, starts, micro_starts, micro_batches)

    def position(
        self, step: int, step_samples: int, index: int, *, last: bool, is_padding: bool = False
    ) -> MicroBatchPosition:
        """Where micro-batch ``index`` of a step of ``step_samples`` stands, for a rank of which it is the ``last``."""
        of = self.micro_batches_of(step_samples)
        samples = min(self.micro_batch, step_samples - index * self.micro_batch)
        return MicroBatchPosition(index, of, last, is_padding, samples, step_samples, step)

    def __str__(self) -> str:
        """Such as ``256 samples/step = 8 micro-batches x 32 = 4 ranks x 2``."""
        m, w = self.micro_batches, self.world_size
        each = str(m // w) if m % w == 0 else f"{m // w}..{m // w + 1}"
        last = self.global_batch - (m - 1) * self.micro_batch
        tail = "" if last == self.micro_batch else f" (the last {last})"
        return (
            f"{'up to ' if self.varies else ''}{self.global_batch} samples/step = {plural(m, 'micro-batch')} x "
            f"{self.micro_batch}{tail} = {plural(w, 'rank')} x {each}"
        )


@dataclass(frozen=True, slots=True)
class EpochSteps:
    """The steps of one epoch, laid end to end in its order of samples."""

    plan: BatchPlan
    samples: int  #: of all steps
    starts: Sequence[int]  #: of each step, how many samples come before it
    micro_starts: Sequence[int]  #: of each step, how many micro-batches come before it
    micro_batches: int  #: of all steps

    def __len__(self) -> int:
        return len(self.starts)

    def step_samples(self, step: int) -> int:
        """How many samples ``step`` holds."""
        end = self.starts[step + 1] if step + 1 < len(self.starts) else self.samples
        return end - self.starts[step]

    def micro_batches_of(self, step: int) -> int:
        """How many micro-batches ``step`` holds."""
        return self.plan.micro_batches_of(self.step_samples(step))

    def place(self, number: int) -> tuple[int, int]:
        """The step, and the index in it, of micro-batch ``number`` of the epoch."""
        step = bisect_right(self.micro_starts, number) - 1
        return step, number - self.micro_starts[step]

    def rows(self, position: MicroBatchPosition) -> slice:
        """Which part of the epoch's order of samples the micro-batch at ``position`` holds."""
        start = self.starts[position.step] + position.index * self.plan.micro_batch
        return slice(start, start + position.samples)
