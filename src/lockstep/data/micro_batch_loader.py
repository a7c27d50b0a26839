"""`MicroBatchLoader`: how one rank gets its micro-batches of an epoch, from any step on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from lockstep.batch import BatchPlan, EpochSteps
from lockstep.data.indexed.sampling import NO_CHECKS, CheckedSteps, MicroBatch, Padding, TorchLoader
from lockstep.data.seen_samples import SeenSamples
from lockstep.data.shards.dealt_shards import ShardsFound


class MicroBatchLoader(Protocol):
    """One rank's way to its micro-batches."""

    #: What the script holds. A loop of its own over it, outside of `Run.train` and `Run.evaluate`, gives all
    #: micro-batches of the first epoch, on every rank; within one, this rank's. Its length is the number of optimizer
    #: steps of an epoch, on any world; TypeError for a stream that does not know its own.
    data_loader: TorchLoader
    plan: BatchPlan
    length: int | None  #: samples of an epoch, of the first where they differ, over all ranks; None: known at its end
    steps_per_epoch: int | None  #: None: known at its end, or seen to differ
    notes: tuple[str, ...]  #: lines to print once for the user

    def draw(self, epoch: int) -> str | None:
        """The order of ``epoch`` is drawn again, for the pass that is to begin. Its digest, for ranks to compare.

        None for an order that depends on the seed and the epoch alone. A pass draws by itself what was not drawn.
        """

    def look(self, epoch: int) -> SeenSamples | None:
        """A few samples of the data set as it is now, of those that ``epoch`` visits. Ends a pass that is open.

        The same on all ranks, where they hold the same data. None for data that ranks compare while they read it, and
        for shards. Three samples are read, in a loader process where there are any.
        """

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
        """This rank's micro-batches of ``epoch`` from step ``first_step`` on, in the order it computes them.

        All ranks go through it alike, on any number of them: a micro-batch holds the same samples, with the same
        random augmentation, on whichever rank. Every place of the epoch's order comes exactly once, over all ranks.

        What a stream finds of its shards is kept in ``found``, the same on all ranks: a resume that is given it again
        need not read what is behind. None, and an empty one, are good for every step.

        With ``padding``, it first gets those that it is to compute in a step. One pass at a time: a new one ends those
        before it.

        Replays, which ``checks`` asks for, are read from the data set once more; those of a stream are copies.

        The global generators of this process may be moved in any way: code that draws from them seeds them first.

        Raises:
            DataError: if the epoch has fewer than ``first_step`` steps; for a stream also if it gave nothing, or not
                the same to every rank.
        """

    def again(self, epoch: int, step: int, index: int) -> MicroBatch | None:
        """Micro-batch ``index`` of a step of ``epoch``, whichever rank's, read once more. Ends an open pass.

        None for a stream, in which no rank can go back.
        """
        return None

    def is_outdated(self, *, ahead: bool) -> bool:
        """Whether the open pass may have read samples of later steps before the script has changed the data set.

        Not known of a stream, in which no rank can go back.

        Args:
            ahead: whether micro-batches are on their way to the device before the loop asks for them.
        """
        return False

    def evaluation(self, *, padding: Padding) -> Iterator[MicroBatch]:
        """This rank's block of the micro-batches of ``epoch(0)``, for a pass in which no step is finished together.

        The blocks of the ranks, one after another, are the order of the epoch (without shuffling, the data set's), on
        any number of ranks; some may be empty. What a micro-batch says of itself is what it says in ``epoch(0)``, but
        for ``last`` and ``padding``. With padding "even" all ranks compute equally many; padding come first.

        A stream, of which nobody knows the length, is divided as in ``epoch(0)``: the blocks are not its order.
        """

    def micro_batches(self, epoch: int = 0, first_step: int = 0, *, padding: Padding) -> int | None:
        """How many `epoch` hands out from ``first_step`` on; None for a stream that does not know its length."""

    def micro_batches_of_evaluation(self, *, padding: Padding) -> int | None:
        """How many `evaluation` hands out; None for a stream that does not know its length."""

    def close(self) -> None:
        """No loader process runs afterwards. May be called twice."""
