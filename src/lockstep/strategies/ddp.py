"""Replicas on many ranks, reduced by torch's DistributedDataParallel; its buckets are summed along the tree.

Gradients become ready last layer first; DDP gathers them into buckets, and each is exchanged while the backward pass
goes on::

    backward     |g3|g2|g1|g0|
    buckets           [g3 g2][g1 g0]
    exchange          [  bucket 0  ][  bucket 1  ]

The user calls the model itself: of DDP only the hooks on gradients are used, and they are told by `backward` when to
work. So the model is what it is on one rank, and DDP can be made anew when other parameters learn.
"""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with the types themselves.

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch._C._distributed_c10d import GradBucket  # what torch.distributed hands on, with types
from torch.nn.parallel import DistributedDataParallel

from lockstep.collectives import Group, NativeAllReduce, Runs, open_all_reduce, translating_peer_errors
from lockstep.errors import SettingError, UsageError
from lockstep.strategies.buffers import Buffers
from lockstep.strategies.compression import Cast, Compression, Uncompressed
from lockstep.strategies.gradient_accumulation import (
    MicroBatchPosition,
    ParameterSet,
    TreeGradientAccumulator,
    as_real,
    divide_by_counts,
    rows_of,
    total_count,
)
from lockstep.strategies.module_states import sync_module_states, verify_module_states
from lockstep.strategies.multi_gpu import check_reached, spans_gpus
from lockstep.strategies.powersgd import PowerSGD
from lockstep.strategies.protocol import ReplicaAssignment, Strategy, StrategyContext
from lockstep.strategies.single_process import SingleProcess
from lockstep.strategies.sparse_gradients import no_rows, sparse_again, sparse_parameters
from lockstep.strategies.state_layout import ReplicatedLayout

Sum = torch.futures.Future[torch.Tensor]

#: MiB of gradients exchanged at once. Between processes of one machine gloo is fastest near 1 MiB and its link is slow,
#: so small buckets overlap best; between GPUs a bucket of torch's default size uses the link well.
_BUCKET_MB = {"cpu": 4.0, "cuda": 25.0}

# Torch 2.13 gave the argument a new name, and warns of the old one.
_BUFFERS_ARE_OURS: Final[dict[str, Any]] = {
    next(
        name
        for name in ("forward_sync_buffers", "broadcast_buffers")
        if name in inspect.signature(DistributedDataParallel).parameters
    ): False
}


@dataclass(frozen=True, slots=True)
class Options:
    """What ``ddp`` may be told."""

    compress: str = "none"  #: what ranks send: ``fp16``, ``bf16`` or ``powersgd``; the bits depend on their number then
    rank: int = 1  #: of PowerSGD's approximations: more are nearer to the gradient, and more to send
    start: int = 0  #: how many steps go by before PowerSGD begins

    def __post_init__(self) -> None:
        if self.compress not in _COMPRESSIONS:
            raise SettingError(f"strategy ddp: compress={self.compress!r}; give one of {', '.join(_COMPRESSIONS)}")
        if self.rank < 1 or self.start < 0:
            raise SettingError(
                f"strategy ddp: rank={self.rank}, start={self.start}; give a rank from 1 and a start from 0"
            )
        if self.compress != "powersgd" and (self.rank, self.start) != (1, 0):
            raise SettingError(
                f"strategy ddp: rank and start are PowerSGD's, and compress={self.compress}; leave them out, or write "
                "ddp:compress=powersgd"
            )


_COMPRESSIONS: Final[dict[str, Callable[[StrategyContext, Options], Compression]]] = {
    "none": lambda context, _: Uncompressed(context.group),
    "fp16": lambda context, _: Cast(context.group, torch.float16),
    "bf16": lambda context, _: Cast(context.group, torch.bfloat16),
    "powersgd": lambda context, options: PowerSGD(
        context.group, rank=options.rank, start=options.start, may_skip=context.dtype is torch.float16
    ),
}


def open_strategy(context: StrategyContext, options: Options) -> Strategy:
    """The strategy ``ddp``; one rank alone needs none, and has nothing to compress. Collective."""
    if context.group.size == 1:
        return SingleProcess(context.group, context.runs, exact=context.exact)
    if options.compress != "none" and context.exact:
        context.say(f"compress={options.compress}: the bits of the trained model depend on the number of ranks")
    return Ddp(
        context.group,
        context.runs,
        exact=context.exact and options.compress == "none",
        bucket_mb=context.bucket_mb,
        compression=_COMPRESSIONS[options.compress](context, options),
    )


@dataclass(slots=True, eq=False)
class _Model:
    """A model, and what reduces the gradients of that part of it which learns now."""

    module: nn.Module
    find_unused_parameters: bool
    static_graph: bool
    spans_gpus: bool
    process_group: Any  #: of DDP; None: the default one
    trained: tuple[nn.Parameter, ...] = ()  #: those whose gradients DDP waits for
    ddp: DistributedDataParallel | None = None  #: None where nothing learns
    first_static_step: bool = False  #: whether its graph is static, and its first step is to come


class _StartedBucket(NamedTuple):
    """A bucket, as DDP handed it over."""

    model: int  #: whose, by its number
    flat: torch.Tensor
    version: int  #: how often ``flat`` had been changed
    parameters: list[torch.Tensor]


class Ddp:
    """The strategy ``ddp``.

    Args:
        group: all ranks.
        runs: what each of them computes.
        exact: whether gradients are summed along the tree over micro-batches.
        bucket_mb: MiB of gradients exchanged at once; None: chosen.
        compression: how the ranks' gradients are summed where that is not exact; None: as they are.
    """

    meets_in_forward: Final = False
    can_update_trainable: Final = True

    def __init__(
        self,
        group: Group,
        runs: Runs,
        *,
        exact: bool,
        bucket_mb: float | None,
        compression: Compression | None = None,
    ) -> None:
        self.assignment: Final = ReplicaAssignment(group.rank, group.size)
        self.state_layout: Final = ReplicatedLayout()
        self._group: Final = group
        self._exact: Final = exact
        self._bucket_mb: Final = bucket_mb or _BUCKET_MB[group.device.type]
        self._all_reduce: Final = open_all_reduce(group, runs)
        self._compression: Final = compression or Uncompressed(group)
        self._buffers: Final = Buffers(self._all_reduce, group, group.device)
        self._native: Final = NativeAllReduce(group)  # of what DDP does not reduce
        self._models: list[_Model] = []
        self._names: dict[int, str] = {}  # of the parameters that DDP waits for
        self._forward_contexts = contextlib.ExitStack()
        self._step_has_begun = False
        self._accumulators: dict[ParameterSet, TreeGradientAccumulator] = {}
        self._awaited: dict[ParameterSet, int] = {}  # how many parameters DDP waits for in a target's backward pass
        self._models_by_target: dict[ParameterSet, dict[int, _Model]] = {}  # the models of a target, by their numbers
        self._now: tuple[TreeGradientAccumulator, MicroBatchPosition]  # within the backward pass of a rank's last turn
        self._started: list[_StartedBucket] = []  # buckets of this backward pass
        self._from_other_gpus: list[
            tuple[torch.Tensor, torch.Tensor]
        ] = []  # buckets of other GPUs, and their sums on this one
        self._deferred: dict[tuple[int, int], Callable[[], None]] | None = None  # sums to begin after it, if they must

    def setup_model(self, model: nn.Module, *, find_unused_parameters: bool, static_graph: bool = False) -> nn.Module:
        """``model`` itself, with rank 0's parameters and buffers on every rank. Collective."""
        verify_module_states(self._group, model)
        spans = spans_gpus(model)
        check_reached(model, self._group.device)
        if spans and not self._exact:
            raise SettingError(
                f"{type(model).__name__} lies on several GPUs of each rank, and then gradients are summed exactly; "
                "leave out reduction=fast and compress="
            )
        self._compression.setup_model(model)
        find_unused_parameters &= not static_graph  # they are found once
        # DDP tells the ranks which parameters were used, whenever a model is through: in which order, that depends
        # on the loss, of which a model may be no part on one rank. So it has a line of its own for that. NCCL's
        # lines are for one GPU of each rank; gloo takes what lies on any.
        process_group = (
            self._group.new_process_group(backend="gloo")
            if spans
            else self._group.new_process_group()
            if find_unused_parameters
            else self._group.process_group
        )
        self._models.append(_Model(model, find_unused_parameters, static_graph, spans, process_group))
        if not spans:
            sync_module_states(self._group, model)
        self._make_ddp(len(self._models) - 1, _trainable(model), init_sync=spans)
        self._buffers.setup_model(model)
        return model

    def update_trainable(self, target: ParameterSet) -> None:
        """See `UpdatesTrainable.update_trainable`."""
        self._buffers.check_known()
        for number, model in enumerate(self._models):
            inside = set(model.module.parameters())
            trained = [p for p in target.dense if p in inside]
            if trained and {id(p) for p in trained} != {id(p) for p in model.trained}:
                self._make_ddp(number, _trainable(model.module), init_sync=False)
        self._awaited.clear()
        self._models_by_target.clear()

    def _make_ddp(self, number: int, trained: Sequence[nn.Parameter], *, init_sync: bool) -> None:
        """From now on DDP waits for the gradients of ``trained`` in a model. Collective."""
        model = self._models[number]
        for parameter in model.trained:
            self._names.pop(id(parameter), None)
        model.trained = tuple(trained)
        # The old one takes its hooks from the parameters; before the new one adds its own.
        model.ddp = None
        if not trained:
            return
        sparse = list(sparse_parameters(model.module).values())
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model.module, sparse)
        on_one_gpu = self._group.device.type == "cuda" and not model.spans_gpus
        model.ddp = DistributedDataParallel(
            model.module,
            device_ids=[self._group.device] if on_one_gpu else None,
            **_BUFFERS_ARE_OURS,
            init_sync=init_sync,
            bucket_cap_mb=self._bucket_mb,
            gradient_as_bucket_view=True,
            find_unused_parameters=model.find_unused_parameters,
            process_group=model.process_group,
        )
        model.ddp.register_comm_hook(number, self._start_bucket)
        model.first_static_step = model.static_graph
        if not model.find_unused_parameters:
            names = {p: name for name, p in model.module.named_parameters()}
            self._names |= {id(p): names[p] for p in trained}

    def begin_micro_batch(self, position: MicroBatchPosition) -> None:
        """See `Strategy.begin_micro_batch`."""
        reducing = [model.ddp for model in self._models if model.ddp is not None]
        if not self._step_has_begun:
            # DDP lays out its buckets anew after the first step, in which all ranks meet. Left to the forward pass, one
            # rank could be there for the second model while another one already reduces the first.
            self._step_has_begun = True
            for ddp in reducing:
                ddp.reducer._rebuild_buckets()
        for ddp in reducing:
            # torch.compile cuts what it compiles in here at the borders of buckets.
            self._forward_contexts.enter_context(ddp._inside_ddp_forward())

    def backward(
        self, loss: torch.Tensor, weight: torch.Tensor | None, target: ParameterSet, position: MicroBatchPosition
    ) -> None:
        """See `Strategy.backward`."""
        if target not in self._accumulators:
            self._accumulators[target] = TreeGradientAccumulator(target, position.of)
        accumulator = self._accumulators[target]
        if not position.last:
            target.backward(loss, weight)
            if self._exact:
                accumulator.accumulate(position)
            return
        models = self._models_of(target)
        self._now, self._started = (accumulator, position), []
        # Which of several models comes first depends on the loss, which may differ between ranks; sums must not.
        self._deferred = {} if len(models) > 1 and any(m.find_unused_parameters for m in models.values()) else None
        for model in models.values():
            assert model.ddp is not None
            if model.first_static_step:
                # From here on, for DDP counts how often each gradient comes in the first step; with earlier turns, it
                # would wait for too many later.
                model.ddp._set_static_graph()
            if model.find_unused_parameters:
                accumulator.fill_missing(model.trained)
            # Torch has no public name for this but DDP's forward pass. That would make ready for the exchange in each
            # pass, and be surprised later where no backward pass follows, as when a GAN's generator learns through its
            # discriminator.
            model.ddp.reducer.prepare_for_backward([loss] if model.find_unused_parameters else [])
        with translating_peer_errors("the reduction of gradients"):
            target.backward(loss, weight)
            self._start_remaining_buckets(models)
            self._check_all_started(target)
            for _, begin in sorted((self._deferred or {}).items()):
                begin()
            tables = self._begin_sparse(target, accumulator, position)
            self._all_reduce.finish()
            self._compression.finish()
            self._native.finish()
        for parameter, table in tables:
            parameter.grad = sparse_again(table.view(len(parameter), -1), parameter)
        while self._from_other_gpus:
            home, total = self._from_other_gpus.pop()
            home.copy_(total)
        # Else the sums of earlier turns would live until the next reduction.
        del self._accumulators[target], self._now
        self._deferred = None

    def normalize_by_count(self, target: ParameterSet, samples: int, counted: int) -> None:
        """See `Strategy.normalize_by_count`."""
        divide_by_counts(target, samples, total_count(self._group, counted))

    def before_optimizer_step(self, target: ParameterSet) -> None:
        """Every rank makes every step."""

    def end_micro_batch(self, position: MicroBatchPosition) -> None:
        """See `Strategy.end_micro_batch`."""
        self._forward_contexts.close()
        self._step_has_begun = not position.last
        with translating_peer_errors("the reduction of buffers"):
            self._buffers.end_micro_batch(position)

    def evaluating(self) -> AbstractContextManager[None]:
        """The model is what it is."""
        return contextlib.nullcontext()

    def finish_training(self) -> None:
        """Every rank holds the model."""

    def discard_step(self) -> None:
        """See `Strategy.discard_step`."""
        self._forward_contexts.close()
        self._step_has_begun = False
        self._accumulators.clear()
        self._from_other_gpus.clear()
        self._buffers.restore()

    def resync(self) -> None:
        """See `Strategy.resync`."""
        self._buffers.resync()

    def state_dict(self) -> dict[str, Any]:
        """What the compression of gradients left over."""
        return self._compression.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Strategy.load_state_dict`."""
        self._compression.load_state_dict(state)

    def close(self) -> None:
        """See `Strategy.close`."""
        self._forward_contexts.close()
        self._all_reduce.close()
        self._compression.close()

    def _models_of(self, target: ParameterSet) -> dict[int, _Model]:
        """The models that ``target`` is about and DDP reduces, by their numbers."""
        if target not in self._models_by_target:
            self._models_by_target[target] = {
                number: model
                for number, model in enumerate(self._models)
                if model.ddp is not None and any(id(p) in target.places for p in model.trained)
            }
        return self._models_by_target[target]

    def _begin_sparse(
        self, target: ParameterSet, accumulator: TreeGradientAccumulator, position: MicroBatchPosition
    ) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Begin the sums of what DDP does not reduce; where each is to arrive, as `sparse_again` takes it."""
        arriving = []
        for parameter in (p for p in target.parameters if p in target.sparse):
            if self._exact:
                table = no_rows(parameter).view(-1)
                self._all_reduce.begin(table, accumulator.rows(position, parameter), position.of)
            else:
                table = (no_rows(parameter) if position.is_padding else rows_of(parameter)).view(-1)
                self._native.begin(table)
            arriving.append((parameter, table))
        return arriving

    # DDP is told that each bucket is done at once. Its buckets are what `.grad` shows, so the sums need not be handed
    # back to it: they only have to be there when `backward` returns.

    def _start_bucket(self, model: int, bucket: GradBucket) -> Sum:
        accumulator, position = self._now
        flat, parameters = bucket.buffer(), bucket.parameters()
        gradients = _views_of(flat, parameters)
        if self._exact:
            partials = [] if position.is_padding else accumulator.partials(position, parameters, gradients, flat)
            # The sum arrives in the same memory, and in a tensor of its own that counts its own changes.
            out = flat.data
            if flat.device != self._group.device:
                partials = [partial.to(self._group.device) for partial in partials]
                out = torch.empty_like(flat, device=self._group.device)
                self._from_other_gpus.append((flat.data, out))
            begin = functools.partial(self._all_reduce.begin, out, partials, position.of)
        else:
            if position.is_padding:
                flat.zero_()
            begin = functools.partial(self._compression.begin, flat, parameters, gradients)
        if self._deferred is None:
            begin()
        else:
            self._deferred[model, bucket.index()] = begin
        self._started.append(_StartedBucket(model, flat, flat._version, parameters))
        return _done(flat)

    def _start_remaining_buckets(self, models: Mapping[int, _Model]) -> None:
        """Models of which nothing was handed over, though other ranks may wait for it.

        No parameter had a part in this rank's loss, so DDP was never called; or it is a static graph's first step, in
        which DDP only counts.
        """
        begun = {bucket.model for bucket in self._started}
        for number, model in models.items():
            if model.ddp is not None and (
                model.first_static_step or (model.find_unused_parameters and number not in begun)
            ):
                model.ddp.reducer._delay_all_reduce()  # type: ignore[attr-defined]
            model.first_static_step = False

    def _check_all_started(self, target: ParameterSet) -> None:
        awaited = self._awaited.get(target)
        if awaited is None:
            awaited = self._awaited[target] = sum(id(p) in self._names for p in target.parameters)
        found = [bucket for bucket in self._started if not self._models[bucket.model].find_unused_parameters]
        if sum(len(bucket.parameters) for bucket in found) < awaited:
            unused = [self._names[id(p)] for p in target.parameters if id(p) in self._names and p.grad is None]
            raise UsageError(
                f"{len(unused) or 'some'} of {awaited} parameters had no part in the loss: {', '.join(unused[:5])}. "
                "Use them in forward(), freeze them with requires_grad_(False), or say "
                "run.model(model, find_unused_parameters=True), which costs a little in each step"
            )
        for bucket in self._started:
            if bucket.flat._version != bucket.version:
                names = [self._names.get(id(p), "?") for p in bucket.parameters]
                raise UsageError(
                    f"parameters got more gradient after theirs was sent, among them some of {', '.join(names[:5])}: "
                    "what checkpoint(..., use_reentrant=True) is given was called twice in one forward pass; say "
                    "use_reentrant=False, or run.model(model, static_graph=True)"
                )


def _done(flat: torch.Tensor) -> Sum:
    future = Sum()
    future.set_result(flat)
    return future


def _views_of(flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of ``parameters`` in the bucket ``flat``, complex ones as pairs of reals, as a bucket has them.

    `GradBucket.gradients` tells them with the strides of dense rows, whatever lies there; ``.grad`` has the
    parameter's.
    """
    pieces = flat.split([2 * p.numel() if p.is_complex() else p.numel() for p in parameters])
    return [
        piece.view(as_real(p.detach()).shape) if p.grad is None else as_real(p.grad)
        for p, piece in zip(parameters, pieces, strict=True)
    ]


def _trainable(model: nn.Module) -> tuple[nn.Parameter, ...]:
    """The parameters of ``model`` that learn now and whose gradients are dense, in order."""
    sparse = sparse_parameters(model)
    return tuple(p for p in model.parameters() if p.requires_grad and p not in sparse)
