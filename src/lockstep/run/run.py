"""`Run`: what a training script calls, and the loop that uses the rooms below."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeVar, cast

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from lockstep.batch import BatchPlan
from lockstep.checkpoint import Checkpoints
from lockstep.collectives import Group, elsewhere, open_group, owned
from lockstep.cpu_affinity import allotted_cpus
from lockstep.data import MicroBatch, MicroBatchLoader, Padding, choose_workers, is_in_memory, open_micro_batch_loader
from lockstep.errors import DataError, LockstepError, SettingError, UsageError
from lockstep.heartbeat import progress_marker
from lockstep.launch_contract import FRESH, RESUME, STOP_FILE
from lockstep.progress import Progress
from lockstep.report import MetricsFile
from lockstep.run.carry import Carry
from lockstep.run.divergence import DivergenceCheck
from lockstep.run.error_file import silence_interrupt, write_torchelastic_error
from lockstep.run.evaluation_buffers import EvaluationBuffers
from lockstep.run.identity import arguments_of, code_of_user, compare_ranks, optimizers_of
from lockstep.run.metrics import MetricMeans
from lockstep.run.micro_batches import MicroBatches
from lockstep.run.nonfinite import NonFiniteChecks
from lockstep.run.oom_advice import MemoryPeak, add_advice, free_bytes, staying_bytes, wanted_bytes
from lockstep.run.precision import Precision
from lockstep.run.progress_reporter import ProgressReporter, RunLength
from lockstep.run.registration import check_model, check_optimizer, check_scheduler
from lockstep.run.run_checkpoints import DirectoryCheckpointer, NoCheckpointer, RunCheckpointer
from lockstep.run.save_stop import Decision, SaveStopController
from lockstep.run.state import State, Stateful
from lockstep.run.stop_requests import JobDeadline, StopRequests
from lockstep.run.train_step import Count, CurrentMicroBatch, Loss, Optimizers, TrainStep
from lockstep.seeding import seed_generators, seed_of
from lockstep.settings import ResolvedSettings, Settings
from lockstep.strategies import (
    ChecksOptimizers,
    ComputesLoss,
    HasServerRanks,
    Strategy,
    StrategyContext,
    open_strategy,
    spans_gpus,
    split,
    synchronize_batchnorm,
)
from lockstep.world import World

T = TypeVar("T")
_DEFAULTS = Settings()
_FOR_EVER_S = 7 * 24 * 3600.0


class Run:
    """One training run, alone or as one rank of any launcher's world.

    Opening it finds out who this process is, opens the line to the other ranks, seeds everything random and chooses
    the device. All ranks make the same calls in the same order. Close it by ``with``.

    Every argument can be overridden from outside: ``lockstep run --precision bf16 train.py``, or
    ``LOCKSTEP_PRECISION=bf16``. `settings` tells each value and where it came from.

    Args:
        seed: of everything random: initial weights, order of samples, augmentation, dropout.
        strategy: how replicas are kept in step, with its options, such as ``ddp`` or ``fsdp:wrap=Block``; all of them
            are in docs/strategies.md.
        reduction: ``exact`` sums gradients along one fixed tree, so that the bits do not depend on the number of
            ranks; ``fast`` is torch's own all-reduce.
        precision: ``fp32``, ``bf16`` or ``fp16``, of the forward pass.
        checkpoint: directory for checkpoints. None: the run directory of ``lockstep run``, or none are saved.
        save_every: such as ``"100 steps"``, ``"5 min"`` or ``"1 epoch"``. None: only at the end and at a stop.
        keep: how many checkpoints are kept.
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
        given = {
            "seed": seed,
            "strategy": strategy,
            "reduction": reduction,
            "precision": precision,
            "checkpoint": None if checkpoint is None else os.fspath(checkpoint),
            "save_every": save_every,
            "keep": keep,
            "clip_norm": clip_norm,
            "sync_batchnorm": sync_batchnorm,
            "compile": compile,
            "threads": threads,
            "workers": workers,
            "bucket_mb": bucket_mb,
            "on_nan": on_nan,
            "check_every": check_every,
            "peer_timeout_s": peer_timeout_s,
            "rehearse": rehearse,
        }
        env = os.environ
        self.settings: Final = ResolvedSettings.gather(
            {n: v for n, v in given.items() if v != getattr(_DEFAULTS, n)}, env
        )
        told = self.settings.values
        self._marker: Final = progress_marker()
        self._marker.set_phase("start")
        self._world: Final = World.from_env(env)
        self.device: Final = _choose_device(self._world, told.rehearse)
        self._threads: Final = _choose_threads(told, self.device)
        torch.set_num_threads(self._threads)
        if self.device.type == "cuda" and told.reduction == "exact":
            _pin_kernels()
        self._end_of_job: Final = JobDeadline.from_env(env)
        self._teller: Final = ProgressReporter(self._world, env, self._end_of_job)
        env.update(self._world.rank_variables())
        self._group: Final[Group] = open_group(
            self._world, self.device, told.peer_timeout_s, shares_gpu=_share_gpus(self._world, told.rehearse)
        )
        self._group.check_equal("what Run(...) was told", sorted(self.settings.as_dict().items()))
        self._plan: BatchPlan | None = None
        self._precision: Final = Precision(told.precision, self.device)
        terms = StrategyContext(
            group=self._group,
            runs=self._run_of,
            exact=told.reduction == "exact",
            bucket_mb=told.bucket_mb,
            dtype=self._precision.dtype,
            rehearse=told.rehearse,
            free_bytes=lambda: free_bytes(self.device, self._world.local_size),
            say=self.say,
        )
        self._strategy: Final[Strategy] = self._open_strategy(told.strategy, terms)
        self._share: Final = self._strategy.share
        self._state: Final = State()
        self._finite: Final = NonFiniteChecks(told.on_nan, self._group.rank, self._warn_of_nan, self._last_good)
        self._stepper: Final = TrainStep(
            self._group, self._strategy, self._precision, self._state, told.clip_norm, self._finite
        )
        self._divergence: Final = DivergenceCheck(self._group)
        self._warnings: list[str] = []  # of this rank, which the leader is to say
        self._protects = False  # whether checkpoints from before the first warning are kept
        self._carry: Final = Carry(self._group, self._run_of, served=self._share.replicas != self._group.size)
        self._directory: Final = self._world.run_dir or told.checkpoint
        self._keeper: Final[RunCheckpointer] = self._open_keeper(told, self._world.run_dir)
        self._wishes: Final = StopRequests(Path(self._directory or ".", STOP_FILE), self._end_of_job)
        self._agenda: Final = SaveStopController(
            self._group, told.save_every, self._wishes.reason, self._end_of_job, peer_timeout_s=told.peer_timeout_s
        )
        self.progress = Progress()  #: where the run is; changes after each step
        self.metrics: dict[str, float] = {}  #: the means of the last `train`, and of each `evaluate` since
        self._feeds: Final[dict[int, MicroBatchLoader]] = {}
        self._measures: Final = {"train": MetricMeans(), "evaluate": MetricMeans()}
        self._where: Literal["outside", "train", "evaluate"] = "outside"
        self._samples_here = 0  # of the micro-batch in the user's hands; 0 for one that counts for nothing
        self._loss: torch.Tensor | None = None  # of the last micro-batch trained on
        self._scale = RunLength()
        self._began = False
        self._in_epochs = False
        self._passes = 0  # of `train` since the epoch began
        self._evaluations = 0  # since the last step
        self._is_left = False  # whether the epoch's loop was left by `break`, and the script has not left `epochs`
        self._step_to_end = 0  # a step whose loop was left before its body had ended; 0: none
        self._error_of_end: LockstepError | None = None  # met where a loop was left by `break`
        self._said_put_back = False  # of buffers that moved in an evaluation
        self._script: dict[str, Any] = {}  # code, arguments and optimizers, as the run began
        self._steps_here = 0  # done by this process
        self._resumed_within: dict[str, Any] | None = None  # the checkpoint of a resume within an epoch, until `train`
        self._leader_firsts = 0
        self._record: MetricsFile | None = None
        seed_generators(seed_of(told.seed, "init"))
        atexit.register(self._left_open)
        self._marker.set_phase("script")

    # ---- who and where -----------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This rank's number, from 0."""
        return self._group.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self._group.size

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which writes for all. Make no call of `Run` inside ``if run.leads`` but `say`."""
        return self._group.leads

    @property
    def counts(self) -> bool:
        """Whether the micro-batch in hand is to be counted on this rank, for sums of one's own.

        Not where it was handed out only so that this rank meets the others, or where another rank of the same replica
        counts it. `measure` and `step` see to that by themselves.
        """
        return self._samples_here > 0

    @property
    def carry(self) -> Carry:
        """What the script carries from step to step, such as a hidden state: a dict for the micro-batch in hand.

        It belongs to the micro-batch's place in the step, not to the rank: what was put in comes back at the same place
        in the next step, on any number of ranks, and is saved. ``run.carry.get("hidden")`` is None the first time.
        """
        return self._carry

    @property
    def world(self) -> World:
        """This rank's place, and the launcher that told it."""
        return self._world

    def say(self, text: str) -> None:
        """The leader tells the user ``text``, one line that does not tear the progress view."""
        self._teller.say(text)

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
        self._before_training("model")
        told = self.settings.values
        check_model(model, self._state)
        if not (spans_gpus(model) or isinstance(self._strategy, ComputesLoss)):
            model = model.to(self.device)
        if told.sync_batchnorm and self.world_size > 1:
            model = synchronize_batchnorm(model, self._group)
        adopted = self._strategy.setup_model(
            model, find_unused_parameters=find_unused_parameters, static_graph=static_graph
        )
        self._state.add_model(model, adopted)
        if told.compile:
            adopted.compile()
        return adopted

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """``optimizer`` itself, from now on stepped by `step` and saved.

        Raises:
            UsageError: if it was made for parameters of no model that `model` was given, or cannot step here.
        """
        self._before_training("optimizer")
        check_optimizer(optimizer, self._state)
        if isinstance(self._strategy, ChecksOptimizers):
            self._strategy.check_optimizer(optimizer)
        self._state.optimizers.append(optimizer)
        return optimizer

    def scheduler(self, scheduler: T) -> T:
        """``scheduler`` itself, from now on stepped once after each step of its optimizer, and saved."""
        self._before_training("scheduler")
        check_scheduler(scheduler)
        optimizer = getattr(scheduler, "optimizer", None)
        if not any(optimizer is o for o in self._state.optimizers):
            raise UsageError(
                f"{type(scheduler).__name__} belongs to no optimizer of this run; "
                "call run.optimizer(optimizer) first, and make the scheduler from what it returns"
            )
        self._state.schedulers.append(scheduler)
        return scheduler

    def keep(self, **objects: Stateful) -> None:
        """Save and restore each object, by its name, through its ``state_dict`` and ``load_state_dict``."""
        self._before_training("keep")
        for name, value in objects.items():
            self._state.keep(name, value)

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
        told = self.settings.values
        share = self._share
        plan = BatchPlan.of(global_batch, micro_batch, share.replicas)
        if workers is None:
            workers = told.workers
        if workers is None:
            workers = choose_workers(_allotted_cpus(), in_memory=is_in_memory(dataset))
        feed = open_micro_batch_loader(
            dataset,
            plan,
            share.replica or 0,
            seed=told.seed,
            shuffle=shuffle,
            drop_last=drop_last,
            collate_fn=collate_fn,
            workers=workers,
            pin_memory=self.device.type == "cuda",
            agree=lambda counts: self._group.gather_objects(counts, "counts of a stream"),
        )
        if feed.length is None and share.replicas != self.world_size:
            raise DataError(
                f"{type(dataset).__name__} can only be iterated, and strategy={told.strategy!r} has ranks that read "
                "nothing; give a data set with __getitem__ and __len__, or use ddp"
            )
        self._group.check_equal("length and plan of a data set", (feed.length, str(plan)))
        for note in feed.notes:
            self.say(note)
        self._feeds[id(feed.loader)] = feed
        return feed.loader

    # ---- the loop -----------------------------------------------------------------------------------------------

    def epochs(self, epochs: int) -> Iterator[int]:
        """The numbers of the epochs still to do, from 0; the first is the one where the checkpoint stopped.

        All ranks. At the end of each epoch the cadence of checkpoints is asked; at the end of all, one is saved.
        """
        self._begin()
        self._scale.epochs = epochs
        self._in_epochs = True
        seed = self.settings.values.seed
        while self.progress.epoch < epochs:
            self._passes = 0
            seed_generators(seed_of(seed, "epoch", self.progress.epoch))
            yield self.progress.epoch
            # A step whose loop was left by `break` ends in the next epoch: a resume does not go on in this one.
            self.progress, self._is_left = self.progress.after_epoch(), False
            self._end_step()
            self._do(self._agenda.after_epoch(self.progress.epoch))
        self._in_epochs = False
        self._strategy.finish_training()

    def train(self, loader: DataLoader[Any]) -> MicroBatches:
        """This rank's micro-batches of the current epoch, on its device, each to be given to `step`. Collective.

        Models are in training mode. Before each micro-batch the random generators are seeded for it, so dropout does
        not depend on the ranks. At the end, `metrics` holds the means of the epoch: ``loss``, and what was measured.
        Whoever leaves the loop by ``break`` does so on all ranks after the same step; then `metrics` stays as it was.
        A rank that serves others gets no micro-batch, and goes on after the loop when they do.

        Its length is this rank's number of micro-batches; that of ``loader`` is the number of steps of an epoch.

        Raises:
            UsageError: if a micro-batch went by without `step`, or for a second pass in one epoch.
        """
        first_step = self.progress.epoch_step
        return MicroBatches(self._train(loader), lambda: self._length_of(loader, "train", first_step))

    def _train(self, loader: DataLoader[Any]) -> Generator[Any]:
        self._begin()
        feed = self._feed_of(loader, "train")
        if self._passes:
            raise UsageError(
                "a second run.train(...) in one epoch: give both data sets to one loader, as ConcatDataset"
                if self._in_epochs
                else "a second run.train(...) outside of epochs: write `for epoch in run.epochs(n):` around it"
            )
        self._end_step()
        self._passes += 1
        self._set_plan(feed)
        if self._resumed_within is not None:
            self._restore(self._resumed_within)
            self._resumed_within = None
            self._evaluations = 0  # those which the epoch began with came before this step
            if self._is_left:
                return
        if not self.progress.epoch_step:
            self._measures["train"] = MetricMeans()  # what an epoch that was left by `break` measured is not this one's
        # A checkpoint or the script may have filled buffers since, such as with what was trained elsewhere.
        self._strategy.resync()
        self._stepper.new_pass()
        for model in self._state.models:
            if not model.training:
                model.train()
        told, stepper, progress = self.settings.values, self._stepper, self.progress
        self._where = "train"
        self._marker.set_phase("data")
        first = self._steps_here
        try:
            if self._share.replica is None:
                self._serve(feed)
            padding = self._padding("train")
            for micro in self._mine(feed.epoch(progress.epoch, progress.epoch_step, padding=padding)):
                data = _moved(micro.data, self.device)
                self._samples_here = 0 if micro.is_padding or not self._share.counts else micro.samples
                compares = self._steps_here < 2 or self._steps_here % told.check_every == 0
                work = stepper.begin(micro, self.progress.step, compare=compares)
                self._carry.micro_batch_begins(micro)
                seed_generators(seed_of(told.seed, "step", self.progress.step, micro.index))
                self._marker.set_phase("forward")
                with self._precision.forward():
                    yield data
                if stepper.end(work):
                    self._count_step(work)
                    self._carry.step_is_done()
                    self._end_step(first=first)
                self._marker.set_phase("data")
            whole = stepper.part(whole=True)
        except GeneratorExit:
            if stepper.work is not None:  # else the run is closed
                stepper.part(whole=False)
            self._is_left = self._in_epochs
            raise
        finally:
            self._leave()
        if whole:
            # Nothing was measured where a checkpoint was taken between the epoch's last step and its end.
            self.metrics = self._measures["train"].reduce(self._group) or self.metrics
            self._say_warnings()

    def backward(self, loss: Loss, *data: Any, count: Count = None, optimizer: Optimizers = None) -> bool:
        """The first half of `step`: after the step's last micro-batch, ``.grad`` holds the global batch's gradient.

        Still to be unscaled and clipped, which `update` does. Collective.

        Returns:
            Whether this was this rank's last micro-batch of the step, so that ``.grad`` is there.
        """
        for value, items in self._stepper.backward(loss, data, count, optimizer):
            self._loss = value
            if self._share.counts:
                self._measures["train"].add_mean("loss", value, items)
        return self._stepper.work is not None and self._stepper.work.turn.last

    def update(self, optimizer: Optimizers = None) -> bool:
        """The second half of `step`: on the step's last micro-batch unscale, clip and update; before that, nothing.

        Where a run has several optimizers that step apart, they all step when each of them has had its loss, or at the
        end of the loop's body: no loss sees what another one of the same step has changed.

        Returns:
            Whether the step is done, see `step`.
        """
        done = self._stepper.update(optimizer)
        if done and self._stepper.work is not None:
            self._count_step(self._stepper.work)
        return done

    def step(self, loss: Loss, *data: Any, count: Count = None, optimizer: Optimizers = None) -> bool:
        """Train on one micro-batch: backward; on the step's last one also reduce, clip, update, and step schedulers.

        The gradient is that of the mean over the global batch: each micro-batch weighs what it holds. Collective.

        A step ends where the loop's body ends: a checkpoint is saved, and a stop obeyed, after all that the body does.

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
            UsageError: outside of `train`, for a loss that is none, or what would tell how many ranks there are.
            NonFiniteError: for a loss or gradient that is not finite, if the run is to stop then.
            PeerLost: if another rank is gone.
        """
        self.backward(loss, *data, count=count, optimizer=optimizer)
        return self.update(optimizer)

    def evaluate(self, loader: DataLoader[Any]) -> MicroBatches:
        """This rank's micro-batches of a data set of which each sample comes once, over all ranks. Collective.

        Models are in evaluation mode and gradients are off. At the end, `metrics` holds what was measured, added to
        the means of the training before it.

        Each rank gets one block of the data, in the order of ranks: what each appends to a list and `gather` brings
        together is in the data set's order, without ``shuffle``. Not so for a data set that can only be iterated. Its
        length is this rank's number of micro-batches.
        """
        return MicroBatches(self._evaluate(loader), lambda: self._length_of(loader, "evaluate"))

    def _evaluate(self, loader: DataLoader[Any]) -> Generator[Any]:
        self._begin()
        feed = self._feed_of(loader, "evaluate")
        self._end_step()
        modes = [(module, module.training) for model in self._state.models for module in model.modules()]
        for model in self._state.models:
            model.eval()
        self._measures["evaluate"] = MetricMeans()
        self._where = "evaluate"
        self._marker.set_phase("evaluate")
        self._show("evaluating")
        key = (self.settings.values.seed, "evaluate", self.progress.step, self._evaluations)
        self._evaluations += 1
        padding = self._padding("evaluate")
        # Ranks that tell each other something on the way leave together or not at all.
        may_hurry = feed.length is not None and padding != "even" and not isinstance(self._strategy, ComputesLoss)
        try:
            with self._strategy.evaluating(), contextlib.ExitStack() as at_end:
                buffers = EvaluationBuffers(self._state.models)
                at_end.callback(self._say_put_back, buffers)
                for micro in self._mine(feed.evaluation(padding=padding)):
                    self._samples_here = 0 if micro.is_padding or not self._share.counts else micro.samples
                    seed_generators(seed_of(*key, micro.step, micro.index))
                    self._marker.set_phase("evaluate")
                    with torch.no_grad(), self._precision.forward():
                        yield _moved(micro.data, self.device)
                    buffers.put_back()
                    if may_hurry and self._agenda.stop_pending():
                        break
        finally:
            self._where = "outside"
            self._marker.set_phase("script")
            for module, training in modes:
                module.training = training
            self._draw_alike()
        if self._directory:
            self._do(self._agenda.after_evaluation())
        self.metrics = self.metrics | self._measures["evaluate"].reduce(self._group)
        self._show("training")

    def measure(self, *, count: Count = None, **values: object) -> None:
        """Add to the means over all samples: one number per sample, or one number for the micro-batch. No waiting.

        Inside `train` or `evaluate`; at their end `metrics` holds the means, the same bits for any number of ranks.

        Args:
            count: of how many items a value that is one number is the mean, such as tokens. None: of the samples.
            values: by the names that they will have in `metrics`. ``loss`` is what `step` measures in `train`.

        Raises:
            UsageError: outside of both, for a value that is no number, or a name that is taken.
        """
        if self._where == "outside":
            raise UsageError("run.measure(...) outside of run.train(...) and run.evaluate(...): there are no samples")
        if self._where == "train" and "loss" in values:
            raise UsageError(
                "run.measure(loss=...) in run.train(...): run.step(loss) measures its loss under that name; give "
                "yours another, such as run.measure(my_loss=...)"
            )
        if count is not None and not values:
            raise UsageError("run.measure(count=...) says how many items a value is the mean of; name the value, too")
        if not self._samples_here:
            return
        for name, value in values.items():
            self._measures[self._where].add(name, value, self._samples_here, count)

    def log(self, **values: object) -> dict[str, object]:
        """Write ``values`` and `metrics` to the run's record, and tell the user; the leader does, others return.

        No collective: what it writes has been reduced. Also under ``if run.leads``.
        """
        everything: dict[str, object] = {**values, **self.metrics} | values
        # What stands between the beginning of an epoch and its training runs again after a resume within the epoch.
        if self.leads and self._resumed_within is None:
            if self._record is not None:
                self._record.write(self.progress.step, self.progress.epoch, everything)
            words = (f"{n} {v:.4g}" if isinstance(v, float) else f"{n} {v}" for n, v in everything.items())
            self.say(f"step {self.progress.step}: " + ", ".join(words))
        return everything

    # ---- between ranks ------------------------------------------------------------------------------------------

    def sum(self, value: T) -> T:
        """The sum of each rank's ``value``, a number or a tensor; that of truth values is a count. Collective."""
        return self._reduce(value, "sum")

    def mean(self, value: T) -> T:
        """The mean of each rank's ``value``, a number or a tensor. All ranks; each counts once."""
        total = self._reduce(value, "mean")
        return cast(T, total / self.world_size)  # type: ignore[operator]

    def gather(self, value: T) -> list[T]:
        """Each rank's ``value``, by rank; anything that can be pickled. Collective."""
        return self._group.gather_objects(value, f"gather at {_place()}")

    def broadcast(self, value: T) -> T:
        """Rank 0's ``value``; anything that can be pickled. Collective."""
        return self._group.broadcast_object(value, f"broadcast at {_place()}")

    def barrier(self) -> None:
        """Returns when all ranks have come. Collective."""
        self._group.barrier(f"barrier at {_place()}")

    @contextlib.contextmanager
    def leader_first(self) -> Iterator[None]:
        """The leader of each node runs the block first, the others when it is done; for downloads. Collective.

        The others wait without a deadline, and outside of any collective.
        """
        self._leader_firsts += 1
        key = f"{self._leader_firsts}/{self._world.node_rank}"
        board = self._group.store("leader-first")
        if self._world.leads_node:
            try:
                yield
            finally:
                failed = sys.exception() is not None
                board.set(key, "failed" if failed else "done")
        else:
            if board.get(key, _FOR_EVER_S) == "failed":
                raise LockstepError("the leader of this node failed inside run.leader_first(); see its error")
            yield

    # ---- opening and closing ------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Save what is not saved yet, wait for the last checkpoint, close the line. Collective.

        Raises:
            SystemExit: with code 74, on all ranks, if checkpoints were asked for and the last step is in none.
        """
        atexit.unregister(self._left_open)
        self._stepper.work = None
        self._stepper.checks.close()
        self._marker.set_phase("exit")
        # sys.exit() without a complaint is an end like any other.
        ends_well = kind is None or (isinstance(error, SystemExit) and not error.code)
        try:
            if ends_well:
                self._finish()
            else:
                self._keeper.abandon()
                self._tell_of(error)
        finally:
            self._agenda.close()
            self._wishes.unlisten()
            for feed in self._feeds.values():
                feed.close()
            self._teller.close()
            if self._record is not None:
                self._record.close()
            self._keeper.release()
            # After an error, a GPU may wait for what never comes.
            if kind is None or kind is SystemExit or self.device.type == "cpu":
                try:
                    self._strategy.close()
                finally:
                    self._group.close()
            self._marker.set_phase("script")
            self._marker.set_step(-1)

    def _left_open(self) -> None:
        self.say(
            f"the run was not closed, so what it trained up to step {self.progress.step} may not be saved; "
            "write: with lockstep.Run(...) as run:"
        )

    def _finish(self) -> None:
        if self._began:
            self._is_left = False  # to be gone on with, if the script leaves `epochs` and the run in it
            self._end_step()
            self._save()
            if not self._directory:
                self._compare_ranks()
            self._say_warnings()
        self._keeper.close()
        missing = self._began and not self._keeper.has(self.progress.step)
        self._show("unsaved" if missing else "done")
        self._part()
        if missing:
            self._teller.close()  # what is missing is the last line
            self._keeper.leave_without(self.progress.step)

    def _part_stopped(self) -> None:
        self._show("stopped")
        self._part()

    def _part(self) -> None:
        """Nothing that this rank keeps for the others, such as the store, is needed any more. Collective."""
        self._agenda.close()
        self._group.barrier("end of the run")

    def _tell_of(self, error: BaseException | None) -> None:
        """Whoever started the run learns why it ends; who interrupted it knows."""
        if isinstance(error, KeyboardInterrupt):
            step, saved = self.progress.step, self._keeper.committed_step()
            self.say(
                f"interrupted at step {step}; " + ("nothing is saved" if saved is None else f"saved: step {saved}")
            )
            silence_interrupt()
        elif isinstance(error, Exception):
            if isinstance(error, torch.OutOfMemoryError):
                self._advise(error)
            write_torchelastic_error(error, os.environ)

    def _advise(self, error: torch.OutOfMemoryError) -> None:
        """``error`` says, too, which settings would fit."""
        if self._plan is None or self.device.type != "cuda":
            return
        parameters = [p for model in self._state.models for p in model.parameters()]
        states = [v for o in self._state.optimizers for s in o.state.values() for v in s.values()]
        kept = [*parameters, *(v for v in states if isinstance(v, torch.Tensor))]
        peak = MemoryPeak(
            peak=torch.cuda.max_memory_allocated(self.device) + wanted_bytes(error),
            stays=staying_bytes(kept, [p for p in parameters if p.requires_grad]),
            total=torch.cuda.get_device_properties(self.device).total_memory,
            micro_batch=self._plan.micro_batch,
            global_batch=self._plan.global_batch,
            precision=self.settings.values.precision,
        )
        add_advice(error, peak)

    # ---- within -------------------------------------------------------------------------------------------------

    def _open_strategy(self, word: str, terms: StrategyContext) -> Strategy:
        try:
            return open_strategy(word, terms)
        except SettingError:
            self._group.close()  # the process may open a run with another strategy
            raise

    def _open_keeper(self, told: Settings, run_dir: str | None) -> RunCheckpointer:
        root = told.checkpoint or (run_dir and Path(run_dir, "checkpoints"))
        if root:
            checkpoints = Checkpoints(
                Path(root), self._group, keep=told.keep, say=self.say, peer_timeout_s=told.peer_timeout_s
            )
            try:
                # A run directory names a launcher's job: only one launcher at a time works in it.
                checkpoints.claim(run_dir or "", self._world.generation)
            except SettingError:
                self._strategy.close()
                self._group.close()  # the process may open a run in another directory
                raise
            return DirectoryCheckpointer(checkpoints, self.say, self._end_of_job)
        if os.environ.get(RESUME) == "1" or told.save_every is not None:
            raise SettingError(
                "there is no directory for checkpoints to save to or to resume from; "
                "give Run(checkpoint=...), or start the script with lockstep run"
            )
        return NoCheckpointer()

    def _run_of(self, rank: int, micro_batches: int) -> range:
        assert self._plan is not None  # the strategy reduces nothing outside of `train`
        return self._plan.run(rank, micro_batches)

    def _padding(self, where: str) -> Padding:
        if self._strategy.meets_in_forward:
            return "even"
        return "one" if where == "train" and self.world_size > 1 else "none"

    def _mine(self, micro_batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """This rank's ``micro_batches``; a rank that serves others has none."""
        return iter(()) if self._share.replica is None else micro_batches

    def _length_of(self, loader: DataLoader[Any], where: str, first_step: int = 0) -> int | None:
        """How many micro-batches a pass hands out here; None for a stream that does not know its length."""
        feed = self._known(loader, where)
        if self._share.replica is None:
            return 0
        if where == "train":
            return feed.micro_batches(first_step, padding=self._padding(where))
        return feed.micro_batches_of_evaluation(padding=self._padding(where))

    def _serve(self, feed: MicroBatchLoader) -> None:
        """The rest of the epoch's steps, or those that the others make; for a rank without micro-batches of its own."""
        assert feed.length is not None
        plan, steps, first = feed.plan, feed.steps_per_epoch or 0, self._steps_here
        for step in range(self.progress.epoch_step, steps):
            samples = min(plan.global_batch, feed.length - step * plan.global_batch)
            micro = MicroBatch(None, step, 0, len(plan.sizes(samples)), 0, samples, last=True, is_padding=True)
            work = self._stepper.begin(micro, self.progress.step, compare=False)
            if not self._stepper.serve(work):
                break
            self._stepper.end(work)
            self._count_step(work)
            self._end_step(first=first)

    def _set_plan(self, feed: MicroBatchLoader) -> None:
        if self._plan not in (None, feed.plan):
            raise UsageError(f"run.train(...) with two plans: {self._plan} before, {feed.plan} now; keep to one")
        if self.settings.values.sync_batchnorm and self.world_size > 1:
            _refuse_uneven(feed, self.world_size)
        is_first, self._plan = self._plan is None, feed.plan
        self._scale.steps_per_epoch, self._scale.samples_per_epoch = feed.steps_per_epoch, feed.length
        if is_first:
            self.say(str(feed.plan))
            self._keeper.compare(self._data_identity(), mid_epoch=self.progress.epoch_step > 0)

    def _before_training(self, what: str) -> None:
        if self._began:
            raise UsageError(f"run.{what}(...) after the training began: say it before run.epochs(...)")

    def _feed_of(self, loader: DataLoader[Any], where: str) -> MicroBatchLoader:
        if self._where != "outside":
            raise UsageError(f"run.{where}(...) inside of run.{self._where}(...): finish that loop first")
        return self._known(loader, where)

    def _known(self, loader: DataLoader[Any], where: str) -> MicroBatchLoader:
        feed = self._feeds.get(id(loader))
        if feed is None:
            raise UsageError(
                f"run.{where}({type(loader).__name__}): give what run.loader(dataset, global_batch=...) returned"
            )
        return feed

    def _begin(self) -> None:
        """Before the first epoch: everything is registered, so a checkpoint can be loaded."""
        if self._began:
            return
        if not self._state.models:
            raise UsageError("no model yet: call `model = run.model(model)` before the loop")
        self._began = True
        self._script = {
            "code": code_of_user(),
            "arguments": arguments_of(sys.argv[1:]),
            "optimizers": optimizers_of(self._state.optimizers),
        }
        compare_ranks(self._group, self._script)
        restarted = self._world.generation > 0
        tree = self._keeper.resume(
            asked=restarted or os.environ.get(RESUME) == "1", fresh=os.environ.get(FRESH) == "1" and not restarted
        )
        if tree is not None:
            self._keeper.compare(self._script, mid_epoch=False)
            if changed := self._restore(tree):
                self.say(
                    f"{', '.join(changed[:3])}{f' and {len(changed) - 3} more' if len(changed) > 3 else ''} "
                    "learned, or did not, when the checkpoint was saved, and the script has it otherwise: the "
                    "checkpoint holds"
                )
            self.progress = Progress.from_dict(tree["progress"])
            self._resumed_within = tree if self.progress.epoch_step else None
            self._evaluations = 0 if self._resumed_within else tree.get("evaluations", 0)
            self._is_left = tree["is_left"]
        if self.leads and self._directory:
            self._record = MetricsFile(Path(self._directory, "metrics.jsonl"), step=self.progress.step, say=self.say)
        if self._directory:
            # Not before: while there is nothing to save, signals do what they do without Lockstep.
            if threading.current_thread() is threading.main_thread():
                self._wishes.listen()
            self._agenda.open()

    def _restore(self, tree: dict[str, Any]) -> list[str]:
        """Put back what a checkpoint holds, but for the position; see `State.load`."""
        changed = self._state.load(tree, self._strategy)
        saved_by, state = tree.get("strategy", ("", {}))
        self._strategy.load_state_dict(state if saved_by == split(self.settings.values.strategy)[0] else {})
        self._precision.load_state_dict(tree["scaler"])
        self._measures["train"].load(tree["measures"], self._group)
        self._carry.load(tree["carry"])
        self.metrics = dict(tree.get("metrics", {}))
        return changed

    def _count_step(self, work: CurrentMicroBatch) -> None:
        """A step is done; its end comes when the body of the loop is over. Once for each step."""
        if self._step_to_end:
            return
        self.progress = self.progress.after_step(work.micro.step_samples)
        self._step_to_end = self.progress.step
        self._steps_here += 1
        self._evaluations = 0
        # In what is left of the body ranks stand at different micro-batches, and are to draw alike.
        self._draw_alike("body")
        self._marker.set_step(self.progress.step)

    def _end_step(self, *, first: int | None = None) -> None:
        """The body in which a step was done is over: what belongs to the step's end comes now. Collective.

        Args:
            first: how many steps this process had done when the pass began; ranks are compared after its first one.
        """
        error, self._error_of_end = self._error_of_end, None
        if error is not None:
            raise error
        step, self._step_to_end = self._step_to_end, 0
        if not step:
            return
        self._finite.step_ended()
        decision = self._agenda.after_step(step)
        is_first = first is not None and self._steps_here == first + 1
        if (is_first or self._steps_here % self.settings.values.check_every == 0) and not decision.saves:
            self._compare_ranks()
        self._do(decision)
        self._teller.step(self.progress, self._scale, self._loss, self._keeper.committed_step)

    def _leave(self) -> None:
        """The loop of `train` is left: at its end, by ``break``, or by an error that `__exit__` has seen.

        By ``break`` it may be left within the body in which a step was done. Its end comes later, where an error or a
        stop can be raised: here, Python would only print it. A step of which a loss is missing is forgotten: this may
        be an error on this rank alone, where no other rank would come to meet it.
        """
        work, self._where = self._stepper.work, "outside"
        self._marker.set_phase("script")
        try:
            if work is not None and work.complete and not work.ended:
                self._stepper.end(work)
                self._carry.step_is_done()
        except LockstepError as error:
            self._error_of_end = error
        finally:
            self._stepper.leave()
            self._carry.forget_step()
            self._draw_alike()

    def _draw_alike(self, where: Literal["body", "outside"] = "outside") -> None:
        """Random numbers that the script draws from here on are the same on all ranks."""
        seed_generators(seed_of(self.settings.values.seed, where, self.progress.step, self._evaluations))

    def _say_put_back(self, buffers: EvaluationBuffers) -> None:
        buffers.put_back(by_value=True)
        if buffers.moved and not self._said_put_back:
            self._said_put_back = True
            self.say(
                f"run.evaluate(...): the model changes {', '.join(sorted(buffers.moved)[:3])} in evaluation, by "
                "whatever samples a rank has; put back after each micro-batch"
            )

    def _do(self, decision: Decision) -> None:
        if decision.saves:
            self._save()
        if decision.stop:
            try:
                self._keeper.stop(self.progress.step, decision.stop, self._part_stopped)
            finally:
                if self.leads:
                    self._wishes.acknowledge()

    def _save(self) -> None:
        before = self._marker.set_phase("save")
        self._finite.settle()
        self._say_warnings()
        self._keeper.save(self._compared_tree, self.progress.step, self._identity())
        self._agenda.saved()
        self._marker.set_phase(before)

    def _compared_tree(self) -> dict[str, Any]:
        tree = self._tree()
        self._divergence.compare(tree, self.progress.step)
        return tree

    def _compare_ranks(self) -> None:
        """Ranks that should hold the same do, or the run ends here. Collective."""
        if self._share.in_step and self.world_size > 1:
            self._divergence.compare(self._objects(), self.progress.step)

    def _tree(self) -> dict[str, Any]:
        return self._objects() | {
            "strategy": (split(self.settings.values.strategy)[0], self._strategy.state_dict()),
            "progress": self.progress.as_dict(),
            "scaler": self._precision.state_dict(),
            "measures": self._measures["train"].state(self._group),
            "metrics": self.metrics,
            "evaluations": self._evaluations,
            "carry": self._carry.state(),
            "is_left": self._is_left,
        }

    def _objects(self) -> dict[str, Any]:
        """The state of models, optimizers, schedulers and of what is kept. Collective."""
        tree = self._state.tree(self._strategy)
        if isinstance(self._strategy, HasServerRanks) or not self._share.in_step:
            # On ranks that serve, the script's own objects have not moved; on ranks that step by themselves, each has
            # moved otherwise. A checkpoint holds the leader's, not a mixture.
            mine = {name: tree[name] for name in ("kept", "kept_transient", "transient")}
            outline = self._group.broadcast_object(elsewhere(mine), "what is kept")
            tree |= owned(mine) if self.leads else outline
        if isinstance(self._strategy, ComputesLoss):
            moved = self._group.gather_objects([*tree["transient"][0]], "buffers that are in no state_dict")
            for name in sorted({name for names in moved for name in names}):
                raise UsageError(
                    f"strategy pipeline: forward passes move the buffer {name}, which has persistent=False, and only "
                    "the ranks of its stage know it; register it with persistent=True"
                )
        return tree

    def _identity(self) -> dict[str, Any]:
        """What the bits depend on, as far as it can be known."""
        return self._script | self._data_identity()

    def _data_identity(self) -> dict[str, Any]:
        told, on_cpu = self.settings.values, self.device.type == "cpu"
        return {
            "sizes": [self._plan.global_batch, self._plan.micro_batch] if self._plan else None,
            "samples": self._scale.samples_per_epoch,
            "lengths": [feed.length for feed in self._feeds.values()],
            "seed": told.seed,
            "reduction": told.reduction,
            "precision": told.precision,
            "clip_norm": told.clip_norm,
            "compile": told.compile,
            "threads": self._threads,
            "device": "cpu" if on_cpu else torch.cuda.get_device_name(self.device),
            "torch": torch.__version__,
        }

    def _last_good(self) -> int | None:
        return self._keeper.committed_step()

    def _protect(self) -> None:
        """Keep the checkpoints from before the first thing that was not finite; those after it are not better."""
        if not self._protects:
            self._protects = True
            self._keeper.protect_newest()

    def _warn_of_nan(self, words: str) -> None:
        self._protect()
        if self.leads:
            self.say(words)
        else:
            self._warnings.append(words)

    def _say_warnings(self) -> None:
        """What other ranks have found out is said by the leader. Collective."""
        if self.settings.values.on_nan == "warn":
            warnings, self._warnings = self._warnings, []
            told = [words for rank in self._group.gather_objects(warnings, "warnings") for words in rank]
            if told:
                self._protect()  # on the leader, too, which removes older ones; no save came in between
            for words in told:
                self.say(words)

    def _show(self, state: Literal["training", "evaluating", "saving", "done", "unsaved", "stopped"]) -> None:
        self._teller.show(state, self.progress, self._scale, self._loss, self._keeper.committed_step)

    def _reduce(self, value: T, what: str) -> T:
        place = f"{what} at {_place(3)}"
        if isinstance(value, torch.Tensor):
            shapes = self._group.gather_objects((tuple(value.shape), str(value.dtype)), place)
            if len(set(shapes)) > 1:
                raise UsageError(f"{place}: ranks give tensors of different shape or type: {shapes}")
            is_whole = not (value.is_floating_point() or value.is_complex())
            return cast(T, self._group.sum_tensor(value.long() if is_whole else value, place))
        # Small integer types of NumPy's would wrap around.
        if isinstance(value, np.generic):
            value = value.item()
        elif isinstance(value, np.ndarray) and value.dtype.kind in "biu" and value.itemsize < 8:
            value = cast(T, value.astype(np.int64))
        return cast(T, sum(self._group.gather_objects(value, place)))


def _choose_threads(told: Settings, device: torch.device) -> int:
    if told.threads is not None:
        return told.threads
    # On a CPU the bits depend on the threads of a rank, so their number must not depend on the number of ranks.
    if device.type == "cpu" and told.reduction == "exact":
        return 1
    return _allotted_cpus()


def _allotted_cpus() -> int:
    """This rank's part of the CPUs that the job may keep busy on this node."""
    cpu_max = Path("/sys/fs/cgroup/cpu.max")
    return allotted_cpus(
        os.environ,
        affinity=len(os.sched_getaffinity(0)),
        cpu_max=cpu_max.read_text() if cpu_max.exists() else "max",
    )


def _refuse_uneven(feed: MicroBatchLoader, ranks: int) -> None:
    """SyncBatchNorm meets the other ranks in each forward pass: all must make equally many."""
    length = feed.length or 0
    is_short = length % feed.plan.global_batch and feed.steps_per_epoch != length // feed.plan.global_batch
    if feed.plan.micro_batches % ranks or is_short:
        raise UsageError(
            f"sync_batchnorm=True needs ranks that hold equally many micro-batches in every step: {feed.plan}; "
            "choose sizes that divide, and drop_last=True"
        )


def _share_gpus(world: World, rehearse: bool) -> bool:
    """Whether ranks share GPUs, on purpose."""
    return rehearse and torch.cuda.is_available() and world.local_size > torch.cuda.device_count()


def _choose_device(world: World, rehearse: bool) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    devices = torch.cuda.device_count()
    # Where a scheduler shows each task one GPU only, that one is number 0 for all of them.
    place = 0 if devices == 1 else world.local_rank
    if _share_gpus(world, rehearse):
        place %= devices
    if place >= devices:
        raise SettingError(
            f"rank {world.rank} is number {world.local_rank} on this machine, which has {devices} GPUs; "
            f"start at most {devices} ranks here, share them with --rehearse, or hide them with CUDA_VISIBLE_DEVICES="
        )
    device = torch.device("cuda", place)
    torch.cuda.set_device(device)
    return device


def _pin_kernels() -> None:
    """Kernels that give the same bits each time; torch warns where it knows of none."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True, warn_only=True)


def _moved(data: Any, device: torch.device) -> Any:
    """``data`` with its tensors on ``device``; from page-locked memory without waiting."""
    if device.type == "cpu":
        return data
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=True)
    if hasattr(data, "to"):  # also mappings that are more than a dict, such as a tokenizer's
        return data.to(device)
    if isinstance(data, Mapping):
        return {key: _moved(value, device) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(_moved(value, device) for value in data))
    if isinstance(data, list | tuple):
        return type(data)(_moved(value, device) for value in data)
    return data


def _place(above: int = 2) -> str:
    """The user's file and line that called."""
    frame = sys._getframe(above)
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
