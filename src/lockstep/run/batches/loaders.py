"""The loaders of a run: torch loaders for the script, each with this rank's micro-batches behind it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.batch import BatchPlan, EpochSteps
from lockstep.checkpoint import StateTree
from lockstep.data import (
    CheckedSteps,
    MicroBatch,
    MicroBatchLoader,
    Padding,
    SeenSamples,
    ShardsFound,
    TorchLoader,
    WorkerOptions,
    choose_workers,
    hold_gpu,
    is_in_memory,
    open_micro_batch_loader,
    open_order,
)
from lockstep.errors import DataError, MismatchError, SettingError, UsageError
from lockstep.formatting import format_ranks, plural
from lockstep.run.batches.loader_arguments import LoaderArguments
from lockstep.run.batches.to_device import on_device
from lockstep.run.checks.divergence import checksums
from lockstep.run.proofs.replay import CheckSchedule
from lockstep.run.setup.identity import SeenContents
from lockstep.run.setup.run_context import RunContext, cpus_of_this_rank

Method = Literal["train", "evaluate"]


@dataclass(slots=True)
class _OpenPass:
    """A pass over a loader, kept between two of its steps."""

    batches: Iterator[MicroBatch]
    order: int
    step: int | None  #: the next step; None: the pass is within a step
    checks: CheckedSteps  #: counted from the step with which `batches` began
    first: int  #: that step
    is_outdated: bool = False  #: `batches` are to be read again from the next step on


class Loaders:
    """The loaders that `Run.loader` has returned, and this rank's passes over them."""

    def __init__(self, context: RunContext) -> None:
        self._context: Final = context
        self._by_id: Final[dict[int, MicroBatchLoader]] = {}  # of the torch loader that the script holds
        self._names: Final[dict[int, str]] = {}  # of the micro-batch loader
        self._since_turn: int | None = None  # loaders opened in this turn of the outer loop; None: there is no such yet
        self._passes: Final[dict[int, _OpenPass]] = {}  # of the micro-batch loader
        self._begun: Final[dict[int, int]] = {}  # the current order of each loader
        self._orders: Final[dict[str, tuple[int, str]]] = {}
        self._contents: Final[dict[str, SeenContents]] = {}
        self._chosen: Final[set[BatchPlan]] = set()  # plans whose micro-batch was chosen, not given
        settings, strategy = context.settings, context.strategy
        gives_bits_up = settings.reduction == "fast" or settings.nondeterministic == "warn"
        may_round_anew = gives_bits_up and context.device.type == "cuda"
        # BatchNorm over all ranks adds up in their order.
        of_others = context.group.size > 1 and strategy.repeats_other_ranks and not settings.sync_batchnorm
        replays = settings.replay and strategy.repeats_bits and not may_round_anew
        if settings.audit is not None and not (replays and (of_others or context.group.size == 1)):
            raise SettingError(
                f"audit='{settings.audit}' with strategy={settings.strategy!r}, reduction={settings.reduction!r}, "
                f"nondeterministic={settings.nondeterministic!r}, sync_batchnorm={settings.sync_batchnorm}: a rank "
                "cannot compute to the same bits what another one has computed; leave it out, or use ddp, zero or fsdp "
                "with reduction='exact'"
            )
        self._checks: Final = CheckSchedule(
            settings.check_every,
            replays=replays and context.measure is None,
            of_others=of_others,
            audit=0 if settings.audit is None or context.measure is not None else int(settings.audit.every),
            seed=settings.seed,
        )

    def say_chosen(self, plan: BatchPlan) -> None:
        """Tell the user of the micro-batch chosen for ``plan``, if a BatchNorm layer normalises over micro-batches."""
        context, modules = self._context, (m for model in self._context.state.models for m in model.modules())
        divides = plan in self._chosen and plan.micro_batches > 1 and not context.settings.sync_batchnorm
        if divides and any(isinstance(module, _BatchNorm) and module.training for module in modules):
            context.reporter.say(
                f"BatchNorm normalises over the {plan.micro_batch} samples of a micro-batch; to choose how many, give "
                f"micro_batch=... beside global_batch={plan.global_batch}"
            )

    def open(self, arguments: LoaderArguments) -> TorchLoader:
        """Make this rank's loader, with the settings over the arguments, and register it under its place among loaders.

        Collective: the ranks agree on the length of the data set.
        """
        context, dataset = self._context, arguments.dataset
        settings, replicas = context.settings, context.share.replicas
        order = open_order(
            dataset,
            seed=settings.seed,
            shuffle=arguments.shuffle,
            collate_fn=arguments.collate_fn,
            sampler=arguments.sampler,
            batch_sampler=arguments.batch_sampler,
            order=arguments.order,
        )
        varies = order is not None and order.largest_batch is not None
        global_batch = order.largest_batch if order is not None and varies else arguments.global_batch
        plan = BatchPlan.of(
            global_batch or 0, arguments.micro_batch, replicas, varies=varies, in_turn=context.share.in_turn
        )
        if arguments.micro_batch is None:
            self._chosen.add(plan)
        context.state.sample_sources += [dataset, arguments.collate_fn, arguments.order]
        on_gpu = context.device.type == "cuda"
        loader = open_micro_batch_loader(
            dataset,
            plan,
            context.share.replica or 0,
            order=order,
            seed=settings.seed,
            drop_last=arguments.drop_last,
            shuffle=arguments.shuffle,
            collate_fn=arguments.collate_fn,
            workers=WorkerOptions(
                _workers_for(arguments),
                arguments.worker_init_fn,
                arguments.prefetch_factor,
                arguments.timeout,
            ),
            pin_memory=on_gpu and arguments.pin_memory is not False,
            in_pass=lambda: context.metrics.position is not None,
            agree=lambda counts: context.group.gather_objects(counts, "counts of a stream"),
        )
        if loader.length is None and replicas != context.group.size:
            raise DataError(
                f"{type(dataset).__name__} is an iterable data set, and strategy={settings.strategy!r} has ranks "
                "that read nothing; give a data set with __getitem__ and __len__, or use ddp"
            )
        context.group.check_equal("length and plan of a data set", (loader.length, str(plan)))
        self._draw(loader, 0)
        for note in loader.notes:
            context.reporter.say(note)
        self._register(loader)
        return loader.data_loader

    def _register(self, loader: MicroBatchLoader) -> None:
        """Give ``loader`` the name by which a resumed run finds it: its place among the loaders opened again."""
        if self._since_turn is None:
            self._names[id(loader)] = str(len(self._by_id))
        else:
            self._names[id(loader)] = f"+{self._since_turn}"
            self._since_turn += 1
        self._by_id[id(loader.data_loader)] = loader

    def begin_turn(self) -> None:
        """Begin a turn of the outer loop; loaders opened in the turn are opened again by a resumed script."""
        self._since_turn = 0

    def name(self, loader: MicroBatchLoader) -> str:
        """By which a resumed run knows ``loader``."""
        return self._names[id(loader)]

    def names(self, data_loaders: Sequence[TorchLoader]) -> list[str]:
        """The names of the loaders that `open` returned."""
        return [self.name(self._by_id[id(each)]) for each in data_loaders if id(each) in self._by_id]

    def find(self, data_loader: TorchLoader, method: Method) -> MicroBatchLoader:
        """The micro-batches behind ``data_loader``, which the script gave to ``method``.

        Raises:
            UsageError: if `open` did not return ``data_loader``.
            PlanError: if some ranks would have nothing to do in a training.
        """
        loader = self._by_id.get(id(data_loader))
        if loader is None:
            raise UsageError(
                f"run.{method}({type(data_loader).__name__}): give what run.loader(dataset, global_batch=...) returned"
            )
        if method == "train":
            loader.plan.require_work_for_all_ranks()
        return loader

    def begin(self, loader: MicroBatchLoader, order: int) -> bool:
        """Begin or continue a pass in ``order``; whether it begins in this process. Collective if it does.

        Raises:
            MismatchError: if ranks draw different orders, or hold different samples.
            CheckpointError: if the order differs from that of the run that was saved.
        """
        begins = self._begun.get(id(loader)) != order
        if begins:
            self._begun[id(loader)] = order
            self._compare_order(loader, order)
            self._compare_contents(loader, order)
        return begins

    def step(self, loader: MicroBatchLoader, order: int, step: int, found: ShardsFound) -> Iterator[MicroBatch]:
        """This rank's micro-batches of one step of the pass in ``order``, on its device; none at the end of the pass.

        Places found in shards are kept in ``found``. Successive steps are read in one pass, also if other calls come
        between them.
        """
        held = self._passes.get(id(loader))
        goes_on = held is not None and (held.step, held.order) == (step, order)
        if held is None or not goes_on or held.is_outdated:
            if held is not None and goes_on:
                checks = held.checks.later(step - held.first)
            else:
                checks = self._checks.begin_pass(self._context.position.progress.step, loader.plan)
            batches = loader.epoch(order, step, padding=self._padding("train"), found=found, checks=checks)
            held = self._passes[id(loader)] = _OpenPass(self._on_device(loader, batches), order, step, checks, step)
        held.step = None  # if the script leaves the pass within the step, the pass cannot go on
        for batch in held.batches:
            if batch.position.last:
                held.step = step + 1
                yield batch
                return
            yield batch
        self._passes.pop(id(loader), None)

    def take_up(self, loaders: Sequence[MicroBatchLoader]) -> None:
        """Continue passes that the script had left: samples are read again if a data set was changed since.

        Each rank decides separately, since each reads ahead by its own loader processes.
        """
        for loader in loaders:
            held = self._passes.get(id(loader))
            if held is not None and loader.is_outdated(ahead=self._context.device.type == "cuda"):
                held.is_outdated = True

    def evaluation(self, loader: MicroBatchLoader) -> Iterator[MicroBatch]:
        """This rank's micro-batches of an evaluation, on its device; none on a server rank. Collective.

        Raises:
            MismatchError: if ranks draw different orders, or hold different samples.
        """
        self._draw(loader, 0)
        self._begun.pop(id(loader), None)
        self._passes.pop(id(loader), None)  # one pass over a loader at a time
        self._look(loader, 0)
        if self._context.share.replica is None:
            return iter(())
        return self._on_device(loader, loader.evaluation(padding=self._padding("evaluate")))

    def may_leave_early(self, loader: MicroBatchLoader) -> bool:
        """Whether a rank may leave an evaluation alone, which is so if ranks do not communicate in the evaluation."""
        return loader.length is not None and self._padding("evaluate") != "even"

    def training_length(self, loader: MicroBatchLoader, order: int, first_step: int) -> int | None:
        """This rank's number of micro-batches in `train` from ``first_step`` on, without replays; None: not known."""
        if self._context.share.replica is None:
            return 0
        return loader.micro_batches(order, first_step, padding=self._padding("train"))

    def evaluation_length(self, data_loader: TorchLoader) -> int | None:
        """This rank's number of micro-batches in an evaluation; None for a stream without length."""
        loader = self.find(data_loader, "evaluate")
        if self._context.share.replica is None:
            return 0
        return loader.micro_batches_of_evaluation(padding=self._padding("evaluate"))

    @property
    def lengths(self) -> list[int | None]:
        """The number of samples of each data set, in the order of opening."""
        return [loader.length for loader in self._by_id.values()]

    @property
    def orders(self) -> dict[str, tuple[int, str]]:
        """By name of the loader: the epoch that was begun last, and the digest of its order, if that was drawn."""
        return dict(self._orders)

    @property
    def contents(self) -> StateTree:
        """The samples seen of each loader's data set as its newest training pass began, by the loader's name."""
        return {name: content.as_list() for name, content in self._contents.items()}

    def close(self) -> None:
        """End all loader processes."""
        self._passes.clear()
        for loader in self._by_id.values():
            loader.close()

    def _on_device(self, loader: MicroBatchLoader, batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        # Ranks that read a stream agree while reading, at the same place in the loop.
        ahead, pin = loader.length is not None, loader.data_loader.pin_memory
        return on_device(batches, self._context.device, ahead=ahead, pin=pin)

    def _compare_order(self, loader: MicroBatchLoader, epoch: int) -> None:
        digest, name = self._draw(loader, epoch), self.name(loader)
        if digest is None:
            return
        if self._context.settings.sync_batchnorm and loader.length is not None:
            _refuse_uneven_epoch(loader.steps(epoch), self._context.group.size, epoch)
        if loader.steps_per_epoch is None:
            self._context.position.length.steps_per_epoch = None
        before, self._orders[name] = self._orders.get(name), (epoch, digest)
        if before is not None and before[0] == epoch and before[1] != digest:
            raise UsageError(
                f"the order of epoch {epoch} is another one than when the epoch began: change what a sampler or order= "
                "depends on between epochs only"
            )
        self._context.checkpointer.compare({"orders": self.orders}, within_pass=())

    def _compare_contents(self, loader: MicroBatchLoader, epoch: int) -> None:
        seen = self._look(loader, epoch)
        if seen is None:
            return
        name = self.name(loader)
        before = self._contents.get(name)
        changes = before is not None and (before.changes or before.seen != seen)
        self._contents[name] = SeenContents(epoch, seen, changes)
        if before is None:  # a resumed run sees in later passes the same as the run that saved
            self._context.checkpointer.compare({"contents": self.contents}, within_pass=())

    def _look(self, loader: MicroBatchLoader, epoch: int) -> SeenSamples | None:
        """Some samples of the pass that begins, checked to be equal on all ranks. Collective.

        Not with server ranks, which come to a pass only when they have ended the pass before.
        """
        context = self._context
        if context.share.replicas != context.group.size or not (context.group.size > 1 or context.directory):
            return None
        seen = loader.look(epoch)
        if seen is None:
            return None
        marks = [seen.checksum]
        if self.name(loader) not in self._contents and context.group.size > 1:
            marks += checksums(loader.rows_in_memory())
        first, *others = context.group.gather_objects(marks, "samples of a data set")
        odd = [rank for rank, other in enumerate(others, 1) if other != first]
        if odd:
            compared = ", ".join(map(str, seen.indices)) + (" and more" if len(marks) > 1 else "")
            raise MismatchError(
                f"{format_ranks(odd)} {'holds' if len(odd) == 1 else 'hold'} other samples than rank 0 in the data set "
                f"of {plural(loader.length or 0, 'sample')} (compared: {compared}). Every "
                "rank must make the same data set. What is drawn at random, such as a split into training and test, is "
                "the same on all ranks where it is drawn after Run(...) has begun, or with a seed of its own "
                "(random_state=0). A data set must not depend on run.rank, nor have a generator without a seed; labels "
                "that the script makes while it trains must be gathered from all ranks"
            )
        return seen

    def _draw(self, loader: MicroBatchLoader, epoch: int) -> str | None:
        """Draw the order of a pass that begins; returns its digest, checked to be equal on all ranks. Collective."""
        digest = loader.draw(epoch)
        if digest is None:
            return None
        first, *others = self._context.group.gather_objects(digest, "the order of a data set")
        odd = [rank for rank, other in enumerate(others, 1) if other != first]
        if odd:
            raise MismatchError(
                f"{format_ranks(odd)} would visit the samples of epoch {epoch} in another order than rank 0: a sampler "
                "must give every rank the same order of the whole data set, from the epoch and from generators that "
                "Lockstep can seed; order=function of (epoch, generator) is given one; shard_lengths must be the same; "
                "a stream that shuffles needs a seed of its own, such as shuffle(..., seed=0)"
            )
        return digest

    def _padding(self, method: Method) -> Padding:
        if self._context.strategy.forward_is_collective:
            return "even"
        return "one" if method == "train" and self._context.group.size > 1 else "none"


def refuse_uneven(loader: MicroBatchLoader, ranks: int) -> None:
    """Check that all ranks make equally many forward passes in every step, as SyncBatchNorm needs.

    Raises:
        UsageError: if not.
    """
    plan, length = loader.plan, loader.length or 0
    if plan.varies:
        return  # each epoch's batches are checked at its beginning
    is_short = length % plan.global_batch and loader.steps_per_epoch != length // plan.global_batch
    if plan.micro_batches % ranks or is_short:
        raise UsageError(
            f"sync_batchnorm=True needs ranks that hold equally many micro-batches in every step: {plan}; "
            "choose sizes that divide, and drop_last=True"
        )


def _refuse_uneven_epoch(steps: EpochSteps, ranks: int, epoch: int) -> None:
    for step in range(len(steps)):
        if steps.micro_batches_of(step) % ranks:
            raise UsageError(
                "sync_batchnorm=True needs ranks that hold equally many micro-batches in every step, and step "
                f"{step} of epoch {epoch} holds {plural(steps.micro_batches_of(step), 'micro-batch')} for "
                f"{plural(ranks, 'rank')}: give batches and a micro_batch that divide"
            )


def _workers_for(arguments: LoaderArguments) -> int:
    if arguments.workers is not None:
        return arguments.workers
    # Loader processes are forked, in which the GPU that this rank has started cannot be used.
    if hold_gpu(arguments.dataset, arguments.collate_fn):
        return 0
    in_memory = is_in_memory(arguments.dataset)
    return choose_workers(cpus_of_this_rank(), in_memory=in_memory)
