"""Data sets with an index: each micro-batch is read under generators seeded for it, in a loader process or here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch.utils.data import Dataset, Sampler, Subset

from lockstep.batch import BatchPlan, MicroBatchPosition
from lockstep.data.sampling import (
    Padding,
    count_from_step,
    count_of_rank,
    epoch_positions,
    evaluation_length,
    evaluation_positions,
    order_of,
)
from lockstep.seeding import seed_generators, seed_of

#: What travels to a loader process for each micro-batch. The epoch goes with the indices, so that a process that
#: lives longer than an epoch and reads ahead always knows which epoch it reads for.
Picks = tuple[int, list[int]]


Positions = Callable[[], Iterator[MicroBatchPosition]]


class MicroBatchSampler(Sampler[Picks]):
    """The batch sampler of a rank: its micro-batches of one epoch, of epoch 0 until another one is selected."""

    def __init__(self, plan: BatchPlan, rank: int, length: int, seed: int, *, shuffle: bool, drop_last: bool) -> None:
        self.plan = plan
        self.rank = rank
        self.length = length
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.steps = plan.steps(length, drop_last=drop_last)
        self.select(0, self.positions(0, padding="none"))

    def select(self, epoch: int, positions: Positions) -> None:
        """The next pass over it reads ``positions`` of ``epoch``; passes that have begun stay as they are."""
        self.epoch = epoch
        self.selected = positions

    def positions(self, first_step: int, *, padding: Padding) -> Positions:
        """The positions of this rank's micro-batches in any epoch, from ``first_step`` on."""
        return partial(
            epoch_positions,
            self.plan,
            self.rank,
            self.length,
            drop_last=self.drop_last,
            first_step=first_step,
            padding=padding,
        )

    def evaluation_positions(self, *, padding: Padding) -> Positions:
        """The positions of this rank's micro-batches in an evaluation."""
        return partial(
            evaluation_positions, self.plan, self.rank, self.length, drop_last=self.drop_last, padding=padding
        )

    def micro_batches(self, first_step: int, *, padding: Padding) -> int:
        """How many `positions` gives."""
        full, rest = divmod(self.length, self.plan.global_batch)
        tail = 0 if self.drop_last else len(self.plan.sizes(rest))
        return count_from_step(self.plan, self.rank, full, tail, first_step=first_step, padding=padding)

    def micro_batches_of_evaluation(self, *, padding: Padding) -> int:
        """How many `evaluation_positions` gives."""
        of = evaluation_length(self.plan, self.length, drop_last=self.drop_last)
        return count_of_rank(self.plan, self.rank, of, padding)

    def __iter__(self) -> Iterator[Picks]:
        # A generator begun here, not a generator function: the selection is read now, not with the first item.
        positions = self.selected()
        order = order_of(self.length, self.seed, self.epoch, shuffle=self.shuffle)
        epoch = self.epoch
        return ((epoch, _indices(order[self.plan.rows(position)])) for position in positions)


class SeededDataset(Dataset[Any]):
    """The user's data set, read under generators that depend on (seed, epoch, micro-batch) and on nothing else.

    By itself it is the data set unchanged: same length, same samples. Only micro-batches are seeded, each once, by its
    first sample: seeding for each sample cost more than reading it from memory. So what a data set draws for a sample
    does not depend on ranks or on loader processes, but it does on ``micro_batch``, as BatchNorm and dropout do.
    """

    def __init__(self, dataset: Any, seed: int, take: Callable[[list[int]], Any] | None = None) -> None:
        self.dataset = dataset
        self.seed = seed
        self.take = take  #: for data in memory: the whole micro-batch at once, nothing random in it
        self.at_once = _fetches_at_once(dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, picks: Picks) -> Any:
        epoch, indices = picks
        if self.take is not None:
            return self.take(indices)
        seed_generators(seed_of(self.seed, "samples", epoch, indices[0]))
        if self.at_once:
            return self.dataset.__getitems__(indices)
        return [self.dataset[index] for index in indices]


def _indices(part: Any) -> list[int]:
    return list(part) if isinstance(part, range) else part.tolist()


def _fetches_at_once(dataset: Any) -> bool:
    while type(dataset) is Subset:  # it has __getitems__ itself, but only hands it on
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))
