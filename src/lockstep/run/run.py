"""`Run`: what a training script calls. Each method is one call of the room of this package that does the work.

set_up ──► RunContext: world, device, group, strategy, checkpoints, state, position
              │
Registration ─┤ models, optimizers, schedulers, kept objects    Loaders: data sets
              │
TrainingStart ┤ a checkpoint is loaded
              │
TrainingLoop ─┤ TrainStep ─► EndOfStep ─► RunSnapshot           EvaluationLoop
              │                                                 RankOperations
Shutdown ─────┘
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeVar

import torch
from torch import nn
from torch.utils.data import DataLoader

from lockstep.batch import MicroBatchPosition
from lockstep.errors import UsageError
from lockstep.progress import Progress
from lockstep.run.carried_state import CarriedState
from lockstep.run.early_stopping import EarlyStopping
from lockstep.run.end_of_step import EndOfStep
from lockstep.run.evaluation_loop import EvaluationLoop
from lockstep.run.loaders import Loaders
from lockstep.run.micro_batches import MicroBatches
from lockstep.run.nonfinite import NonFiniteChecks, NonFiniteWarnings
from lockstep.run.parameter_sets import Optimizers
from lockstep.run.passes import call_site
from lockstep.run.rank_operations import RankOperations
from lockstep.run.registration import Registration
from lockstep.run.run_log import RunLog
from lockstep.run.setup import set_up
from lockstep.run.shutdown import Shutdown
from lockstep.run.snapshot import RunSnapshot
from lockstep.run.start import TrainingStart
from lockstep.run.state import Stateful
from lockstep.run.train_step import Count, Loss, TrainStep
from lockstep.run.training_loop import TrainingLoop
from lockstep.seeding import seed_generators, seed_of
from lockstep.settings import ResolvedSettings, Settings, changed
from lockstep.world import World

T = TypeVar("T")
_DEFAULTS = Settings()


class Run:
    """One training run, alone or as one rank of any launcher's world.

    Opening it finds out which rank this process is, connects to the other ranks, seeds everything random and chooses
    the device. Every rank must make the same calls in the same order. Use it in a ``with`` statement, which closes it.

    Every argument can be overridden from outside: ``lockstep run --precision bf16 train.py``, or
    ``LOCKSTEP_PRECISION=bf16``. `settings` has each value and where it came from.

    Args:
        seed: of everything random: initial weights, order of samples, augmentation, dropout.
        strategy: how replicas are kept in step, with its options, such as ``ddp`` or ``fsdp:wrap=Block``; all of them
            are in docs/strategies.md.
        reduction: ``exact`` sums gradients along one fixed tree, so that the bits do not depend on the number of
            ranks; ``fast`` is torch's own all-reduce.
        precision: ``fp32``, ``bf16`` or ``fp16``, of the forward pass.
        checkpoint: directory for checkpoints. None: the run directory of ``lockstep run``, or none are saved.
        save_every: such as ``"100 steps"``, ``"5 min"`` or ``"1 epoch"``. None: only at the end and at a stop.
        keep: how many checkpoints are kept, the newest ones.
        best: such as ``"max accuracy"`` or ``"min val_loss"``: when that metric is better than ever, a checkpoint is
            saved, and kept beside the newest ones until there is a better one. Of loss, error and perplexity less is
            better, of accuracy, acc, f1, auc, iou and bleu more: there the name will do.
        clip_norm: greatest global norm of a step's gradient.
        sync_batchnorm: BatchNorm over the micro-batches that all ranks compute at once; the result depends on how many.
        compile: `torch.compile` each model.
        threads: CPU threads per rank; the bits depend on it. None: one on a CPU, else this rank's part of the CPUs.
        workers: loader processes per rank. None: chosen.
        bucket_mb: MiB of gradients exchanged at once. None: chosen.
        on_nan: what a loss or a gradient that is not finite leads to: ``stop`` ends the run with `NonFiniteError`
            before the parameters take it; ``warn`` says it and keeps the checkpoint from before it; ``ignore``.
        check_every: steps between two comparisons of what ranks hold, beside those at saves and at the first step of
            each pass.
        peer_timeout_s: how long a collective waits for the other ranks.
        rehearse: for a try with fewer GPUs than the real thing has: ranks may share one (slowly, through the CPU), and
            CPU threads stand in for them where a strategy needs some.

    Raises:
        SettingError: for a value that cannot be used.
        WorldError: if the environment describes no world, or the ranks do not meet.
    """

    def __init__(
        self,
        seed: int = _DEFAULTS.seed,
        strategy: str = _DEFAULTS.strategy,
        reduction: Literal["exact", "fast"] = _DEFAULTS.reduction,
        precision: Literal["fp32", "bf16", "fp16"] = _DEFAULTS.precision,
        checkpoint: str | os.PathLike[str] | None = None,
        save_every: str | None = None,
        keep: int = _DEFAULTS.keep,
        best: str | None = None,
        clip_norm: float | None = None,
        sync_batchnorm: bool = False,
        compile: bool = False,
        threads: int | None = None,
        workers: int | None = None,
        bucket_mb: float | None = None,
        on_nan: Literal["stop", "warn", "ignore"] = _DEFAULTS.on_nan,
        check_every: int = _DEFAULTS.check_every,
        peer_timeout_s: float = _DEFAULTS.peer_timeout_s,
        rehearse: bool = False,
    ) -> None:
        given = changed(locals())
        context = set_up(ResolvedSettings.resolve(given, os.environ), os.environ)
        self._context: Final = context
        self.settings: Final = context.resolved
        self.device: Final = context.device
        checkpointer, group = context.checkpointer, context.group
        warnings = NonFiniteWarnings(group, self.say, checkpointer.protect_newest)
        finite = NonFiniteChecks(context.settings.on_nan, group.rank, warnings.add, checkpointer.committed_step)
        self._train_step: Final = TrainStep(context, finite)
        self._loaders: Final = Loaders(context)
        self._log: Final = RunLog(group.leads, context.directory, self.say)
        snapshot = RunSnapshot(context)
        self._start: Final = TrainingStart(context, snapshot, self._log)
        self._registration: Final = Registration(context, self._start)
        end_of_step = EndOfStep(context, snapshot, self._loaders, finite, warnings)
        self._training: Final = TrainingLoop(context, self._loaders, self._start, self._train_step, end_of_step)
        self._evaluation: Final = EvaluationLoop(context, self._loaders, self._start, self._train_step, end_of_step)
        self._ranks: Final = RankOperations(group, context.world)
        self._shutdown: Final = Shutdown(
            context,
            self._loaders,
            self._start,
            self._train_step,
            end_of_step,
            self._log,
            self._training.end_open_pass,
        )
        seed_generators(seed_of(context.settings.seed, "init"))
        atexit.register(self._shutdown.warn_left_open)
        context.marker.set_phase("script")

    # ---- who and where -----------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This rank's number, from 0."""
        return self._context.group.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self._context.group.size

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which writes for all. Make no call of `Run` inside ``if run.leads`` but `say`."""
        return self._context.group.leads

    @property
    def progress(self) -> Progress:
        """Where the run is; another value after each step."""
        return self._context.position.progress

    @property
    def metrics(self) -> dict[str, float]:
        """The means of the last `train`, and of each `evaluate` since."""
        return self._context.position.metrics

    @property
    def counts(self) -> bool:
        """Whether the micro-batch in hand is to be counted on this rank, for sums of one's own.

        False for padding, which only makes this rank join the others' collectives, and where another rank of the same
        replica counts it. `measure` and `step` take care of that by themselves.
        """
        return self._context.metrics.samples > 0

    @property
    def micro_batch(self) -> MicroBatchPosition:
        """Where the micro-batch in hand stands in its step: its index, how many there are, how many samples it holds.

        Raises:
            UsageError: outside of the loops of `train` and `evaluate`.
        """
        position = self._context.metrics.position
        if position is None:
            raise UsageError("run.micro_batch outside of run.train(...) and run.evaluate(...): there is none in hand")
        return position

    @property
    def carry(self) -> CarriedState:
        """What the script carries from step to step, such as a hidden state: a dict for the micro-batch in hand.

        It belongs to the micro-batch's index in the step, not to the rank: what was put in comes back at the same index
        in the next step, on any number of ranks, and is saved. ``run.carry.get("hidden")`` is None the first time.
        """
        return self._context.carried

    @property
    def world(self) -> World:
        """This rank's numbers among all ranks, and the launcher that they come from."""
        return self._context.world

    def say(self, text: str) -> None:
        """Print ``text`` on the leader, as one line that does not disturb the progress view; nothing on other ranks."""
        self._context.reporter.say(text)

    # ---- what is trained ----------------------------------------------------------------------------------------

    def model(self, model: nn.Module, *, find_unused_parameters: bool = False, static_graph: bool = False) -> nn.Module:
        """``model`` on this rank's device, equal on all ranks and kept so; call what comes back. Collective.

        Under ``ddp`` and ``zero`` that is ``model`` itself.

        Args:
            model: with its parameters; their device is changed in place, but for a model that lies on several GPUs,
                the rank's own among them: its forward pass moves what it needs.
            find_unused_parameters: as DDP's: for models of which a forward pass may leave out parameters.
            static_graph: as DDP's: every forward pass uses the same parameters equally often. Those that are never
                used are found once, and what is checkpointed with ``use_reentrant=True`` may be called several times.

        Raises:
            MismatchError: if ranks made different models.
            UsageError: for a model that cannot be trained, by the name of what is in the way.
        """
        return self._registration.model(model, find_unused_parameters=find_unused_parameters, static_graph=static_graph)

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """``optimizer`` itself, from now on stepped by `step` and saved.

        Raises:
            UsageError: if it was made for parameters of no model that `model` was given, or cannot step here.
        """
        self._registration.optimizer(optimizer)
        return optimizer

    def scheduler(self, scheduler: T) -> T:
        """``scheduler`` itself, from now on stepped once after each step of its optimizer, and saved."""
        self._registration.scheduler(scheduler)
        return scheduler

    def keep(self, **objects: Stateful) -> None:
        """Save and restore each object, by its name, through its ``state_dict`` and ``load_state_dict``."""
        self._registration.keep(objects)

    def early_stopping(
        self, metric: str, patience: int, mode: Literal["min", "max"] = "min", min_delta: float = 0.0
    ) -> EarlyStopping:
        """Whether to stop because ``metric`` no longer improves: ``if stopper.should_stop(): break``.

        Its state is saved. A run that ends after it has said to stop is finished: resumed, it trains no further step,
        unless it is given more patience.

        Args:
            metric: a name in `metrics`.
            patience: how often in a row it may be measured without improving.
            mode: whether ``min`` or ``max`` is better.
            min_delta: what improves it by no more than this does not count.

        Raises:
            UsageError: for a value that cannot be used, a second one for the same metric, or after the training began.
        """
        return self._registration.early_stopping(metric, patience, mode, min_delta)

    def loader(
        self,
        dataset: Any,
        *,
        global_batch: int,
        micro_batch: int | None = None,
        shuffle: bool | None = None,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        workers: int | None = None,
    ) -> DataLoader[Any]:
        """This rank's share of ``dataset``, for `train` or `evaluate`. Collective.

        Args:
            dataset: samples by index, an iterable of samples, or tensors with one row per sample.
            global_batch: samples per step, over all ranks.
            micro_batch: samples of one forward pass: the unit that makes the result independent of the number of
                ranks, of which there may be as many as micro-batches. Large and few is fast. None: an eighth.
            shuffle: a new order each epoch. None: yes, except for iterables.
            drop_last: leave out the short step at the end of an epoch.
            collate_fn: as torch's.
            workers: loader processes; None: `settings`' or chosen.

        Raises:
            PlanError: if the sizes do not fit each other or the number of ranks.
            DataError: if the data set cannot be divided.
            MismatchError: if ranks hold data sets of different length.
        """
        return self._loaders.open(dataset, global_batch, micro_batch, shuffle, drop_last, collate_fn, workers)

    # ---- the loop -----------------------------------------------------------------------------------------------

    def epochs(self, epochs: int) -> Iterator[int]:
        """The numbers of the epochs still to do, from 0; the first is the one where the checkpoint stopped.

        Collective. At the end of each epoch a checkpoint is saved if ``save_every`` says so, and after the last one.
        """
        return self._training.epochs(epochs, sys._getframe(1).f_code)

    def steps(self, steps: int, every: int | None = None) -> Iterator[int]:
        """Stretches of training, ``steps`` in all: gives how many steps were done when each began. Collective.

        ::

            for step in run.steps(10_000, every=500):          # 0, 500, 1000, ...
                for images, labels in run.train(batches):      # 500 steps, through as many epochs as that takes
                    run.step(F.cross_entropy(model(images), labels))

        `train` goes through its data set again and again, each time in another order, until the stretch is over;
        `progress.epoch` counts that. The next stretch goes on where it ended. After a resume the first one is that in
        which the checkpoint was taken, with what was left of it.

        Args:
            steps: of the whole run.
            every: a stretch ends where the number of steps done divides by it. None: one stretch.

        Raises:
            UsageError: for a stretch in which no step was made.
        """
        return self._training.steps(steps, every, sys._getframe(1).f_code)

    def train(self, *loaders: DataLoader[Any]) -> MicroBatches:
        """This rank's micro-batches of a pass over a data set, on its device, each to be given to `step`. Collective.

        In `epochs` a pass visits each sample once; in `steps` it goes on until the stretch is over.

        Models are in training mode. Before each micro-batch the random generators are seeded for it, so dropout does
        not depend on the ranks. At the end, `metrics` holds the means of the pass: ``loss``, and what was measured.
        A loop that is left by ``break`` must be left on all ranks after the same step; then `metrics` stays as it was,
        and `train` with the same loader goes on at the next step, until the epoch is over. A rank that serves others
        gets no micro-batch, and continues after the loop when they do.

        Several passes may follow each other in one epoch, over several loaders or over one, each time in another order.
        Given several loaders, each step takes one step of each, and the body gets a tuple with a micro-batch of each,
        of which there must be equally many. In `epochs` the shortest ends the pass. A loss weighs what the first one's
        micro-batch holds; give ``count`` to say otherwise.

        Its length is this rank's number of micro-batches; that of a loader is the number of steps of an epoch.

        Raises:
            UsageError: if a micro-batch went by without `step`, for loaders whose steps differ, or for a second pass
                outside of `epochs` and `steps`.
        """
        return self._training.train(loaders, call_site(self._context.position.passes.caller))

    def backward(self, loss: Loss, *data: Any, count: Count = None, optimizer: Optimizers = None) -> bool:
        """The first half of `step`: after the step's last micro-batch, ``.grad`` holds the global batch's gradient.

        Still to be unscaled and clipped, which `update` does. Collective.

        Returns:
            Whether this was this rank's last micro-batch of the step, so that ``.grad`` is there.
        """
        return self._training.backward(loss, data, count, optimizer)

    def update(self, optimizer: Optimizers = None) -> bool:
        """The second half of `step`: on the step's last micro-batch unscale, clip and update; before that, nothing.

        Where a run has several optimizers that step apart, they all step when each of them has had its loss, or at the
        end of the loop's body: no loss sees what another one of the same step has changed.

        Returns:
            Whether the step is done, see `step`.
        """
        return self._training.update(optimizer)

    def step(self, loss: Loss, *data: Any, count: Count = None, optimizer: Optimizers = None) -> bool:
        """Train on one micro-batch: backward; on the step's last one also reduce, clip, update, and step schedulers.

        The gradient is that of the mean over the global batch: each micro-batch weighs what it holds. Collective.

        A step ends where the loop's body ends: only then is a checkpoint saved, or the run stopped.

        Args:
            loss: the mean over the micro-batch's items, a tensor of no dimension; or a function that gives it, as in
                ``run.step(F.cross_entropy, images, labels)``, for ``F.cross_entropy(model(images), labels)``: the form
                that every strategy understands, also those which compute forward and backward passes in an order of
                their own.
            data: for a function: the model's input and the targets, each one object or a tuple of several.
            count: how many items the mean is over, such as tokens; a number or a tensor. None: the samples.
            optimizer: whose parameters the loss is for, where the run has several; several share one backward pass.

        Returns:
            Whether the step is done on this rank: parameters, buffers and schedulers are those of the next one. True
            once a step on any number of ranks, so ``if run.step(loss): ema.update_parameters(model)`` is right on all.
            With several optimizers it is the call after which each of them has had its loss; where one of them is left
            out of a step, none, and the step is done at the end of the body.

        Raises:
            UsageError: outside of `train`, for a loss that is none, or for what would make the result depend on the
                number of ranks.
            NonFiniteError: for a loss or gradient that is not finite, if the run is to stop then.
            PeerLost: if another rank is gone.
        """
        self._training.backward(loss, data, count, optimizer)
        return self._training.update(optimizer)

    def evaluate(self, loader: DataLoader[Any]) -> MicroBatches:
        """This rank's micro-batches of a data set of which each sample comes once, over all ranks. Collective.

        Models are in evaluation mode and gradients are off. At the end, `metrics` holds what was measured, added to
        the means of the training before it.

        Also in the body of `train`, once the step is done, but not under strategies with ranks that serve others: ``if
        run.step(loss) and run.progress.step % 500 == 0:``. What is trained afterwards has the bits that it has without
        the evaluation. A run that is asked to stop meanwhile stops at the end of the body.

        Each rank gets one block of the data, in the order of ranks: what each appends to a list and `gather` brings
        together is in the data set's order, without ``shuffle``. Not so for a data set that can only be iterated. Its
        length is this rank's number of micro-batches.

        Raises:
            UsageError: in the middle of a step.
        """
        return MicroBatches(self._evaluation.evaluate(loader), lambda: self._loaders.evaluation_length(loader))

    def measure(self, *, count: Count = None, **values: object) -> None:
        """Add to the means over all samples: one number per sample, or one number for the micro-batch. No waiting.

        Inside `train` or `evaluate`; at their end `metrics` holds the means, the same bits for any number of ranks.

        Args:
            count: of how many items a value that is one number is the mean, such as tokens. None: of the samples.
            values: by the names that they will have in `metrics`. ``loss`` is what `step` measures in `train`.

        Raises:
            UsageError: outside of both, for a value that is no number, or a name that is taken.
        """
        self._context.metrics.measure(values, count)

    def log(self, **values: object) -> dict[str, object]:
        """Write ``values`` and `metrics` to the run's record, and tell the user; the leader does, others return.

        No collective: what it writes has been reduced. Also under ``if run.leads``.
        """
        everything: dict[str, object] = {**values, **self.metrics} | values
        # What stands in a turn before the pass that goes on runs again after a resume.
        if not self._start.resumes_within_turn:
            self._log.write(everything, self.progress)
        return everything

    # ---- between ranks ------------------------------------------------------------------------------------------

    def sum(self, value: T) -> T:
        """The sum of each rank's ``value``, a number or a tensor; that of truth values is a count. Collective."""
        return self._ranks.sum(value)

    def mean(self, value: T) -> T:
        """The mean of each rank's ``value``, a number or a tensor; each rank counts once. Collective."""
        return self._ranks.mean(value)

    def gather(self, value: T) -> list[T]:
        """Each rank's ``value``, by rank; anything that can be pickled. Collective."""
        return self._ranks.gather(value)

    def broadcast(self, value: T) -> T:
        """Rank 0's ``value``; anything that can be pickled. Collective."""
        return self._ranks.broadcast(value)

    def barrier(self) -> None:
        """Wait until all ranks have called it. Collective."""
        self._ranks.barrier()

    def leader_first(self) -> AbstractContextManager[None]:
        """The leader of each node runs the block first, the others when it is done; for downloads. Collective.

        The others wait without a deadline, and outside of any collective.
        """
        return self._ranks.leader_first()

    # ---- opening and closing ------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Save what is not saved yet, wait for the last checkpoint, disconnect from the other ranks. Collective.

        Raises:
            SystemExit: with code 74, on all ranks, if checkpoints were asked for and the last step is in none.
        """
        atexit.unregister(self._shutdown.warn_left_open)
        self._shutdown.close(error)
