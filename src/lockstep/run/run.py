"""The interface of a training script, `Run`. Each method is one call of the module of this package that does the work.

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

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal, Self, TypeVar

import torch
from torch import nn

from lockstep.batch import MicroBatchPosition
from lockstep.checkpoint import StateTree
from lockstep.data import CollateFunction, OrderFunction, TorchLoader, UserDataset
from lockstep.errors import SettingError, UsageError
from lockstep.progress import Progress
from lockstep.project_files import resolve_settings
from lockstep.report import LogsValues
from lockstep.run.batches.loader_arguments import LoaderArguments
from lockstep.run.batches.loaders import Loaders
from lockstep.run.batches.micro_batches import MicroBatches
from lockstep.run.benchmark.measurement import Measurement
from lockstep.run.checks.nonfinite import NonFiniteChecks
from lockstep.run.loop.end_of_step import EndOfStep
from lockstep.run.loop.epochs import call_site
from lockstep.run.loop.evaluation_loop import EvaluationLoop
from lockstep.run.loop.parameter_sets import Optimizers
from lockstep.run.loop.rank_operations import RankOperations
from lockstep.run.loop.train_step import Count, Loss, LossKind, TrainStep
from lockstep.run.loop.training_loop import TrainingLoop
from lockstep.run.metrics.common_numbers import common_numbers
from lockstep.run.metrics.early_stopping import EarlyStopping
from lockstep.run.metrics.run_log import RunLog, TrialReports, record_start
from lockstep.run.proofs.resume_proof import ResumeProof
from lockstep.run.proofs.transcript_writer import TranscriptWriter
from lockstep.run.recovery.resume_point import PointMarks, ResumePoint
from lockstep.run.setup.identity import compare_draws
from lockstep.run.setup.missing_names import no_attribute, refusing_unknown_arguments
from lockstep.run.setup.registration import GivenModel, Registration
from lockstep.run.setup.resume import TrainingStart
from lockstep.run.setup.run_context import set_up
from lockstep.run.setup.shutdown import Shutdown
from lockstep.run.state.carried_state import CarriedState
from lockstep.run.state.snapshot import RunSnapshot
from lockstep.run.state.user_values import Kept
from lockstep.run.state.whole_models import WholeModels
from lockstep.script_end import close_at_script_end, close_open
from lockstep.seeding import seed_generators, seed_of
from lockstep.settings import Settings, changed
from lockstep.strategies import TensorPlan
from lockstep.world import World

T = TypeVar("T")
_DEFAULTS = Settings()


class Run:
    """One training run, alone or as one rank of any launcher's world.

    Opening a run finds out which rank this process is, connects to the other ranks, seeds all random generators and
    chooses the device. Every rank must make the same calls in the same order. The run is closed by `close`, by the end
    of a ``with`` statement, by the opening of the next run, or by the end of the script, whichever comes first.

    Every argument can be overridden from outside: ``lockstep run --precision bf16 train.py``, or
    ``LOCKSTEP_PRECISION=bf16``. `settings` has each value and its source.

    Args:
        seed: of all random generators: for initial weights, order of samples, augmentation, dropout.
        strategy: how replicas are kept in step, with options, such as ``ddp`` or ``fsdp:wrap=Block``; docs/strategies/
            describes all strategies.
        reduction: ``exact`` sums gradients along one fixed tree, so that the bits do not depend on the number of
            ranks; ``fast`` is torch's own all-reduce.
        precision: ``fp32``, ``bf16`` or ``fp16``, of the forward pass.
        checkpoint: directory for checkpoints. None: the run directory of ``lockstep run``; without ``lockstep run``, no
            checkpoints are saved.
        save_every: such as ``"100 steps"``, ``"5 min"`` or ``"1 epoch"``. None: only at the end and at a stop.
        log_every: such as ``"50 steps"``: the interval at which the means of the last steps' losses and measured values
            are logged, as ``loss_step`` and so on. None: only `log` logs.
        track: ``tensorboard``, ``wandb`` or ``mlflow``, or several separated by commas: trackers that receive the
            logged values and the settings. Or an object with a method ``log(values, step)``. Only the leader uses
            trackers. A tracker that fails or hangs is dropped, and the training continues. None: only ``metrics.jsonl``
            is written.
        profile: such as ``"steps 10:20"``: `torch.profiler` records each rank from the end of step 10 to the end of
            step 20. One Chrome trace per rank is written to ``profile`` in the run's directory or that of its
            checkpoints, else in the working directory. None: nothing is recorded, at no cost.
        keep: number of the newest checkpoints that are kept.
        resume_options: for a resumed script that gives an optimizer other options, such as ``lr``, than the run began
            with: ``checkpoint`` keeps the options of the checkpoint; ``script`` takes the script's, also as the base of
            torch's schedulers, which continue from their saved state.
        emergency: under ``lockstep run`` with ``--max-restarts``: when a rank or a host is lost, the other ranks save
            the state of the last finished step in the memory of their hosts, and the restarted ranks continue from this
            state. False: restarted ranks continue from the newest checkpoint.
        mirror: under ``lockstep run`` with ``--max-restarts``: after every step, each rank copies its part of the state
            into the memory of its host, while the next step is computed. Then no step is lost even where the other
            ranks do not hold the state: under ``zero`` and ``fsdp``, when all ranks of a host die or hang, and on GPUs
            (not tested there yet). On several hosts, a part of the state that only one rank holds is kept on two hosts,
            so that one of the two may be lost. The copies take twice the memory of the state. If the script uses
            `carry`, or an optimizer with a closure, each rank always copies its part on its own host. Refused with
            ``emergency=False``.
        best: such as ``"max accuracy"`` or ``"min val_loss"``: whenever this metric has a new best value, a checkpoint
            is saved, and kept in addition to the newest checkpoints until the next best value. For loss, error and
            perplexity (lower is better), and for accuracy, acc, f1, auc, iou and bleu (higher is better), the name is
            enough.
        clip_norm: maximum global norm of a step's gradient; the norm before clipping is measured as ``grad_norm``.
            ``inf`` clips nothing.
        sync_batchnorm: BatchNorm over all micro-batches that the ranks compute at the same time; the result depends on
            the number of ranks.
        compile: `torch.compile` each model.
        threads: CPU threads per rank; the bits of the result depend on this number. None: one on a CPU, else this
            rank's part of the CPUs.
        workers: loader processes per rank. None: chosen.
        global_batch: samples per step over all ranks, for loaders without a ``global_batch`` of their own; a value from
            the command line or the environment is for all loaders.
        micro_batch: samples per forward pass, for the same loaders as ``global_batch``.
        bucket_mb: MiB of gradients exchanged at once. None: chosen.
        on_nan: what happens when a loss or a gradient is not finite: ``stop`` ends the run with `NonFiniteError` before
            the update and before a save (on GPUs one step later, since the host does not wait for them); ``locate``
            also looks at each micro-batch's gradient before the sum, and names rank, micro-batch and parameter;
            ``warn`` prints a warning and keeps the newest checkpoint from before; ``ignore`` does nothing.
        nondeterministic: what happens on a GPU, with ``reduction="exact"``, when a backward pass calls an operation
            that has no deterministic kernel: ``refuse`` ends the run with an error that names the operation; ``warn``
            lets torch warn, and gives up equal bits.
        replay: in the first two steps of a pass, and every ``check_every`` steps, the loop's body computes the rank's
            first micro-batch a second time, before its last micro-batch, and the second result is dropped: samples,
            losses, gradients, measured values and buffers must have the same bits, else the run ends with an error that
            names what the body changes. Costs at most 0.5 % of a long run. False: a body may have effects, such as
            stepping an environment, and a body whose results depend on the number of ranks is not found.
        audit: such as ``"200 steps"``: the interval of audited steps. In such a step, before the update, each rank
            computes a micro-batch of another rank a second time, chosen by the step's seed: samples, losses, gradients
            and buffers must have the same bits. If not, all ranks compute this micro-batch again, and the run ends with
            `AuditError`, which names the wrong rank, host and device; ``lockstep run --max-restarts`` continues without
            that device. From the end of an audited step until the next update, bytes of the state that change without
            being written to end the run with the same error. Costs one micro-batch and some checksums. Under ddp, zero,
            fsdp and hsdp. None: never.
        verify_saves: each rank reads back from the disk what it has written of a checkpoint; a checkpoint with other
            bytes is not committed, and the run says so.
        check_every: the number of steps between comparisons of the ranks' states, in addition to the comparisons at
            saves and at the first step of each pass.
        peer_timeout_s: how many seconds a collective waits for the other ranks.
        rehearse: to try a script with fewer GPUs than the real run will have: ranks may share a GPU (slowly, through
            the CPU), and CPU threads replace GPUs where a strategy needs several.

    Raises:
        SettingError: for a value that cannot be used.
        WorldError: if the environment does not describe a world, or the ranks cannot connect.
    """

    def __init__(
        self,
        seed: int = _DEFAULTS.seed,
        strategy: str = _DEFAULTS.strategy,
        reduction: Literal["exact", "fast"] = _DEFAULTS.reduction,
        precision: Literal["fp32", "bf16", "fp16"] = _DEFAULTS.precision,
        checkpoint: str | os.PathLike[str] | None = None,
        save_every: str | None = None,
        log_every: str | None = None,
        track: str | LogsValues | None = None,
        profile: str | None = None,
        keep: int = _DEFAULTS.keep,
        resume_options: Literal["checkpoint", "script"] = _DEFAULTS.resume_options,
        emergency: bool = _DEFAULTS.emergency,
        mirror: bool = _DEFAULTS.mirror,
        best: str | None = None,
        clip_norm: float | None = None,
        sync_batchnorm: bool = False,
        compile: bool = False,
        threads: int | None = None,
        workers: int | None = None,
        global_batch: int | None = None,
        micro_batch: int | None = None,
        bucket_mb: float | None = None,
        on_nan: Literal["stop", "locate", "warn", "ignore"] = _DEFAULTS.on_nan,
        nondeterministic: Literal["refuse", "warn"] = _DEFAULTS.nondeterministic,
        replay: bool = _DEFAULTS.replay,
        audit: str | None = None,
        verify_saves: bool = _DEFAULTS.verify_saves,
        check_every: int = _DEFAULTS.check_every,
        peer_timeout_s: float = _DEFAULTS.peer_timeout_s,
        rehearse: bool = False,
    ) -> None:
        tracker = None if track is None or isinstance(track, str) else track
        if not isinstance(tracker, LogsValues | None):
            raise SettingError(
                f"track={type(track).__name__}: give a tracker's name, or an object with log(values, step)"
            )
        given = changed({**locals(), "track": None if tracker else track})
        close_open()  # a process has one run at a time
        context = set_up(resolve_settings(given, os.environ), os.environ)
        self._context: Final = context
        self.settings: Final = context.resolved
        self.device: Final = context.device
        checkpointer, group = context.checkpointer, context.group
        finite = NonFiniteChecks(
            context.settings.on_nan, group.rank, context.warnings.add_spoilt, checkpointer.committed_step
        )
        snapshot = RunSnapshot(context)
        part = context.emergency.part if context.emergency.notes else None
        leaves = None if part is None else partial(snapshot.take_shared, part)
        point = ResumePoint(leaves, PointMarks(context.state), context.state.optimizers)
        proof = ResumeProof(context)
        written = None if context.transcript is None else TranscriptWriter(context, context.transcript, snapshot)
        self._train_step: Final = TrainStep(context, finite, point, written)
        self._loaders: Final = Loaders(context)
        context.state.tracker = tracker
        self._log: Final = RunLog(context, tracker)
        start = TrainingStart(context, snapshot, self._log, proof)
        self._start: Final = start
        self._registration: Final = Registration(context, start)
        self._reports: Final = TrialReports(context, self._log, lambda: start.resumes_within_turn)
        measurement = None if context.measure is None else Measurement(context, context.measure)
        end_of_step = EndOfStep(
            context, snapshot, self._loaders, finite, self._log, point, proof, measurement=measurement
        )
        self._training: Final = TrainingLoop(context, self._loaders, self._start, self._train_step, end_of_step)
        self._evaluation: Final = EvaluationLoop(
            context, self._loaders, self._start, self._train_step, end_of_step, snapshot
        )
        self._ranks: Final = RankOperations(
            group,
            context.world,
            context.metrics,
            self._train_step.require_all_ranks,
            context.leaves.agree,
            context.warnings.add,
            context.inputs.asked_at,
        )
        self._whole: Final = WholeModels(context, self._train_step, snapshot)
        self._shutdown: Final = Shutdown(
            context,
            self._loaders,
            self._start,
            self._train_step,
            end_of_step,
            self._log,
            self._training.end_open_pass,
            measurement,
        )
        record_start(context, os.environ)
        compare_draws(group, self.say)
        seed_generators(seed_of(context.settings.seed, "init"))
        close_at_script_end(self._shutdown.close)
        context.marker.set_phase("script")

    if not TYPE_CHECKING:  # which knows the names by itself, and would take any for known
        __init__ = refusing_unknown_arguments(__init__)

        def __getattr__(self, name: str) -> object:
            raise no_attribute(self, name)

    # ---- who and where -----------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This rank's number, from 0."""
        return self._context.group.rank

    @property
    def world_size(self) -> int:
        """The number of ranks; one more in a replay of a micro-batch, to find results that depend on this number."""
        if self._context.metrics.in_replay:
            self._train_step.replays.reads_world_size = True
            return self._context.group.size + 1
        return self._context.group.size

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which writes for all. Inside ``if run.leads``, call no method of `Run` but `say`."""
        return self._context.group.leads

    @property
    def progress(self) -> Progress:
        """The step and epoch that the run has reached, and its samples; a new object after each step."""
        return self._context.position.progress

    @property
    def metrics(self) -> dict[str, float]:
        """The means of the last `train`, and of each `evaluate` since that training pass began."""
        return self._context.position.metrics

    @property
    def counts(self) -> bool:
        """Whether the current micro-batch is to be counted on this rank, for sums of your own.

        False for a padding micro-batch, which only lets this rank take part in collectives, and if another rank of the
        same replica counts the micro-batch. `measure` and `step` respect this by themselves.
        """
        self._context.metrics.asked_counts = True
        return self._context.metrics.samples > 0

    @property
    def micro_batch(self) -> MicroBatchPosition:
        """The place of the current micro-batch in its step: its index, their number, and how many samples it holds.

        Raises:
            UsageError: outside of the loops of `train` and `evaluate`.
        """
        position = self._context.metrics.position
        if position is None:
            raise UsageError("run.micro_batch outside of run.train(...) and run.evaluate(...): there is no micro-batch")
        return position

    @property
    def carry(self) -> CarriedState:
        """The script's state from step to step, such as a hidden state: a dict for the current micro-batch.

        The dict belongs to the index of the micro-batch in the step, not to the rank: in the next step, the micro-batch
        with the same index finds the values that were put in, on any number of ranks. The dict is saved in checkpoints.
        ``run.carry.get("hidden")`` is None the first time.
        """
        return self._context.carried

    @property
    def world(self) -> World:
        """The world, this process's place in it, and the launcher that described both."""
        return self._context.world

    def say(self, *values: object) -> None:
        """Print ``values`` on the leader, as `print` does, without disturbing the progress; nothing on other ranks.

        The line is printed under every view of the progress, also without a view.
        """
        if not self._context.metrics.in_replay:
            self._context.reporter.print(" ".join(map(str, values)))

    # ---- what is trained ----------------------------------------------------------------------------------------

    def model(
        self,
        model: GivenModel,
        *,
        weights: str | os.PathLike[str] | None = None,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        tensor_plan: TensorPlan | None = None,
    ) -> nn.Module:
        """``model`` itself, on this rank's device, equal on all ranks and kept so. Collective.

        For a model that is larger than a rank, give the function that makes it, as in ``run.model(lambda: Net())``:
        under ``fsdp``, ``hsdp`` and ``pipeline`` each rank then holds only its part, with the values of
        ``run.model(Net())``. The same holds for a model that was made under ``torch.device("meta")``: its values are
        those that ``reset_parameters`` of each module draws, inner modules first, and ``_init_weights`` where a model
        has this method.

        The model keeps its class, methods, attributes and the keys of its ``state_dict()``, on any number of ranks.
        Where a rank holds only a part of the model (``fsdp``, ``hsdp``, ``pipeline``, ``hybrid``), deep copies of the
        model and files of its ``state_dict()`` are refused: see `state_dict` and `save`.

        Args:
            model: a module, which is moved to the rank's device in place, unless the module is on several GPUs of the
                rank already (then its forward pass must move tensors between these GPUs). Or a function that makes the
                model, the same one on every rank; under ``hybrid``, embeddings are then never whole on any rank. Or a
                list, the stages of a model: modules, or functions that make one each. Each stage is called with what
                the stage before it returns (a tuple becomes several arguments). The result is then one module with the
                submodules ``0``, ``1`` and so on. ``pipeline`` distributes them over its ranks; each rank makes every
                stage and keeps its own.
            weights: the initial weights, by the names of ``model.state_dict()``: a ``.safetensors`` file, the index of
                weights in several files (``.safetensors.index.json``), or a directory with either. The path must exist
                on each rank, which reads only the tensors that it holds.
            find_unused_parameters: as in DDP: for models whose forward pass may not use all parameters.
            static_graph: as in DDP: every forward pass uses the same parameters equally often. Unused parameters are
                then found only once, and modules checkpointed with ``use_reentrant=True`` may be called several times.
            tensor_plan: which layers the ranks of a tensor group compute together under ``fsdp:tensor=N``, such as
                ``{"layers.*.up": "colwise", "layers.*.down": "rowwise"}``; other strategies ignore it. The words are
                those of transformers, or torch's `ColwiseParallel` and `RowwiseParallel`; ``{}`` divides nothing. None:
                the plan that the model brings as ``tensor_parallel_plan`` or, in transformers, ``tp_plan``.

        Raises:
            MismatchError: if ranks made different models.
            SettingError: if ``weights`` cannot be read.
            UsageError: for a model that cannot be trained, with the reason and its name; for ``weights`` of another
                model; and for tensors on the device ``meta`` that nothing initialises.
        """
        return self._registration.model(
            model,
            weights=weights,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            tensor_plan=tensor_plan,
        )

    def optimizer(self, optimizer: torch.optim.Optimizer, *, closure: bool | None = None) -> torch.optim.Optimizer:
        """``optimizer`` itself, from now on stepped by `step` and saved.

        Args:
            optimizer: made for parameters of a `model`.
            closure: whether its ``step`` needs a closure, as in LBFGS and implementations of SAM. Then give `step` a
                function and its data. Each call of the closure computes the loss and the gradient of the whole global
                batch again; ``.grad`` holds this gradient before the first call, too. Such an optimizer must be the
                run's only one. None: true if ``step`` cannot be called without a closure.

        Raises:
            UsageError: if the optimizer's parameters belong to no model of `model`, or the strategy or precision cannot
                step it.
        """
        self._registration.optimizer(optimizer, closure=closure)
        return optimizer

    def scheduler(self, scheduler: T) -> T:
        """``scheduler`` itself, from now on stepped once after each step of its optimizer, and saved.

        For a scheduler that is to step at other times, such as once an epoch, use `keep`, and call its ``step()``
        yourself.

        Raises:
            UsageError: for a scheduler of an optimizer outside of the run, or whose ``step`` needs an argument. From
                `step`: if the script steps the scheduler, too.
        """
        self._registration.scheduler(scheduler)
        return scheduler

    def keep(self, **objects: object) -> None:
        """Save and restore each object, by its name, before the training begins.

        An object with ``state_dict`` and ``load_state_dict`` is restored through these methods; a list, dict or tensor
        in place: after a resume the script's own object holds the saved values. A number or a text cannot change in
        place: read its value from `kept`. All ranks must hold equal values, as after ``run.metrics``; ranks compare
        tensors and plain values.

        Raises:
            UsageError: after the training began, for a name that is taken, or for an object that cannot be saved.
        """
        self._registration.keep(objects)

    @property
    def kept(self) -> Kept:
        """The objects given to `keep`, by name: ``run.kept.best = max(run.kept.best, run.metrics["accuracy"])``.

        After `epochs` has begun in a resumed run, each name gives the value that the checkpoint held.
        """
        return Kept(self._context.state.kept)

    def early_stopping(
        self, metric: str, patience: int, mode: Literal["min", "max"] = "min", min_delta: float = 0.0
    ) -> EarlyStopping:
        """Whether to stop because ``metric`` no longer improves: ``if stopper.should_stop(): break``.

        Its state is saved. A run that was stopped in this way is finished: a resume trains no further step, unless
        ``patience`` is larger now.

        Args:
            metric: a name in `metrics`.
            patience: how often in a row the metric may be measured without improving.
            mode: whether ``min`` or ``max`` is better.
            min_delta: an improvement by no more than this does not count.

        Raises:
            UsageError: for a value that cannot be used, a second call for the same metric, or after the training began.
        """
        return self._registration.early_stopping(metric, patience, mode, min_delta)

    def loader(
        self,
        dataset: UserDataset,
        *,
        global_batch: int | None = None,
        micro_batch: int | None = None,
        shuffle: bool | None = None,
        sampler: Iterable[object] | None = None,
        batch_sampler: Iterable[object] | None = None,
        order: OrderFunction | None = None,
        drop_last: bool = False,
        collate_fn: CollateFunction | None = None,
        workers: int | None = None,
        worker_init_fn: Callable[[int], object] | None = None,
        prefetch_factor: int | None = None,
        pin_memory: bool | None = None,
        timeout: float = 0.0,
        **others: object,
    ) -> TorchLoader:
        """This rank's share of ``dataset``, for `train` or `evaluate`. Collective.

        A script may also loop over the returned loader itself, outside of `train` and `evaluate`, as for the mean of a
        data set: such a loop reads all micro-batches of the first epoch, the same on every rank.

        Args:
            dataset: samples by index, an iterable of samples, tensors with one row per sample, or a torch `DataLoader`,
                whose batch is then a step. Or samples in shards: an object with ``shard_lengths``, or ``num_shards``
                where lengths are not known, and ``read_shard(shard, start)``, which gives the samples of one shard from
                ``start`` on. Streams of `datasets` and `webdataset` have shards.
            global_batch: samples per step, over all ranks.
            micro_batch: samples of one forward pass: the unit that makes the result independent of the number of ranks.
                There may be as many ranks as micro-batches in a step; large and few micro-batches are fast. None: an
                eighth of ``global_batch``.
            shuffle: whether each epoch has a new order of samples (for samples in shards, of the shards). None: yes,
                except for iterables without shards.
            sampler: a torch sampler or any iterable of indices: the order of an epoch, which may leave out or repeat
                samples. Every rank asks the sampler for the whole order, with generators seeded for the epoch,
                including the sampler's own; ``set_epoch(epoch)`` is called where the sampler has this method.
            batch_sampler: a torch batch sampler or any iterable of batches of indices: each batch is one step, of any
                size, and is divided into micro-batches. Leave ``global_batch`` out then.
            order: ``function(epoch, generator)`` that gives the indices of an epoch.
            drop_last: leave out the short step at the end of an epoch.
            collate_fn: as torch's.
            workers: loader processes; None: as in `settings`, or chosen. For ``workers`` and the batch sizes, a value
                from the command line or the environment replaces the value given here.
            worker_init_fn: as torch's.
            prefetch_factor: micro-batches that each loader process holds ready; None: chosen.
            pin_memory: hand out page-locked memory; on a GPU only. None: yes.
            timeout: seconds that a micro-batch of loader processes may take; 0: no limit.
            others: further arguments of torch's `DataLoader`; each is refused, with what to use instead.

        Raises:
            PlanError: if the sizes do not fit each other.
            DataError: if the data set cannot be divided, or lacks indices that the order names.
            UsageError: for arguments that exclude each other; for a sampler that divides the samples among ranks, or
                gives another order when it is asked again.
            MismatchError: if ranks hold data sets of different length, or draw different orders.
        """
        given = LoaderArguments(
            dataset,
            global_batch,
            micro_batch,
            shuffle,
            sampler,
            batch_sampler,
            order,
            drop_last,
            collate_fn,
            workers,
            worker_init_fn,
            prefetch_factor,
            pin_memory,
            timeout,
        )
        return self._loaders.open(given.checked(others, self.settings))

    # ---- the loop -----------------------------------------------------------------------------------------------

    def epochs(self, epochs: int) -> Iterator[int]:
        """The numbers of the epochs still to do, from 0; a resumed run begins with the epoch of the checkpoint.

        Collective. At the end of each epoch a checkpoint is saved if ``save_every`` says so, and after the last one.

        Raises:
            MismatchError: if ranks give other numbers of epochs.
        """
        return self._training.epochs(epochs, sys._getframe(1).f_code)

    def steps(self, steps: int, every: int | None = None) -> Iterator[int]:
        """Train for ``steps`` steps, in parts of ``every``; yields the steps done before each part. Collective.

        ::

            for step in run.steps(10_000, every=500):          # 0, 500, 1000, ...
                for images, labels in run.train(batches):      # 500 steps, through as many epochs as that takes
                    run.step(F.cross_entropy(model(images), labels))

        Within a part, `train` goes through its data set again and again, each time in another order;
        `progress.epoch` counts these epochs. The next part continues with the next sample. A resumed run begins with
        the part in which the checkpoint was saved, and trains its remaining steps.

        Args:
            steps: of the whole run.
            every: a part ends when the number of steps done is a multiple of ``every``. None: all steps are one part.

        Raises:
            UsageError: for a part without a step.
            MismatchError: if ranks give other numbers of steps.
        """
        return self._training.steps(steps, every, sys._getframe(1).f_code)

    def train(self, *loaders: TorchLoader) -> MicroBatches:
        """This rank's micro-batches of a pass over a data set, on its device, each to be given to `step`. Collective.

        In `epochs` a pass visits each sample once; in `steps` it has as many steps as the part.

        Models are in training mode. Before each micro-batch the random generators are seeded for it, so dropout does
        not depend on the ranks. At the end, `metrics` holds the means of the pass: ``loss``, and the values given to
        `measure`. ``break`` must leave the loop on all ranks after the same step; then `metrics` stays unchanged, and
        `train` with the same loader, in the same epoch, continues with the next step. A rank that serves other ranks
        gets no micro-batch, and continues after the loop when the other ranks do.

        Several passes may follow each other in one epoch, over several loaders or over one, each time in another order.
        Given several loaders, each step takes one step of each loader, and the body gets a tuple with a micro-batch of
        each; the loaders must have equally many micro-batches in a step. In `epochs` the shortest loader ends the pass.
        A loss is weighted by the samples of the first loader's micro-batch, or by ``count``.

        The length of the returned iterator is this rank's number of micro-batches; the length of a loader is the number
        of steps of an epoch.

        Raises:
            UsageError: if a micro-batch went by without `step`, for loaders whose steps differ, or for a second pass
                outside of `epochs` and `steps`.
            PlanError: if there are more ranks than micro-batches in a full step.
            MismatchError: if ranks hold different samples (each rank reads three samples as a pass begins, and once all
                rows in memory), or draw different orders.
        """
        return self._training.train(loaders, call_site(self._context.position.passes.caller))

    def backward(
        self, loss: Loss, *data: object, count: Count = None, loss_is: LossKind = "mean", optimizer: Optimizers = None
    ) -> bool:
        """The first half of `step`: after the step's last micro-batch, ``.grad`` holds the global batch's gradient.

        `update` then unscales and clips this gradient. Collective.

        Returns:
            Whether this was this rank's last micro-batch of the step, so that ``.grad`` is there.
        """
        return self._training.backward(loss, data, count, loss_is, optimizer)

    def update(self, optimizer: Optimizers = None) -> bool:
        """The second half of `step`: on the step's last micro-batch unscale, clip and update; on others, nothing.

        If a run has several optimizers with losses of their own, all of them step when each has had its loss, or at the
        end of the loop's body: no loss of a step is computed with parameters that were changed in this step.

        Returns:
            Whether the step is done, see `step`.
        """
        return self._training.update(optimizer)

    def step(
        self, loss: Loss, *data: object, count: Count = None, loss_is: LossKind = "mean", optimizer: Optimizers = None
    ) -> bool:
        """Train on a micro-batch: backward; on the step's last micro-batch also reduce, clip, update, step schedulers.

        The gradient is that of the mean over the global batch: each micro-batch weighs by its number of items.
        Collective.

        A step ends where the loop's body ends: only then is a checkpoint saved, or the run stopped.

        Args:
            loss: the mean over the micro-batch's items, a tensor of no dimension; or a function that gives it, as in
                ``run.step(F.cross_entropy, images, labels)``, for ``F.cross_entropy(model(images), labels)``: the form
                that every strategy understands, also strategies that compute forward and backward passes in an order of
                their own.
            data: for a function: the model's input and the targets, each one object or a tuple of several.
            count: the number of items, such as tokens, that the mean is over; a number or a tensor. None: the samples.
            loss_is: ``mean`` over these items, or their ``sum``, as with ``reduction="sum"``. In both cases, the
                gradient and the reported loss are those of the mean over all items of the step.
            optimizer: the optimizer whose parameters the loss is for, if the run has several; a list of optimizers
                shares one backward pass.

        Returns:
            Whether the step is done on this rank: parameters, buffers and schedulers are those of the next step. True
            once a step on any number of ranks, so ``if run.step(loss): ema.update_parameters(model)`` is right on all.
            With several optimizers, the call that gives the last of them its loss returns True; if one optimizer is
            left out of a step, no call does, and the step is done at the end of the body.

        Raises:
            UsageError: outside of `train`, for a loss of a wrong type or shape, or for anything that would make the
                result depend on the number of ranks.
            NonFiniteError: for a loss or gradient that is not finite, if ``on_nan`` is ``stop`` or ``locate``.
            PeerLost: if another rank is gone.
        """
        return self._training.step(loss, data, count, loss_is, optimizer)

    def evaluate(self, loader: TorchLoader) -> MicroBatches:
        """This rank's micro-batches of a data set of which each sample comes once, over all ranks. Collective.

        Models and kept modules are in evaluation mode and gradients are off. At the end, the means of the measured
        values are added to `metrics`, beside those of the training pass before.

        `evaluate` may be called in the body of `train`, too, once the step is done: ``if run.step(loss) and
        run.progress.step % 500 == 0:``; not so under strategies with ranks that serve others. The training afterwards
        has the same bits as without the evaluation. A run that is asked to stop meanwhile stops at the end of the body.

        Each rank gets one block of the data, in the order of ranks: without ``shuffle``, results that each rank appends
        to a list and `gather` brings together are in the data set's order, except for an iterable data set. The length
        of the returned iterator is this rank's number of micro-batches.

        Raises:
            UsageError: in the middle of a step.
            MismatchError: if ranks hold different samples, as in `train`.
        """
        return MicroBatches(self._evaluation.evaluate(loader), lambda: self._loaders.evaluation_length(loader))

    def measure(self, *, count: Count = None, **values: object) -> None:
        """Add to the means over all samples: one number per sample, or one number for the micro-batch. No waiting.

        To be called inside `train` or `evaluate`; at their end `metrics` holds the means, the same bits for any number
        of ranks.

        Args:
            count: the number of items, such as tokens, of which a value that is one number is the mean. None: the
                samples.
            values: by their names in `metrics`. ``loss`` is taken in `train`, by the loss that `step` measures.

        Raises:
            UsageError: outside of `train` and `evaluate`, for a value that is no number, or a name that is taken.
        """
        self._context.metrics.measure(values, count)

    def log(self, **values: object) -> dict[str, object]:
        """Write ``values`` and `metrics` to the run's record, and tell the user; only the leader writes.

        Not collective, since `metrics` are reduced already; so `log` may be called under ``if run.leads``. Values that
        several ranks log after a pass are compared later, except under names of times and the like. Step and epoch are
        always written. Epochs are counted from 1, as on the screen: the number that `epochs` gave need not be passed,
        and if it is, as in ``run.log(epoch=epoch)``, the epoch counted from 1 is written.

        Returns:
            ``values`` and `metrics` as written, on every rank.

        Raises:
            UsageError: if the run is closed.
        """
        self._start.refuse_closed()
        epoch = self._context.position.epoch_number
        everything: dict[str, object] = {**values, **self.metrics} | values
        if everything.get("epoch") == epoch - 1:
            everything["epoch"] = epoch
        # After a resume, the code of a turn before the pass that goes on runs again, and must log nothing twice.
        if not (self._start.resumes_within_turn or self._context.metrics.in_replay):
            self._log.note_given(values, self.progress.step)
            if self._train_step.transcript is not None:
                self._train_step.transcript.logged(common_numbers(values))
            self._log.write(everything, self.progress.step, epoch)
        return everything

    def report(self, loss: float | torch.Tensor) -> None:
        """Report the loss of this trial so far to the search, which may stop the trial. Collective.

        The loss is logged as ``reported``; outside of `lockstep.tune` nothing else happens. In a search the leader's
        value is recorded and given to the stopping rule, whose decision all ranks of the trial follow in this call,
        which takes about a millisecond. In a resumed trial, reports continue after those in its checkpoint.

        Args:
            loss: a number or a tensor with one element, to be minimised; the same on all ranks, like the values of
                `metrics`.

        Raises:
            TrialStopped: on all ranks, if the search stops the trial; the objective need not catch it.
            UsageError: if ``loss`` is not one number.
        """
        self._reports.report(loss)

    # ---- the model out ------------------------------------------------------------------------------------------

    def state_dict(self, model: nn.Module) -> StateTree:
        """The whole ``model`` on the leader, whatever the strategy; an empty dict on other ranks. Collective.

        Tensors are copies on the CPU, by the model's own names. Under ``local-sgd`` each tensor is the mean over ranks.

        Args:
            model: a model that `model` returned, or a kept module; for an `AveragedModel`, the averaged model is
                returned.

        Raises:
            UsageError: for any other model, or in the middle of a step.
        """
        return self._whole.state_dict(model)

    def save(self, model: nn.Module, path: str | os.PathLike[str]) -> None:
        """Write the whole ``model`` to ``path``, whatever the strategy. Collective; the leader writes.

        ``path`` is a ``.safetensors`` file, a ``.pt`` file, or a directory for ``from_pretrained``. An older model at
        ``path`` is replaced once the new one is written completely. Only for ``.pt`` does the leader hold more than one
        whole tensor at a time.

        Args:
            model: as for `state_dict`.
            path: of a file or directory; only the leader's value is used.

        Raises:
            SettingError: if ``path`` cannot hold the model.
            CheckpointError: on all ranks, if the leader could not write it.
            UsageError: as for `state_dict`.
        """
        self._whole.save(model, path)

    # ---- between ranks ------------------------------------------------------------------------------------------

    def sum(self, value: T) -> T:
        """The sum of all ranks' ``value``, a number or a tensor; the sum of truth values is a count. Collective.

        The same bits on all ranks. Sums of whole numbers are the same on any number of ranks; of others, whose parts
        each rank has rounded, the last digits are not, and a line says so once.
        """
        return self._ranks.sum(value)

    def mean(self, value: T) -> T:
        """The mean of all ranks' ``value``, a number or a tensor; each rank counts once. Collective.

        The same bits on all ranks; it depends on the number of ranks, as `sum` of what is not whole.
        """
        return self._ranks.mean(value)

    def gather(self, value: T) -> list[T]:
        """Each rank's ``value``, by rank; anything that can be pickled. Collective. Tensors of GPUs come to `device`.

        Where `step` has returned True, lists to which the bodies of the step have added items are sorted by
        micro-batch, and items of micro-batches that do not count are left out. So the lists, one after another, are in
        the order of micro-batches under every strategy, as if each rank had neighbouring ones. After a pass of
        `evaluate`, what ranks have collected is in the data set's order. After a pass of `train`, its order depends on
        the number of ranks.
        """
        return self._ranks.gather(value)

    def broadcast(self, value: T) -> T:
        """Rank 0's ``value``; anything that can be pickled. Collective. Tensors of GPUs come to `device`."""
        return self._ranks.broadcast(value)

    def barrier(self) -> None:
        """Wait until all ranks have called `barrier`. Collective."""
        self._ranks.barrier()

    def leader_first(self) -> AbstractContextManager[None]:
        """The leader of each node runs the block first, the other ranks after it, as for downloads. Collective.

        The other ranks wait without a deadline, and outside of any collective.
        """
        return self._ranks.leader_first()

    # ---- opening and closing ------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """`close`; after an error nothing is saved, no rank is waited for, and the error may get a note with advice."""
        self._shutdown.close(error)

    def close(self) -> None:
        """Save the last step if unsaved, wait for the last checkpoint, disconnect from the other ranks. Collective.

        Afterwards the run trains, evaluates and logs no more. A second call does nothing. A run that is left open is
        closed by the next `Run`, or at the end of the script: as by this call, or after an uncaught error as by a
        ``with`` statement.

        Raises:
            SystemExit: with code 74, on all ranks, if checkpoints were asked for and none holds the last step.
        """
        self._shutdown.close(None)
