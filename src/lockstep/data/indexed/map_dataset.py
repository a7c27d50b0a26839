"""Data sets with an index: each micro-batch is read with generators seeded for it, in any process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

from torch import Tensor
from torch.utils.data import Dataset, Sampler, Subset

from lockstep.batch import BatchPlan, EpochSteps, MicroBatchPosition
from lockstep.data.indexed.orders import Order
from lockstep.data.indexed.sampling import (
    NO_CHECKS,
    CheckedSteps,
    Data,
    Padding,
    Sample,
    UserDataset,
    count_of_evaluation,
    count_of_steps,
    epoch_positions,
    evaluation_positions,
)
from lockstep.data.seen_samples import SeenBatch, checksum
from lockstep.errors import DataError
from lockstep.seeding import drawn_states, seed_generators, seed_of, seeded_generators

#: The message to a loader process for each micro-batch: the seed of its random numbers, and its samples. A process that
#: lives longer than an epoch and reads ahead needs to know nothing else. Without a seed, checksums of the samples are
#: returned, to be compared.
Picks = tuple[int | None, list[int]]

_LOOK_SEED: Final = seed_of("look")  # of random numbers for a sample that is read for its checksum


class LoaderPass(NamedTuple):
    """This rank's micro-batches of a pass: the epoch, its steps and the positions."""

    epoch: int
    steps: EpochSteps
    positions: Callable[[], Iterator[MicroBatchPosition]]  #: starts over each time


class MicroBatchSampler(Sampler[Picks]):
    """The batch sampler of a rank: its micro-batches of the selected pass, at first epoch 0."""

    def __init__(self, plan: BatchPlan, rank: int, order: Order, seed: int, *, drop_last: bool) -> None:
        self.plan = plan
        self.rank = rank
        self.order = order
        self.seed = seed
        self.drop_last = drop_last
        first = self.steps(0)
        self.length = first.samples  #: of epoch 0
        self.steps_per_epoch = len(first)  #: of epoch 0
        self.selected = self.of_epoch(0, 0, padding="none")
        self.few: list[int] = []  #: samples whose checksums are wanted, in the place of the selected pass

    def steps(self, epoch: int) -> EpochSteps:
        """The steps of ``epoch``."""
        return self.order.steps(epoch, self.plan, drop_last=self.drop_last)

    def of_epoch(
        self, epoch: int, first_step: int, *, padding: Padding, checks: CheckedSteps = NO_CHECKS
    ) -> LoaderPass:
        """This rank's micro-batches of ``epoch``, from ``first_step`` on, and the replays that ``checks`` asks for."""
        steps = self.steps(epoch)
        return LoaderPass(
            epoch,
            steps,
            partial(epoch_positions, steps, self.rank, first_step=first_step, padding=padding, checks=checks),
        )

    def of_evaluation(self, *, padding: Padding) -> LoaderPass:
        """This rank's micro-batches of an evaluation."""
        steps = self.steps(0)
        return LoaderPass(0, steps, partial(evaluation_positions, steps, self.rank, padding=padding))

    def micro_batches(self, epoch: int, first_step: int, *, padding: Padding) -> int:
        """The number of micro-batches that `of_epoch` selects."""
        steps = self.steps(epoch)
        rest = (steps.micro_batches_of(step) for step in range(first_step, len(steps)))
        return count_of_steps(self.plan, self.rank, rest, padding)

    def micro_batches_of_evaluation(self, *, padding: Padding) -> int:
        """The number of micro-batches that `of_evaluation` selects."""
        return count_of_evaluation(self.plan, self.rank, self.steps(0).micro_batches, padding)

    def __iter__(self) -> Iterator[Picks]:
        # A generator begun here, not a generator function: the selection is read now, not with the first item.
        if self.few:
            return iter([(None, self.few)])
        return (picks for _, picks in self.picks_of(self.selected))

    def picks_of(self, selected: LoaderPass) -> Iterator[tuple[MicroBatchPosition, Picks]]:
        """The micro-batches of a pass, each with its position and the samples to be read."""
        order, epoch = self.order, selected.epoch
        found = order.indices(epoch)
        # A part of an array takes a fifth of the time of a part of a tensor.
        indices = found.numpy() if isinstance(found, Tensor) else found
        for position in selected.positions():
            rows = order.rows(selected.steps, position)
            part = indices[rows]
            picked: list[int] = list(part) if isinstance(part, range) else part.tolist()
            # Seeded by the first sample, so random numbers of a micro-batch do not depend on its place in the order. A
            # micro-batch that may come again in the same epoch must draw other numbers then.
            mark = ("at", rows.start) if order.may_repeat else (picked[0],)
            yield position, (seed_of(self.seed, "samples", epoch, *mark), picked)


class ScriptSampler(Sampler[Picks]):
    """The sampler of a loop of the script's own over a loader, which reads epoch 0.

    In a pass of `Run.train` or `Run.evaluate`, such a loop reads this rank's micro-batches; elsewhere all
    micro-batches, equally on all ranks, as for the statistics of a data set.
    """

    def __init__(self, own: MicroBatchSampler, *, drop_last: bool, in_pass: Callable[[], bool]) -> None:
        alone = replace(own.plan, world_size=1, in_turn=1)
        self._own = copy(own)  # the copy stays at epoch 0
        self._all = MicroBatchSampler(alone, 0, own.order, own.seed, drop_last=drop_last)
        self._in_pass = in_pass

    def __iter__(self) -> Iterator[Picks]:
        return iter(self._own if self._in_pass() else self._all)


class SeededDataset(Dataset[Any]):
    """The user's data set, read with generators whose seeds depend only on (seed, epoch, micro-batch).

    Length and single samples are those of the user's data set. Only micro-batches are seeded, each once, since seeding
    for each sample cost more than reading it from memory. So random numbers for a sample do not depend on ranks or on
    loader processes, but do depend on ``micro_batch``, as BatchNorm and dropout do.
    """

    def __init__(self, dataset: UserDataset, take: Callable[[list[int]], Data] | None = None) -> None:
        self.dataset = dataset
        self.take = take  #: for data in memory: reads the whole micro-batch at once, without random numbers
        self.at_once = _fetches_at_once(dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Sample:
        return self.dataset[index]

    def __getitems__(self, picks: Picks) -> Data:
        seed, indices = picks
        if self.take is not None:
            return self.take(indices)
        if seed is None:
            with seeded_generators(_LOOK_SEED):
                return SeenBatch(map(checksum, self._samples(indices) if self.at_once else self._looked_at(indices)))
        seed_generators(seed)
        return self._samples(indices)

    def _looked_at(self, indices: list[int]) -> list[Sample]:
        """The samples at ``indices``; checks that reading a sample again draws random numbers again.

        Raises:
            DataError: if the data set caches random results.
        """
        samples, drawn = [], [drawn_states()]
        for index in indices:
            samples.append(self.dataset[index])
            drawn.append(drawn_states())
        drew = [index for index, before, after in zip(indices, drawn, drawn[1:], strict=False) if before != after]
        if len(drew) > 1:  # a single sample may have drawn numbers that the data set needs once, for all samples
            for index in indices:
                self.dataset[index]
            if drawn_states() == drawn[-1]:
                raise DataError(
                    f"the data set keeps what it has drawn: sample {drew[-1]} drew random numbers when it was read "
                    "first, and none when it was read again, as from a cache of augmented samples. Each rank and each "
                    "loader process would keep draws of its own, and no checkpoint has them: put into the cache what "
                    "is loaded, and draw after it was taken from there"
                )
        return samples

    def _samples(self, indices: list[int]) -> Data:
        if self.at_once:
            return self.dataset.__getitems__(indices)
        return [self.dataset[index] for index in indices]


def _fetches_at_once(dataset: UserDataset) -> bool:
    while type(dataset) is Subset:  # a Subset has __getitems__, but may only call the inner data set's
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))
