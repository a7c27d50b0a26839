"""The evaluation loop: every sample of a data set once, over all ranks, with models that stay as they are."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from typing import Any, Final

import torch
from torch.utils.data import DataLoader

from lockstep.data import MicroBatchLoader
from lockstep.run.end_of_step import EndOfStep
from lockstep.run.evaluation_buffers import EvaluationBuffers
from lockstep.run.loaders import Loaders
from lockstep.run.metrics import MetricMeans
from lockstep.run.setup import RunContext
from lockstep.run.start import TrainingStart
from lockstep.run.to_device import to_device
from lockstep.seeding import seed_generators, seed_of
from lockstep.strategies import ComputesLoss, evaluating


class EvaluationLoop:
    """Hands out the micro-batches of an evaluation."""

    def __init__(
        self,
        context: RunContext,
        loaders: Loaders,
        start: TrainingStart,
        end_of_step: EndOfStep,
    ) -> None:
        self._context: Final = context
        self._state: Final = context.state
        self._loaders: Final = loaders
        self._start: Final = start
        self._end_of_step: Final = end_of_step
        self._position: Final = context.position
        self._metrics: Final = context.metrics
        self._save_stop: Final = context.save_stop
        self._said_put_back = False  # of buffers that moved in an evaluation

    def evaluate(self, data_loader: DataLoader[Any]) -> Generator[Any]:
        """See `Run.evaluate`."""
        self._start.begin()
        self._metrics.refuse_nested("evaluate")
        loader = self._loaders.find(data_loader, "evaluate")
        self._end_of_step.finish()
        with self._evaluation_mode():
            self._metrics.evaluate = MetricMeans()
            self._metrics.enter("evaluate")
            self._context.marker.set_phase("evaluate")
            self._end_of_step.show("evaluating")
            yield from self._micro_batches(loader)
        if self._context.directory:
            self._end_of_step.carry_out(self._save_stop.after_evaluation())
        self._position.metrics = self._position.metrics | self._metrics.evaluate.reduce(self._context.group)
        self._end_of_step.show("training")

    @contextlib.contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        """Modules are in evaluation mode within, and afterwards in the mode of before."""
        modes = [(module, module.training) for model in self._state.models for module in model.modules()]
        for model in self._state.models:
            model.eval()
        try:
            yield
        finally:
            self._metrics.leave()
            self._context.marker.set_phase("script")
            for module, training in modes:
                module.training = training
            self._position.seed_script()

    def _micro_batches(self, loader: MicroBatchLoader) -> Generator[Any]:
        context, position = self._context, self._position
        seed_key = (context.settings.seed, "evaluate", position.progress.step, position.evaluations)
        position.evaluations += 1
        may_leave_early = self._loaders.may_leave_early(loader) and not isinstance(context.strategy, ComputesLoss)
        with evaluating(context.strategy), self._buffers() as buffers:
            for at, batch in self._loaders.evaluation(loader):
                self._metrics.hand_out(at)
                seed_generators(seed_of(*seed_key, at.step, at.index))
                context.marker.set_phase("evaluate")
                with torch.no_grad(), context.precision.forward():
                    yield to_device(batch, context.device)
                buffers.put_back()
                if may_leave_early and self._save_stop.stop_pending():
                    break

    @contextlib.contextmanager
    def _buffers(self) -> Iterator[EvaluationBuffers]:
        """The models' buffers, which are afterwards what they were; those that moved are reported once."""
        buffers = EvaluationBuffers(self._state.models)
        try:
            yield buffers
        finally:
            buffers.put_back(by_value=True)
            if buffers.moved and not self._said_put_back:
                self._said_put_back = True
                self._context.reporter.say(
                    f"run.evaluate(...): the model changes {', '.join(sorted(buffers.moved)[:3])} in evaluation, by "
                    "whatever samples a rank has; put back after each micro-batch"
                )
