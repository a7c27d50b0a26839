"""Data sets with an index: each micro-batch is read under generators seeded for it, in a loader process or here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from torch.utils.data import Dataset, Sampler, Subset

from lockstep.batch import BatchPlan, EpochSteps, MicroBatchPosition
from lockstep.data.orders import Indices, Order
from lockstep.data.sampling import (
    Data,
    Padding,
    Sample,
    UserDataset,
    count_of_evaluation,
    count_of_steps,
    epoch_positions,
    evaluation_positions,
)
from lockstep.seeding import seed_generators, seed_of

#: What travels to a loader process for each micro-batch: the seed of what it draws, and its samples. A process that
#: lives longer than an epoch and reads ahead needs to know nothing else.
Picks = tuple[int, list[int]]


class LoaderPass(NamedTuple):
    """This rank's micro-batches of one pass: of which epoch, and where they stand."""

    epoch: int
    steps: EpochSteps
    positions: Callable[[], Iterator[MicroBatchPosition]]  #: starts over each time


class MicroBatchSampler(Sampler[Picks]):
    """The batch sampler of a rank: its micro-batches of one pass, of epoch 0's until another one is selected."""

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

    def steps(self, epoch: int) -> EpochSteps:
        """The steps of ``epoch``."""
        return self.order.steps(epoch, self.plan, drop_last=self.drop_last)

    def of_epoch(self, epoch: int, first_step: int, *, padding: Padding) -> LoaderPass:
        """This rank's micro-batches of ``epoch``, from ``first_step`` on."""
        steps = self.steps(epoch)
        return LoaderPass(
            epoch, steps, partial(epoch_positions, steps, self.rank, first_step=first_step, padding=padding)
        )

    def of_evaluation(self, *, padding: Padding) -> LoaderPass:
        """This rank's micro-batches of an evaluation."""
        steps = self.steps(0)
        return LoaderPass(0, steps, partial(evaluation_positions, steps, self.rank, padding=padding))

    def micro_batches(self, epoch: int, first_step: int, *, padding: Padding) -> int:
        """How many `of_epoch` selects."""
        steps = self.steps(epoch)
        rest = (steps.micro_batches_of(step) for step in range(first_step, len(steps)))
        return count_of_steps(self.plan, self.rank, rest, padding)

    def micro_batches_of_evaluation(self, *, padding: Padding) -> int:
        """How many `of_evaluation` selects."""
        return count_of_evaluation(self.plan, self.rank, self.steps(0).micro_batches, padding)

    def __iter__(self) -> Iterator[Picks]:
        # A generator begun here, not a generator function: the selection is read now, not with the first item.
        selected, order = self.selected, self.order.indices(self.selected.epoch)
        return (self._picks(selected, order, position) for position in selected.positions())

    def _picks(self, selected: LoaderPass, order: Indices, position: MicroBatchPosition) -> Picks:
        rows = self.order.rows(selected.steps, position)
        part = order[rows]
        indices: list[int] = list(part) if isinstance(part, range) else part.tolist()
        # By its first sample: what a micro-batch draws does not depend on where in the order it stands. One that may
        # come again in the same epoch is to draw something else then.
        mark = ("at", rows.start) if self.order.may_repeat else (indices[0],)
        return seed_of(self.seed, "samples", selected.epoch, *mark), indices


class SeededDataset(Dataset[Any]):
    """The user's data set, read under generators that depend on (seed, epoch, micro-batch) and on nothing else.

    By itself it is the data set unchanged: same length, same samples. Only micro-batches are seeded, each once:
    seeding for each sample cost more than reading it from memory. So what a data set draws for a sample
    does not depend on ranks or on loader processes, but it does on ``micro_batch``, as BatchNorm and dropout do.
    """

    def __init__(self, dataset: UserDataset, take: Callable[[list[int]], Data] | None = None) -> None:
        self.dataset = dataset
        self.take = take  #: for data in memory: the whole micro-batch at once, nothing random in it
        self.at_once = _fetches_at_once(dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Sample:
        return self.dataset[index]

    def __getitems__(self, picks: Picks) -> Data:
        seed, indices = picks
        if self.take is not None:
            return self.take(indices)
        seed_generators(seed)
        if self.at_once:
            return self.dataset.__getitems__(indices)
        return [self.dataset[index] for index in indices]


def _fetches_at_once(dataset: UserDataset) -> bool:
    while type(dataset) is Subset:  # it has __getitems__ itself, but only hands it on
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))
