"""The losses of a step: which optimizers have a loss, and over how many items each loss is a mean.

    rank 0   d g   d g        each micro-batch gives a loss for the discriminator and for the generator;
    rank 1   d g              ranks have different numbers of micro-batches

A loss belongs to all micro-batches of a step or to none: a loss that some micro-batches leave out would be a mean that
depends on the number of ranks. Within a rank this is checked by counting, and ranks agree on it before each sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NoReturn

import torch

from lockstep.batch import MicroBatchPosition
from lockstep.collectives import Group
from lockstep.errors import PeerLost, UsageError
from lockstep.formatting import plural
from lockstep.run.batches.pinned_copy import PinnedCopy
from lockstep.run.checks.loop_checks import LoopChecks
from lockstep.run.loop.parameter_sets import ParameterSets
from lockstep.run.state.registered import State
from lockstep.strategies import ParameterSet, ServerStrategy, Strategy

_ALL_OR_NONE: Final = (
    "An optimizer has a loss in all micro-batches of a step, on all ranks, or in none, as ranks have different numbers "
    "of them: decide by run.progress.step, as in `if run.progress.step % 5 == 0: run.step(loss, optimizer=...)`. What "
    "depends on losses is decided where run.step(loss) returns True, from a list that run.gather(...) gives"
)


class StepLosses:
    """The losses of the step under way.

    Args:
        group: all ranks.
        strategy: how replicas are kept in step.
        state: what the run holds.
        sets: the parameters of each set of optimizers.
        checks: that the loop's body does nothing that is refused.
        read_later: copies a GPU's values to the host, to be read later.
    """

    def __init__(
        self,
        group: Group,
        strategy: Strategy,
        state: State,
        sets: ParameterSets,
        checks: LoopChecks,
        read_later: Callable[[torch.Tensor], PinnedCopy] = PinnedCopy,
    ) -> None:
        self._group: Final = group
        self._strategy: Final = strategy
        self._state: Final = state
        self._sets: Final = sets
        self._checks: Final = checks
        self._read_later: Final = read_later
        #: For each set of parameters that had a loss: whether the loss came with a count.
        self.has_counts: Final[dict[ParameterSet, bool]] = {}
        #: For each micro-batch whose loss a pipeline has not computed yet: its number of items.
        self.items: Final[dict[int, int | torch.Tensor]] = {}
        self._counts: Final[dict[ParameterSet, int | torch.Tensor]] = {}  # the sums of this rank's counts
        #: Waits for the sum of all ranks' counts, for each set whose last backward pass has begun.
        self._totals: Final[dict[ParameterSet, Callable[[], int]]] = {}
        self._has_options = False  # whether options of optimizers were noted in this step
        self._given: frozenset[ParameterSet] | None = None  # sets for which the step's first micro-batch had losses

    def clear(self) -> None:
        """Forget the step, which is over or discarded."""
        self.has_counts.clear()
        self.items.clear()
        self._counts.clear()
        self._totals.clear()
        self._given = None
        self._has_options = False

    def begin(self, target: ParameterSet, position: MicroBatchPosition, step: int, *, counts: bool) -> None:
        """Check a new loss for ``target``. Collective in the last micro-batch, if the run has several optimizers.

        Raises:
            UsageError: if the loss does not fit those before it in the step, or other ranks have a loss for another
                optimizer.
        """
        if self._has_options:
            self._checks.require_same_options(step)
        elif not position.last or len(self._state.optimizers) > 1:  # another loss of the step follows
            self._checks.note_options()
            self._has_options = True
        if position.is_replay:
            return
        if self._given is not None and target not in self._given:
            self._refuse_some(target, step)
        if position.last:
            self._agree(target, step)
        if target in self.has_counts:
            if self.has_counts[target] != counts and not position.is_padding:
                raise UsageError(
                    "run.step(loss, count=...) for some micro-batches of a step and run.step(loss) for others, so "
                    "there is no one mean: give the count for each, a 0 where a micro-batch holds no item"
                )
        else:
            self._require_no_gradient(target)
            self.has_counts[target] = counts

    def _require_no_gradient(self, target: ParameterSet) -> None:
        """Check that ``target`` has no gradient before its first backward pass of the step."""
        names = [self._state.name_of(p) for p in target.parameters if p.grad is not None]
        if names:
            raise UsageError(
                f"{plural(len(names), 'parameter')} had a gradient before the step's first run.step(loss), such as "
                f"{', '.join(names[:3])}: run.step(loss) takes the place of loss.backward(). A gradient by the input, "
                "as for adversarial samples, is torch.autograd.grad(loss, x); what was there before the training is "
                "cleared by optimizer.zero_grad()"
            )

    def add_count(self, target: ParameterSet, count: int | torch.Tensor) -> None:
        """Add the ``count`` of items of a micro-batch that counts."""
        self._counts[target] = self._counts.get(target, 0) + count

    def end_micro_batch(self, given: set[ParameterSet], position: MicroBatchPosition, step: int) -> None:
        """End a micro-batch with losses for ``given``. Collective for the last one, if the run has several optimizers.

        Raises:
            UsageError: if another micro-batch of the step had losses for other sets, or other ranks have another loss.
        """
        if self._given is None:
            self._given = frozenset(given)
        elif missing := self._given - given:
            self._refuse_some(next(iter(missing)), step)
        if position.last:
            self._agree(None, step)

    def begin_total(self, target: ParameterSet) -> None:
        """Begin to add up the counts of all ranks at this rank's last loss, if losses came with counts.

        Collective with counts. Called before the backward pass, which hides the time of the sum.

        Raises:
            UsageError: for counts that are no whole numbers.
        """
        if not self.has_counts[target]:
            return
        own = self._counts.pop(target, 0)
        # Counts on a GPU are copied while the backward pass is queued, and added up while the pass is computed.
        if isinstance(own, torch.Tensor) and not own.is_cpu:
            arriving = self._read_later(own.detach().view(1))

            def total() -> int:
                return self._strategy.begin_count(_whole(float(arriving.read()[0])))()

            self._totals[target] = total
        else:
            self._totals[target] = self._strategy.begin_count(_whole(float(own)))

    def divide_by_counts(self, target: ParameterSet, step_samples: int) -> None:
        """Turn the gradient from a sum of items per sample into the mean over all items of the step, if counted.

        Collective with counts.

        Raises:
            UsageError: for counts that are no whole numbers, or add up to 0.
        """
        if not self.has_counts[target]:
            return
        try:
            self._strategy.normalize_by_count(target, step_samples, self._totals.pop(target)())
        except PeerLost as error:
            # A rank without counts does not take part in the sum of counts, so its gradient would not be the mean.
            error.add_note(
                "this rank gave run.step(loss, count=...) in this step; if the other ranks are alive, one of them gave "
                "no count: give it for each micro-batch on all ranks, a 0 where a micro-batch holds no item"
            )
            raise

    def _refuse_some(self, target: ParameterSet, step: int) -> NoReturn:
        raise UsageError(
            f"run.step(...) for {self._sets.describe(target)} in some micro-batches of step {step + 1} and not in "
            f"others. {_ALL_OR_NONE}"
        )

    def _agree(self, target: ParameterSet | None, step: int) -> None:
        """Check that all ranks are about to sum the gradients of ``target``, or to end the step (None). Collective.

        Ranks compare only if the run has several optimizers: a micro-batch without a loss for the only optimizer is
        refused.

        Raises:
            UsageError: on all ranks, if some are about to do another thing.
        """
        if self._group.size == 1 or len(self._state.optimizers) == 1 or isinstance(self._strategy, ServerStrategy):
            return
        own = "no further loss" if target is None else f"a loss for {self._sets.describe(target)}"
        by_rank = self._group.gather_objects(own, "for which optimizers there are losses")
        if len(set(by_rank)) > 1:
            said = ", ".join(f"rank {rank} has {what}" for rank, what in enumerate(by_rank))
            raise UsageError(f"in step {step + 1} {said}. {_ALL_OR_NONE}")


def _whole(counted: float) -> int:
    """The number of ``counted`` items of a rank as an integer.

    Raises:
        UsageError: if ``counted`` is no whole number.
    """
    if not counted.is_integer():
        raise UsageError(
            f"step(count=...): the counts of this rank's micro-batches add up to {counted:g}; give whole numbers "
            "(weights that are fractions: scaled up and rounded)"
        )
    return int(counted)
