"""Replicas on many ranks, reduced by torch's DistributedDataParallel; its buckets are summed along the tree.

Gradients become ready last layer first; DDP gathers them into buckets, and each is exchanged while the backward pass
goes on::

    backward     |g3|g2|g1|g0|
    buckets           [g3 g2][g1 g0]
    exchange          [  bucket 0  ][  bucket 1  ]

The user calls the model itself: of DDP only the hooks on gradients are used, and `backward` enables them. So the model
is unchanged from one rank, and DDP can be made again when other parameters are trained.
"""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with the types themselves.

import contextlib
import functools
from collections.abc import Callable
from typing import Final

import torch
from torch import nn
from torch._C._distributed_c10d import GradBucket  # what torch.distributed exports, with types

from lockstep.batch import MicroBatchPosition
from lockstep.collectives import Group, NativeAllReduce, Runs, open_all_reduce, translating_peer_errors
from lockstep.errors import SettingError, UsageError
from lockstep.formatting import plural
from lockstep.strategies.parts.buffers import Buffers
from lockstep.strategies.parts.gradient_accumulation import (
    ParameterSet,
    TreeGradientAccumulator,
    align_gradients,
    begin_total,
    divide_by_counts,
    rows_of,
    views_of,
)
from lockstep.strategies.parts.module_states import sync_module_states, verify_module_states
from lockstep.strategies.parts.multi_gpu import check_reached, spans_gpus
from lockstep.strategies.parts.sparse_gradients import no_rows, sparse_again
from lockstep.strategies.parts.state_layout import ReplicatedLayout
from lockstep.strategies.replicated.compression import Cast, Compression, Uncompressed
from lockstep.strategies.replicated.ddp_reducer import BucketReduction, DdpReducer, finished
from lockstep.strategies.replicated.powersgd import PowerSGD
from lockstep.strategies.replicated.single_process import SingleProcess
from lockstep.strategies.strategy import ReplicaAssignment, StateDict, StatePart, Strategy, StrategyContext
from lockstep.strategy_kinds import DdpOptions
from lockstep.torch_private import require_ddp, version_of

#: MiB of gradients exchanged at once. Between processes of one machine gloo is fastest near 1 MiB and its link is slow,
#: so small buckets overlap best; between GPUs a bucket of torch's default size uses the link well.
_BUCKET_MB = {"cpu": 4.0, "cuda": 25.0}


_COMPRESSIONS: Final[dict[str, Callable[[StrategyContext, DdpOptions], Compression]]] = {
    "none": lambda context, _: Uncompressed(context.group),
    "fp16": lambda context, _: Cast(context.group, torch.float16),
    "bf16": lambda context, _: Cast(context.group, torch.bfloat16),
    "powersgd": lambda context, options: PowerSGD(
        context.group, rank=options.rank, start=options.start, may_skip=context.dtype is torch.float16
    ),
}


def open_strategy(context: StrategyContext, options: DdpOptions) -> Strategy:
    """The strategy ``ddp``; for a single rank `SingleProcess`, without compression. Collective."""
    if context.group.size == 1:
        return SingleProcess(context.group, context.runs, exact=context.exact)
    require_ddp()
    if options.compress != "none" and context.exact:
        context.say(f"compress={options.compress}: the bits of the trained model depend on the number of ranks")
    return Ddp(
        context.group,
        context.runs,
        exact=context.exact and options.compress == "none",
        bucket_mb=context.bucket_mb,
        compression=_COMPRESSIONS[options.compress](context, options),
    )


class Ddp(Strategy):
    """The strategy ``ddp``.

    Args:
        group: all ranks.
        runs: the micro-batches of each rank.
        exact: whether gradients are summed along the tree over micro-batches.
        bucket_mb: MiB of gradients exchanged at once; None: chosen.
        compression: how gradients are summed over ranks if not ``exact``; None: uncompressed.
    """

    can_update_trainable = True
    repeats_other_ranks = True

    def __init__(
        self,
        group: Group,
        runs: Runs,
        *,
        exact: bool,
        bucket_mb: float | None,
        compression: Compression | None = None,
    ) -> None:
        self.assignment = ReplicaAssignment(group.rank, group.size)
        self.state_layout = ReplicatedLayout()
        self._group: Final = group
        self._exact: Final = exact
        self._bucket_mb: Final = bucket_mb or _BUCKET_MB[group.device.type]
        self._all_reduce: Final = open_all_reduce(group, runs)
        self._compression: Final = compression or Uncompressed(group)
        # Else each pass would add to the gradients that compression has not sent yet.
        self.repeats_step = isinstance(self._compression, Uncompressed)
        # With compression, each rank holds gradients that are not sent yet.
        self.state_part = StatePart(0, 1, self.state_layout) if isinstance(self._compression, Uncompressed) else None
        self._buffers: Final = Buffers(self._all_reduce, group)
        self._native: Final = NativeAllReduce(group)  # for gradients that DDP does not reduce
        self._models: Final[list[DdpReducer]] = []
        self._names: dict[int, str] = {}  # of the parameters that DDP waits for
        self._awaited: dict[ParameterSet, int] = {}  # how many parameters DDP waits for in a target's backward pass
        self._models_by_target: dict[ParameterSet, dict[int, DdpReducer]] = {}  # ... and the models, by number
        self._step_has_begun = False
        self._buffers_are_moved = False  # whether buffers have moved already, before the step's end
        self._forward_contexts = contextlib.ExitStack()
        self._accumulators: dict[ParameterSet, TreeGradientAccumulator] = {}  # of this step
        self._reduction: BucketReduction | None = None  # within the backward pass of a rank's last micro-batch

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
        reducer = DdpReducer(
            model,
            len(self._models),
            self._group,
            self._start_bucket,
            self._bucket_mb,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            spans_gpus=spans,
        )
        self._models.append(reducer)
        if not spans:
            sync_module_states(self._group, model)
        self._reduce(reducer, init_sync=spans)
        self._buffers.setup_model(model)
        return model

    def update_trainable(self, target: ParameterSet) -> None:
        """Sum the gradients of the parameters of ``target``, in each model, from now on. Collective."""
        self._buffers.check_known()
        for reducer in self._models:
            inside = set(reducer.model.parameters())
            trained = [p for p in target.dense if p in inside]
            if trained and {id(p) for p in trained} != {id(p) for p in reducer.trained}:
                self._reduce(reducer, init_sync=False)
        self._awaited.clear()
        self._models_by_target.clear()

    def _reduce(self, reducer: DdpReducer, *, init_sync: bool) -> None:
        """Sum the gradients of a model's trainable parameters from now on. Collective."""
        for parameter in reducer.trained:
            self._names.pop(id(parameter), None)
        reducer.reduce(reducer.trainable(), init_sync=init_sync)
        if not reducer.find_unused_parameters:
            names = {p: name for name, p in reducer.model.named_parameters()}
            self._names |= {id(p): names[p] for p in reducer.trained}

    def resync(self) -> None:
        """Start from the buffers that models hold, and from the parameters as they lie in memory. Collective."""
        for reducer in self._models:
            if reducer.strides_have_changed():
                self._reduce(reducer, init_sync=False)
        self._buffers.resync()

    def begin_micro_batch(self, position: MicroBatchPosition) -> None:
        """Tell DDP of a forward pass; in a step's first pass, DDP may lay out its buckets again, on all ranks."""
        if not self._step_has_begun:
            # If the forward pass did this, a rank could lay out the buckets of the second model while another rank
            # already reduces the first model.
            self._step_has_begun = True
            for reducer in self._models:
                reducer.begin_step()
        if not self._exact:  # else torch.compile would make other kernels than on one rank, for parts of the model
            for reducer in self._models:
                self._forward_contexts.enter_context(reducer.inside_forward())

    def backward(
        self, loss: torch.Tensor, weight: torch.Tensor | None, target: ParameterSet, position: MicroBatchPosition
    ) -> None:
        """Compute the gradients; for the last micro-batch, sum them over all ranks while the backward pass goes on.

        Raises:
            UsageError: naming parameters that had no part in the loss, or that got a second gradient.
        """
        if target not in self._accumulators:
            self._accumulators[target] = TreeGradientAccumulator(target, position.of)
        accumulator = self._accumulators[target]
        if not position.last:
            target.backward(loss, weight)
            if self._exact:
                accumulator.accumulate(position)
            return
        models = self._models_of(target)
        # The order of several models depends on the loss, which may differ between ranks; the order of sums must not.
        defers = len(models) > 1 and any(m.find_unused_parameters for m in models.values())
        self._reduction = reduction = BucketReduction(accumulator, position, defers)
        for reducer in models.values():
            reducer.expect_backward(accumulator, loss)
        with translating_peer_errors("the reduction of gradients"):
            target.backward(loss, weight)
            begun = {bucket.model for bucket in reduction.started}
            for number, reducer in models.items():
                reducer.start_remaining_buckets(has_begun=number in begun)
            self._check_all_started(target, reduction)
            reduction.start_deferred()
            tables = self._begin_sparse(target, reduction)
            self._all_reduce.finish()
            self._compression.finish()
            self._native.finish()
        for parameter, table in tables:
            parameter.grad = sparse_again(table.view(len(parameter), -1), parameter)
        reduction.copy_to_other_gpus()
        if self._exact and self._group.device.type == "cuda":
            align_gradients(target.dense)
        # Else the sums of earlier micro-batches would stay in memory until the next reduction.
        del self._accumulators[target]
        self._reduction = None

    def begin_count(self, counted: int) -> Callable[[], int]:
        """Begin to add up the items of all ranks. Collective."""
        return begin_total(self._group, counted)

    def normalize_by_count(self, target: ParameterSet, samples: int, counted: int) -> None:
        """Divide by the number of items of the step."""
        divide_by_counts(target, samples, counted)

    def end_micro_batch(self, position: MicroBatchPosition) -> None:
        """Restore buffers; after the last micro-batch, move buffers by the mean over the step. Collective then."""
        self._forward_contexts.close()
        self._step_has_begun = not position.last
        if not self._buffers_are_moved:
            self.before_update(position)
        self._buffers_are_moved = False

    def replay(
        self, loss: torch.Tensor, weight: torch.Tensor | None, target: ParameterSet, position: MicroBatchPosition
    ) -> None:
        """Drop the gradients; skip another rank's micro-batch if DDP tracks the parameters that this rank has used."""
        tracks = any(model.find_unused_parameters for model in self._models_of(target).values())
        if not (tracks and position.is_other_ranks):
            super().replay(loss, weight, target, position)

    def end_replay(self) -> None:
        """Restore buffers."""
        self._forward_contexts.close()
        self._buffers.restore(discards_step=False)

    def before_update(self, position: MicroBatchPosition) -> None:
        """Move buffers by the mean over the step, whose rest then needs no other rank. Collective."""
        with translating_peer_errors("the reduction of buffers"):
            self._buffers.end_micro_batch(position)
        self._buffers_are_moved = True

    def discard_step(self) -> None:
        """Drop gradients, and restore buffers."""
        self._forward_contexts.close()
        self._step_has_begun = self._buffers_are_moved = False
        self._accumulators.clear()
        self._reduction = None
        self._buffers.restore()

    def state_dict(self) -> StateDict:
        """The gradients that the compression has not sent yet."""
        return self._compression.state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        """Let the compression go on with the gradients not sent yet; empty: start over. Collective."""
        self._compression.load_state_dict(state)

    def close(self) -> None:
        """End the threads and connections by which gradients are summed."""
        self._forward_contexts.close()
        self._all_reduce.close()
        self._compression.close()

    def _models_of(self, target: ParameterSet) -> dict[int, DdpReducer]:
        """The models with parameters of ``target`` whose gradients DDP sums, by model number."""
        if target not in self._models_by_target:
            self._models_by_target[target] = {
                number: reducer
                for number, reducer in enumerate(self._models)
                if reducer.is_active and any(id(p) in target.places for p in reducer.trained)
            }
        return self._models_by_target[target]

    def _begin_sparse(
        self, target: ParameterSet, reduction: BucketReduction
    ) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Begin the sums of sparse gradients, which DDP does not reduce; returns their tables, for `sparse_again`."""
        position = reduction.position
        arriving = []
        for parameter in (p for p in target.parameters if p in target.sparse):
            if self._exact:
                table = no_rows(parameter).view(-1)
                self._all_reduce.begin(table, reduction.accumulator.rows(position, parameter), position.of)
            else:
                table = (no_rows(parameter) if position.is_padding else rows_of(parameter)).view(-1)
                self._native.begin(table)
            arriving.append((parameter, table))
        return arriving

    # The hook reports each bucket as done at once. Buckets are the memory of `.grad`, so the sums need not be returned
    # to DDP: sums only have to be complete when `backward` returns.

    def _start_bucket(self, model: int, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """DDP's communication hook: start the sum of ``bucket``, of the model with the number ``model``."""
        reduction = self._reduction
        assert reduction is not None
        accumulator, position = reduction.accumulator, reduction.position
        flat, parameters = bucket.buffer(), bucket.parameters()
        gradients = views_of(flat, parameters)
        if self._exact:
            partials = [] if position.is_padding else accumulator.partials(position, parameters, gradients, flat)
            # The sum arrives in the same memory, but in a tensor of its own that counts its own changes.
            out = flat.data
            if flat.device != self._group.device:
                partials = [partial.to(self._group.device) for partial in partials]
                out = torch.empty_like(flat, device=self._group.device)
                reduction.elsewhere.append((flat.data, out))
            begin = functools.partial(self._all_reduce.begin, out, partials, position.of)
        else:
            if position.is_padding:
                flat.zero_()
            begin = functools.partial(self._compression.begin, flat, parameters, gradients)
        reduction.start(model, bucket, begin)
        return finished(flat)

    def _check_all_started(self, target: ParameterSet, reduction: BucketReduction) -> None:
        awaited = self._awaited.get(target)
        if awaited is None:
            awaited = self._awaited[target] = sum(id(p) in self._names for p in target.parameters)
        started = [bucket for bucket in reduction.started if not self._models[bucket.model].find_unused_parameters]
        if sum(len(bucket.parameters) for bucket in started) < awaited:
            unused = [self._names[id(p)] for p in target.parameters if id(p) in self._names and p.grad is None]
            if not unused:  # DDP's hooks are on the parameters from before
                raise UsageError(
                    "parameters were given another type, replaced or tied after run.model(...): do that before it"
                )
            raise UsageError(
                f"{len(unused)} of {plural(awaited, 'parameter')} had no part in the loss: "
                f"{', '.join(unused[:5])}. Use them in forward(), freeze them with requires_grad_(False), or say "
                "run.model(model, find_unused_parameters=True), which costs a little in each step"
            )
        for bucket in reduction.started:
            if version_of(bucket.flat) != bucket.version:
                names = [self._names.get(id(p), "?") for p in bucket.parameters]
                raise UsageError(
                    f"parameters got more gradient after theirs was sent, among them some of {', '.join(names[:5])}: "
                    "what checkpoint(..., use_reentrant=True) is given was called twice in one forward pass; say "
                    "use_reentrant=False, or run.model(model, static_graph=True). Or the script has put the model into "
                    "a DistributedDataParallel before run.model(...): leave that out"
                )
