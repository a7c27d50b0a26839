"""The training loop: epochs, the micro-batches of each, and what the script does with one."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any, Final

from torch.utils.data import DataLoader

from lockstep.data import MicroBatchLoader
from lockstep.errors import LockstepError, UsageError
from lockstep.run.end_of_step import EndOfStep
from lockstep.run.loaders import Loaders, refuse_uneven
from lockstep.run.metrics import MetricMeans
from lockstep.run.parameter_sets import Optimizers
from lockstep.run.setup import RunContext
from lockstep.run.start import TrainingStart
from lockstep.run.to_device import to_device
from lockstep.run.train_step import Count, Loss, LossKind, TrainStep
from lockstep.seeding import seed_generators, seed_of
from lockstep.strategies import finish_training


class TrainingLoop:
    """Hands out the micro-batches of each epoch, and turns the losses of the script into steps."""

    def __init__(
        self,
        context: RunContext,
        loaders: Loaders,
        start: TrainingStart,
        train_step: TrainStep,
        end_of_step: EndOfStep,
    ) -> None:
        self._context: Final = context
        self._state: Final = context.state
        self._loaders: Final = loaders
        self._start: Final = start
        self._train_step: Final = train_step
        self._end_of_step: Final = end_of_step
        self._position: Final = context.position
        self._metrics: Final = context.metrics
        self._carried: Final = context.carried
        self._save_stop: Final = context.save_stop
        self._in_epochs = False
        self._passes = 0  # of `train` since the epoch began

    def epochs(self, epochs: int) -> Iterator[int]:
        """See `Run.epochs`."""
        self._start.begin()
        position = self._position
        position.length.epochs = epochs
        self._in_epochs = True
        while position.progress.epoch < epochs:
            self._passes = 0
            seed_generators(seed_of(self._context.settings.seed, "epoch", position.progress.epoch))
            yield position.progress.epoch
            # A step whose loop was left by `break` ends in the next epoch: a resume does not go on in this one.
            position.progress, position.is_left = position.progress.after_epoch(), False
            self._end_of_step.finish()
            self._end_of_step.carry_out(self._save_stop.after_epoch(position.progress.epoch))
        self._in_epochs = False
        finish_training(self._context.strategy)

    def train(self, data_loader: DataLoader[Any]) -> Generator[Any]:
        """See `Run.train`."""
        self._start.begin()
        self._metrics.refuse_nested("train")
        loader = self._loaders.find(data_loader, "train")
        self._refuse_second_pass()
        self._passes += 1
        self._set_plan(loader)
        if self._start.finish_resume():
            return
        self._begin_pass()
        steps_before = self._end_of_step.steps
        try:
            if self._context.share.replica is None:
                self._serve(loader, steps_before)
            yield from self._micro_batches(loader, steps_before)
            whole = self._train_step.end_loop(whole=True)
        except GeneratorExit:
            if self._train_step.current is not None:  # else the run is closed
                self._train_step.end_loop(whole=False)
            self._position.is_left = self._in_epochs
            raise
        finally:
            self._leave()
        if whole:
            # Nothing was measured where a checkpoint was taken between the epoch's last step and its end.
            self._position.metrics = self._metrics.train.reduce(self._context.group) or self._position.metrics
            self._end_of_step.say_warnings()

    def backward(
        self, loss: Loss, data: tuple[Any, ...], count: Count, loss_is: LossKind, optimizer: Optimizers
    ) -> bool:
        """See `Run.backward`."""
        for value, items in self._train_step.backward(loss, data, count, loss_is, optimizer):
            self._position.loss = value
            self._metrics.add_loss(value, items)
        current = self._train_step.current
        return current is not None and current.position.last

    def update(self, optimizer: Optimizers) -> bool:
        """See `Run.update`."""
        done = self._train_step.update(optimizer)
        if done and self._train_step.current is not None:
            self._end_of_step.count(self._train_step.current.position.step_samples)
        return done

    def _refuse_second_pass(self) -> None:
        if self._passes:
            raise UsageError(
                "a second run.train(...) in one epoch: give both data sets to one loader, as ConcatDataset"
                if self._in_epochs
                else "a second run.train(...) outside of epochs: write `for epoch in run.epochs(n):` around it"
            )

    def _set_plan(self, loader: MicroBatchLoader) -> None:
        training_plan, length = self._context.plan, self._position.length
        if training_plan.plan not in (None, loader.plan):
            raise UsageError(
                f"run.train(...) with two plans: {training_plan.plan} before, {loader.plan} now; keep to one"
            )
        if self._context.settings.sync_batchnorm and self._context.group.size > 1:
            refuse_uneven(loader, self._context.group.size)
        is_first, training_plan.plan = training_plan.plan is None, loader.plan
        length.steps_per_epoch, length.samples_per_epoch = loader.steps_per_epoch, loader.length
        if is_first:
            self._context.reporter.say(str(loader.plan))
            self._end_of_step.compare_data()

    def _begin_pass(self) -> None:
        if not self._position.progress.epoch_step:
            # What an epoch that was left by `break` measured is not this one's.
            self._metrics.train = MetricMeans()
        # A checkpoint or the script may have filled buffers since, such as with what was trained elsewhere.
        self._context.strategy.resync()
        self._train_step.new_pass()
        for model in self._state.models:
            if not model.training:
                model.train()
        self._metrics.enter("train")
        self._context.marker.set_phase("data")

    def _micro_batches(self, loader: MicroBatchLoader, steps_before: int) -> Generator[Any]:
        context, train_step, end_of_step = self._context, self._train_step, self._end_of_step
        settings, progress = context.settings, self._position.progress
        for position, batch in self._loaders.training(loader, progress.epoch, progress.epoch_step):
            data = to_device(batch, context.device)
            self._metrics.hand_out(position)
            step = self._position.progress.step
            compare = end_of_step.steps < 2 or end_of_step.steps % settings.check_every == 0
            current = train_step.begin(position, step, compare=compare)
            self._carried.micro_batch_begins(position)
            seed_generators(seed_of(settings.seed, "step", step, position.index))
            context.marker.set_phase("forward")
            with context.precision.forward():
                yield data
            if train_step.end(current):
                end_of_step.count(position.step_samples)
                self._carried.step_is_done()
                end_of_step.finish(steps_before_pass=steps_before)
            context.marker.set_phase("data")

    def _serve(self, loader: MicroBatchLoader, steps_before: int) -> None:
        """The rest of the epoch's steps, or those that the others make; for a rank without micro-batches of its own."""
        progress = self._position.progress
        for position in self._loaders.served(loader, progress.epoch, progress.epoch_step):
            current = self._train_step.begin(position, self._position.progress.step, compare=False)
            if not self._train_step.serve(current):
                break
            self._train_step.end(current)
            self._end_of_step.count(position.step_samples)
            self._end_of_step.finish(steps_before_pass=steps_before)

    def _leave(self) -> None:
        """The loop of `train` is left: at its end, by ``break``, or by an error that `Run.__exit__` has seen.

        By ``break`` it may be left within the body in which a step was done. Its end comes later, where an error or a
        stop can be raised: here, Python would only print it. A step of which a loss is missing is discarded: this may
        be an error on this rank alone, and no other rank would join the collectives.
        """
        current = self._train_step.current
        self._metrics.leave()
        self._context.marker.set_phase("script")
        try:
            if current is not None and current.complete and not current.ended:
                self._train_step.end(current)
                self._carried.step_is_done()
        except LockstepError as error:
            self._end_of_step.error = error
        finally:
            self._train_step.leave()
            self._carried.forget_step()
            self._position.seed_script()
