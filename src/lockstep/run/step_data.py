"""The micro-batches of one step after another, from one loader or from several at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Final

from lockstep.batch import EpochSteps, MicroBatchPosition
from lockstep.data import Data, MicroBatch, MicroBatchLoader
from lockstep.errors import DataError, UsageError
from lockstep.run.end_of_step import EndOfStep
from lockstep.run.loaders import Loaders
from lockstep.run.setup import RunContext
from lockstep.strategies import HasServerRanks


class StepData:
    """Goes through the open pass, and in `Run.steps` from one pass over a loader to the next."""

    def __init__(self, context: RunContext, loaders: Loaders, end_of_step: EndOfStep) -> None:
        self._strategy: Final = context.strategy
        self._loaders: Final = loaders
        self._end_of_step: Final = end_of_step
        self._position: Final = context.position
        self._passes: Final = context.position.passes
        self._save_stop: Final = context.save_stop

    def next_step(self, loaders: Sequence[MicroBatchLoader]) -> Iterator[tuple[MicroBatchPosition, Data]] | None:
        """This rank's micro-batches of the next step; None at the end of the pass, or of the turn. Collective.

        Of several loaders, each with one batch of each, and the place of the first one's.
        """
        if self._turn_is_over():
            return None
        batches = []
        for loader in loaders:
            found = self._step_of(loader)
            if found is None:
                if not self._goes_on(loader, is_first=loader is loaders[0]):
                    return None
                found = self._step_of(loader)
                if found is None:
                    raise _without_a_step(loader)
            batches.append(found)
        return iter(batches[0]) if len(batches) == 1 else _together(batches)

    def samples_of_next_step(self, loaders: Sequence[MicroBatchLoader]) -> int | None:
        """The same for a rank that serves others and reads nothing: how many samples there are over all ranks."""
        if self._turn_is_over():
            return None
        for loader in loaders:
            if self._step_number(loader) >= len(self._steps(loader)):
                if not self._goes_on(loader, is_first=loader is loaders[0]):
                    return None
                if not len(self._steps(loader)):
                    raise _without_a_step(loader)
        return self._steps(loaders[0]).step_samples(self._step_number(loaders[0]))

    def _turn_is_over(self) -> bool:
        return self._passes.loop == "steps" and self._position.progress.step >= self._passes.until

    def _step_of(self, loader: MicroBatchLoader) -> Iterator[MicroBatch] | None:
        found = self._passes.shards(self._loaders.name(loader))
        batches = self._loaders.step(loader, self._begun_order(loader), self._step_number(loader), found)
        first = next(batches, None)
        return None if first is None else chain([first], batches)

    def _steps(self, loader: MicroBatchLoader) -> EpochSteps:
        return loader.steps(self._begun_order(loader))

    def _begun_order(self, loader: MicroBatchLoader) -> int:
        order = self._passes.order(self._loaders.name(loader), self._position.progress.epoch)
        self._loaders.begin(loader, order)
        return order

    def _step_number(self, loader: MicroBatchLoader) -> int:
        return self._passes.step(self._loaders.name(loader))

    def _goes_on(self, loader: MicroBatchLoader, *, is_first: bool) -> bool:
        """``loader`` came to its end: whether it starts over. The first one's passes are the run's epochs."""
        if self._passes.loop != "steps":
            return False
        if isinstance(self._strategy, HasServerRanks) and not self._strategy.goes_on():
            return False
        self._passes.next_pass(self._loaders.name(loader))
        if is_first:
            self._position.progress = self._position.progress.after_epoch()
            self._end_of_step.carry_out(self._save_stop.after_epoch(self._position.progress.epoch))
        return True


def _together(batches: Sequence[Iterator[MicroBatch]]) -> Iterator[tuple[MicroBatchPosition, Data]]:
    for each in zip(*batches, strict=True):
        position = each[0].position
        if odd := [one.position.of for one in each if one.position.of != position.of]:
            raise UsageError(
                f"run.train(...) of several loaders: in a step the first one has {position.of} micro-batches and "
                f"another one {odd[0]}, as at the end of a data set that does not divide; give run.loader(..., "
                "drop_last=True), or data sets of equal length"
            )
        yield position, tuple(one.data for one in each)


def _without_a_step(loader: MicroBatchLoader) -> DataError:
    return DataError(
        "an epoch of the data set has no step: drop_last=True leaves out a step of fewer than "
        f"global_batch={loader.plan.global_batch} samples; give a smaller one, more samples, or drop_last=False"
    )
