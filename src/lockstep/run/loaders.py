"""The data sets of a run: the torch loaders that the script holds, and the micro-batches of this rank behind each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

from torch.utils.data import DataLoader

from lockstep.batch import BatchPlan
from lockstep.data import MicroBatch, MicroBatchLoader, Padding, choose_workers, is_in_memory, open_micro_batch_loader
from lockstep.errors import DataError, UsageError
from lockstep.run.setup import RunContext, cpus_of_this_rank
from lockstep.strategies import forward_is_collective

Method = Literal["train", "evaluate"]


@dataclass(frozen=True, slots=True)
class _OpenPass:
    """A pass over a loader, between two of its steps."""

    batches: Iterator[MicroBatch]
    order: int
    step: int  #: the next one


class Loaders:
    """What `Run.loader` has returned, and how this rank goes through it."""

    def __init__(self, context: RunContext) -> None:
        self._context: Final = context
        self._by_id: Final[dict[int, MicroBatchLoader]] = {}  # of the torch loader that the script holds
        self._names: Final[dict[int, str]] = {}  # of the micro-batch loader
        self._since_turn: int | None = None  # loaders opened in this turn of the outer loop; None: there is no such yet
        self._passes: Final[dict[int, _OpenPass]] = {}  # of the micro-batch loader

    def open(
        self,
        dataset: Any,
        global_batch: int,
        micro_batch: int | None,
        shuffle: bool | None,
        drop_last: bool,
        collate_fn: Callable[[list[Any]], Any] | None,
        workers: int | None,
    ) -> DataLoader[Any]:
        """See `Run.loader`."""
        context = self._context
        plan = BatchPlan.of(global_batch, micro_batch, context.share.replicas)
        if workers is None:
            workers = context.settings.workers
        if workers is None:
            workers = choose_workers(cpus_of_this_rank(), in_memory=is_in_memory(dataset))
        loader = open_micro_batch_loader(
            dataset,
            plan,
            context.share.replica or 0,
            seed=context.settings.seed,
            shuffle=shuffle,
            drop_last=drop_last,
            collate_fn=collate_fn,
            workers=workers,
            pin_memory=context.device.type == "cuda",
            agree=lambda counts: context.group.gather_objects(counts, "counts of a stream"),
        )
        if loader.length is None and context.share.replicas != context.group.size:
            raise DataError(
                f"{type(dataset).__name__} can only be iterated, and strategy={context.settings.strategy!r} has ranks "
                "that read nothing; give a data set with __getitem__ and __len__, or use ddp"
            )
        context.group.check_equal("length and plan of a data set", (loader.length, str(plan)))
        for note in loader.notes:
            context.reporter.say(note)
        if self._since_turn is None:
            self._names[id(loader)] = str(len(self._by_id))
        else:
            self._names[id(loader)] = f"+{self._since_turn}"
            self._since_turn += 1
        self._by_id[id(loader.data_loader)] = loader
        return loader.data_loader

    def begin_turn(self) -> None:
        """A turn of the outer loop begins: what is opened in it, a resumed script opens again."""
        self._since_turn = 0

    def name(self, loader: MicroBatchLoader) -> str:
        """By which a resumed run knows ``loader``."""
        return self._names[id(loader)]

    def find(self, data_loader: DataLoader[Any], method: Method) -> MicroBatchLoader:
        """The micro-batches behind ``data_loader``, which the script gave to ``method``.

        Raises:
            UsageError: if `open` did not return it.
        """
        loader = self._by_id.get(id(data_loader))
        if loader is None:
            raise UsageError(
                f"run.{method}({type(data_loader).__name__}): give what run.loader(dataset, global_batch=...) returned"
            )
        return loader

    def step(self, loader: MicroBatchLoader, order: int, step: int) -> Iterator[MicroBatch]:
        """This rank's micro-batches of one step of the pass in ``order``; none at the end of the pass.

        Steps that follow each other are read in one go, also where something else comes between them.
        """
        held = self._passes.pop(id(loader), None)
        if held is None or (held.order, held.step) != (order, step):
            held = _OpenPass(loader.epoch(order, step, padding=self._padding("train")), order, step)
        for batch in held.batches:
            if batch.position.last:
                self._passes[id(loader)] = _OpenPass(held.batches, order, step + 1)
                yield batch
                return
            yield batch

    def evaluation(self, loader: MicroBatchLoader) -> Iterator[MicroBatch]:
        """This rank's micro-batches of an evaluation; none on a rank that serves others."""
        if self._context.share.replica is None:
            return iter(())
        self._passes.pop(id(loader), None)  # one pass over a loader at a time
        return loader.evaluation(padding=self._padding("evaluate"))

    def may_leave_early(self, loader: MicroBatchLoader) -> bool:
        """Whether a rank may leave an evaluation by itself: ranks that communicate in it leave together or not."""
        return loader.length is not None and self._padding("evaluate") != "even"

    def training_length(self, loader: MicroBatchLoader, first_step: int) -> int | None:
        """How many micro-batches `train` has here from ``first_step`` on; None for a stream without length."""
        if self._context.share.replica is None:
            return 0
        return loader.micro_batches(first_step, padding=self._padding("train"))

    def evaluation_length(self, data_loader: DataLoader[Any]) -> int | None:
        """How many micro-batches an evaluation hands out here; None for a stream without length."""
        loader = self.find(data_loader, "evaluate")
        if self._context.share.replica is None:
            return 0
        return loader.micro_batches_of_evaluation(padding=self._padding("evaluate"))

    @property
    def lengths(self) -> list[int | None]:
        """Samples of each data set, in the order in which they were opened."""
        return [loader.length for loader in self._by_id.values()]

    def close(self) -> None:
        """No loader process is left."""
        self._passes.clear()
        for loader in self._by_id.values():
            loader.close()

    def _padding(self, method: Method) -> Padding:
        if forward_is_collective(self._context.strategy):
            return "even"
        return "one" if method == "train" and self._context.group.size > 1 else "none"


def refuse_uneven(loader: MicroBatchLoader, ranks: int) -> None:
    """Nothing, if all ranks make equally many forward passes in every step, as SyncBatchNorm needs.

    Raises:
        UsageError: if they do not.
    """
    plan, length = loader.plan, loader.length or 0
    is_short = length % plan.global_batch and loader.steps_per_epoch != length // plan.global_batch
    if plan.micro_batches % ranks or is_short:
        raise UsageError(
            f"sync_batchnorm=True needs ranks that hold equally many micro-batches in every step: {plan}; "
            "choose sizes that divide, and drop_last=True"
        )
