"""The interface of loaders: a `MicroBatchLoader` gives a rank its micro-batches of an epoch, from any step on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from lockstep.batch import BatchPlan, EpochSteps
from lockstep.data.indexed.sampling import NO_CHECKS, CheckedSteps, MicroBatch, Padding, TorchLoader
from lockstep.data.seen_samples import SeenSamples
from lockstep.data.shards.dealt_shards import ShardsFound


class MicroBatchLoader(Protocol):
    """A rank's access to its micro-batches of a data set."""

    #: The loader in the script's hands. A loop of the script over this loader, outside of `Run.train` and
    #: `Run.evaluate`, gives all micro-batches of the first epoch, on every rank; within one of the two, this rank's.
    #: Its length is the number of optimizer steps of an epoch, with any world size; TypeError for a stream that does
    #: not know its length.
    data_loader: TorchLoader
    plan: BatchPlan
    length: int | None  #: samples of an epoch, of the first where epochs differ, over all ranks; None: known at its end
    steps_per_epoch: int | None  #: None: known at its end, or seen to differ
    notes: tuple[str, ...]  #: lines to print once for the user

    def draw(self, epoch: int) -> str | None:
        """Draw the order of ``epoch`` again, for the pass that is to begin; returns its digest, for ranks to compare.

        None for an order that depends only on the seed and the epoch. A pass draws an order that was not drawn before.
        """

    def look(self, epoch: int) -> SeenSamples | None:
        """Read a few samples that ``epoch`` visits, from the data set in its present state. Ends a pass that is open.

        The result is equal on all ranks if these hold equal data. None for data that ranks compare while they read it,
        and for shards. Three samples are read, in a loader process if the loader has any.
        """

    def rows_in_memory(self) -> list[torch.Tensor]:
        """Rows of the tensors that a data set in memory consists of, spread over all of them; [] for other data."""
        return []

    def steps(self, epoch: int) -> EpochSteps:
        """The steps of ``epoch``, over all ranks.

        Raises:
            DataError: for a stream.
        """

    def epoch(
        self,
        epoch: int,
        first_step: int = 0,
        *,
        padding: Padding,
        found: ShardsFound | None = None,
        checks: CheckedSteps = NO_CHECKS,
    ) -> Iterator[MicroBatch]:
        """This rank's micro-batches of ``epoch`` from step ``first_step`` on, in the order of their computation.

        Every rank must read its whole iterator. For any number of ranks, a micro-batch holds the same samples, with the
        same random augmentation. Every place of the epoch's order comes exactly once, over all ranks.

        The places that a stream finds in its shards are kept in ``found``, equal on all ranks: a resume that gets
        ``found`` again need not read earlier samples. None, and an empty dict, are valid for every step.

        With ``padding``, a rank first gets its padding micro-batches of a step. Only one pass may be open: a new pass
        ends the pass before it.

        Replays, which ``checks`` asks for, are read from the data set a second time; replays of a stream are copies.

        The global generators of this process may be moved in any way: code that draws from them seeds them first.

        Raises:
            DataError: if the epoch has fewer than ``first_step`` steps; for a stream also if it gave no sample, or
                different samples to different ranks.
        """

    def again(self, epoch: int, step: int, index: int) -> MicroBatch | None:
        """Micro-batch ``index`` of a step of ``epoch``, of any rank, read a second time. Ends an open pass.

        None for a stream, in which no rank can go back.
        """
        return None

    def is_outdated(self, *, ahead: bool) -> bool:
        """Whether the open pass may have read samples of later steps before the script has changed the data set.

        False for a stream, in which no rank can go back.

        Args:
            ahead: whether micro-batches are on their way to the device before the loop asks for them.
        """
        return False

    def evaluation(self, *, padding: Padding) -> Iterator[MicroBatch]:
        """This rank's block of the micro-batches of ``epoch(0)``, for a pass without common steps.

        The blocks of the ranks, one after another, are the order of the epoch (without shuffling, the data set's), on
        any number of ranks; some blocks may be empty. The position of a micro-batch is that of ``epoch(0)``, but for
        ``last`` and ``is_padding``. With padding "even" all ranks compute equally many micro-batches; padding comes
        first.

        A stream, whose length is not known, is divided as in ``epoch(0)``: its samples do not come in blocks.
        """

    def micro_batches(self, epoch: int = 0, first_step: int = 0, *, padding: Padding) -> int | None:
        """The number of micro-batches of `epoch` from ``first_step`` on; None for a stream of unknown length."""

    def micro_batches_of_evaluation(self, *, padding: Padding) -> int | None:
        """The number of micro-batches of `evaluation`; None for a stream of unknown length."""

    def close(self) -> None:
        """End all loader processes. May be called twice."""
