"""The micro-batches of each step in turn, from one loader or from several at a time."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Final

from lockstep.batch import MicroBatchPosition
from lockstep.data import Data, MicroBatch, MicroBatchLoader, ShardsFound
from lockstep.errors import DataError, UsageError
from lockstep.run.batches.loaders import Loaders
from lockstep.run.batches.to_device import on_device
from lockstep.run.loop.end_of_step import EndOfStep
from lockstep.run.setup.run_context import RunContext
from lockstep.strategies import ServerStrategy


class StepData:
    """Reads the steps of the open pass, and in `Run.steps` of the loader's next passes."""

    def __init__(self, context: RunContext, loaders: Loaders, end_of_step: EndOfStep) -> None:
        self._strategy: Final = context.strategy
        self._loaders: Final = loaders
        self._end_of_step: Final = end_of_step
        self._position: Final = context.position
        self._passes: Final = context.position.passes
        self._save_stop: Final = context.save_stop
        self._device: Final = context.device
        self._transcript: Final = context.transcript

    def next_step(self, loaders: Sequence[MicroBatchLoader]) -> Iterator[tuple[MicroBatchPosition, Data]] | None:
        """This rank's micro-batches of the next step; None at the end of the pass, or of the turn. Collective.

        Of several loaders, each item has one batch of each loader, and the position of the first loader's batch.
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

    def again(self, loaders: Sequence[MicroBatchLoader], index: int) -> tuple[MicroBatchPosition, Data] | None:
        """Micro-batch ``index`` of the current step, of any rank, read a second time; None for a stream."""
        places = [(loader, *self._place(loader)) for loader in loaders]
        batches = [loader.again(order, step, index) for loader, order, step, _ in places]
        read = list(on_device((each for each in batches if each is not None), self._device, ahead=False))
        if len(read) < len(batches):
            return None
        return read[0].position, read[0].data if len(read) == 1 else tuple(batch.data for batch in read)

    def samples_of_next_step(self, loaders: Sequence[MicroBatchLoader]) -> int | None:
        """The samples of the next step over all ranks, for a server rank, which reads none; None as for `next_step`."""
        if self._turn_is_over():
            return None
        for loader in loaders:
            if self._is_over(loader):
                if not self._goes_on(loader, is_first=loader is loaders[0]):
                    return None
                order, _, _ = self._place(loader)
                if not len(loader.steps(order)):
                    raise _without_a_step(loader)
        order, step, _ = self._place(loaders[0])
        return loaders[0].steps(order).step_samples(step)

    def _turn_is_over(self) -> bool:
        return self._passes.loop == "steps" and self._position.progress.step >= self._passes.until

    def _step_of(self, loader: MicroBatchLoader) -> Iterator[MicroBatch] | None:
        if self._passes.is_over(self._loaders.name(loader)):
            return None  # without asking for the order, which a resumed script might draw in another way now
        batches = self._loaders.step(loader, *self._place(loader))
        first = next(batches, None)
        return None if first is None else chain([first], batches)

    def _is_over(self, loader: MicroBatchLoader) -> bool:
        """Whether the loader's pass has no step left. Collective if the pass begins."""
        if self._passes.is_over(self._loaders.name(loader)):
            return True
        order, step, _ = self._place(loader)
        return step >= len(loader.steps(order))

    def _place(self, loader: MicroBatchLoader) -> tuple[int, int, ShardsFound]:
        """See `Passes.place`; begins the order of the pass. Collective if the order was not begun yet."""
        name = self._loaders.name(loader)
        place = self._passes.place(name, self._position.progress.epoch)
        if self._loaders.begin(loader, place[0]):
            steps = None if loader.length is None else len(loader.steps(place[0]))
            if self._transcript is not None and self._transcript.pass_steps is not None:
                steps = min(steps or sys.maxsize, self._transcript.pass_steps)
            self._passes.note_steps(name, steps)
        return place

    def _goes_on(self, loader: MicroBatchLoader, *, is_first: bool) -> bool:
        """Whether ``loader``, at its end, starts over. The passes of the first loader are the run's epochs."""
        if self._passes.loop != "steps":
            return False
        if isinstance(self._strategy, ServerStrategy) and not self._strategy.goes_on():
            return False
        self._passes.next_pass(self._loaders.name(loader))
        if is_first:
            self._position.progress = self._position.progress.after_epoch()
            self._end_of_step.carry_out(self._save_stop.after_epoch(self._position.progress.epoch))
        return True


def _together(batches: Sequence[Iterator[MicroBatch]]) -> Iterator[tuple[MicroBatchPosition, Data]]:
    for first in batches[0]:
        each = [first, *(next(others) for others in batches[1:])]
        # Passes over the loaders may have begun at different steps, and replay different ones: a replay of one loader
        # alone is left out.
        while len({one.position.is_replay and (one.position.index, one.position.check) for one in each}) > 1:
            pairs = zip(each, batches, strict=True)
            each = [next(more) if one.position.is_replay else one for one, more in pairs]
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
