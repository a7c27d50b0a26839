"""Torch's DistributedDataParallel around one model: the calls of DDP that are used, most without a public name.

    reduce(trained)            DDP puts a hook on each gradient, and divides the gradients into buckets
    begin_step()               DDP may lay out its buckets again
    inside_forward()           torch.compile cuts the model where buckets end
    expect_backward(...)       from now on DDP gives each bucket that is ready to its communication hook
    start_remaining_buckets()  also those for which no hook was called

The model itself is called by the user, and DDP's own forward pass never is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch._C._distributed_c10d import GradBucket  # what torch.distributed exports, with types
from torch.nn.parallel import DistributedDataParallel

from lockstep.batch import MicroBatchPosition
from lockstep.collectives import Group
from lockstep.strategies.parts.gradient_accumulation import TreeGradientAccumulator
from lockstep.strategies.parts.sparse_gradients import sparse_parameters
from lockstep.torch_private import (
    delay_all_reduce,
    inside_forward,
    leave_out,
    rebuild_buckets,
    set_static_graph,
    version_of,
)

# Torch 2.13 gave the argument a new name, and warns of the old one.
_BUFFERS_ARE_OURS: Final[dict[str, Any]] = {
    next(
        name
        for name in ("forward_sync_buffers", "broadcast_buffers")
        if name in inspect.signature(DistributedDataParallel).parameters
    ): False
}


class ReducedByRun(DistributedDataParallel):
    """Torch's own class, told apart from a `DistributedDataParallel` that a script has put around a model."""


class DdpReducer:
    """Divides the gradients of a model into buckets, and calls a hook with each bucket that is ready.

    Args:
        model: as the user calls it.
        number: of the model.
        group: all ranks.
        hook: DDP's communication hook, which gets ``number`` and a bucket.
        bucket_mb: MiB of gradients exchanged at once.
        find_unused_parameters: as DDP's.
        static_graph: as DDP's; unused parameters are then found once.
        spans_gpus: whether the model lies on several GPUs of each rank.
    """

    def __init__(
        self,
        model: nn.Module,
        number: int,
        group: Group,
        hook: Callable[..., torch.futures.Future[torch.Tensor]],
        bucket_mb: float,
        *,
        find_unused_parameters: bool,
        static_graph: bool,
        spans_gpus: bool,
    ) -> None:
        self.model: Final = model
        self.find_unused_parameters: Final = find_unused_parameters and not static_graph
        #: The parameters whose gradients DDP waits for.
        self.trained: tuple[nn.Parameter, ...] = ()
        self._number: Final = number
        self._hook: Final = hook
        self._bucket_mb: Final = bucket_mb
        self._static_graph: Final = static_graph
        on_one_gpu = group.device.type == "cuda" and not spans_gpus
        self._device_ids: Final = [group.device] if on_one_gpu else None
        # After the backward pass of a model, DDP exchanges which of its parameters were used. The order of models
        # depends on the loss, in which a model may have no part on some rank: so each model has a process group of its
        # own. NCCL's process groups are for one GPU of each rank; gloo takes tensors on any GPU.
        self._process_group: Final = (
            group.new_process_group(backend="gloo")
            if spans_gpus
            else group.new_process_group(backend=group.backend)
            if self.find_unused_parameters
            else group.process_group
        )
        self._ddp: ReducedByRun | None = None  # None if no parameter is trainable
        self._strides: list[tuple[int, ...]] = []  # of the parameters, which the gradients in buckets have, too
        self._first_static_step = False  # whether the graph is static, and its first step still to come

    @property
    def is_active(self) -> bool:
        """Whether some parameters of the model are trained."""
        return self._ddp is not None

    def trainable(self) -> tuple[nn.Parameter, ...]:
        """The parameters of the model that are trainable now and have dense gradients, in order."""
        sparse = sparse_parameters(self.model)
        return tuple(p for p in self.model.parameters() if p.requires_grad and p not in sparse)

    def reduce(self, trained: Sequence[nn.Parameter], *, init_sync: bool) -> None:
        """Wait for the gradients of ``trained`` from now on; ``init_sync``: first copy rank 0's values. Collective."""
        self.trained = tuple(trained)
        # The old DDP removes its hooks from the parameters when it is deleted, which must be before the new DDP adds
        # its own.
        self._ddp = None
        self._strides = [parameter.stride() for parameter in trained]
        if not trained:
            return
        sparse = list(sparse_parameters(self.model).values())
        leave_out(self.model, sparse)
        self._ddp = ReducedByRun(
            self.model,
            device_ids=self._device_ids,
            **_BUFFERS_ARE_OURS,
            init_sync=init_sync,
            bucket_cap_mb=self._bucket_mb,
            gradient_as_bucket_view=True,
            find_unused_parameters=self.find_unused_parameters,
            process_group=self._process_group,
        )
        self._ddp.register_comm_hook(self._number, self._hook)
        self._first_static_step = self._static_graph

    def strides_have_changed(self) -> bool:
        """Whether parameters lie in memory in another order than in the buckets, as after a change to channels_last.

        Optimizers round differently where gradients have other strides than parameters.
        """
        return self._strides != [parameter.stride() for parameter in self.trained]

    def begin_step(self) -> None:
        """Let DDP lay out its buckets again after the first step, before a step's first forward pass. Collective."""
        if self._ddp is not None:
            rebuild_buckets(self._ddp)

    def inside_forward(self) -> AbstractContextManager[object]:
        """A context for a forward pass, in which torch.compile cuts the model at the ends of buckets."""
        return nullcontext() if self._ddp is None else inside_forward(self._ddp)

    def expect_backward(self, accumulator: TreeGradientAccumulator, loss: torch.Tensor) -> None:
        """Prepare the backward pass of ``loss``, in which gradients are summed over ranks."""
        assert self._ddp is not None
        if self._first_static_step:
            # Not earlier: in the first step DDP counts how often each gradient comes; counting earlier micro-batches,
            # it would later wait for too many.
            set_static_graph(self._ddp)
        if self.find_unused_parameters:
            accumulator.fill_missing(self.trained)
        # DDP's own forward pass would prepare sums in each pass, and fail later if no backward pass follows, as when a
        # GAN's generator is trained through its discriminator.
        self._ddp.reducer.prepare_for_backward([loss] if self.find_unused_parameters else [])

    def start_remaining_buckets(self, *, has_begun: bool) -> None:
        """Start the sums that other ranks may wait for and this rank has not started, after the backward pass.

        Such sums exist if no parameter had a part in this rank's loss, so that DDP was never called, or in the first
        step of a static graph, in which DDP only counts. ``has_begun`` says whether the sum of some bucket was started.
        """
        unseen = self.find_unused_parameters and not has_begun
        if self._ddp is not None and (self._first_static_step or unseen):
            delay_all_reduce(self._ddp)
        self._first_static_step = False


class StartedBucket(NamedTuple):
    """A bucket whose sum was started."""

    model: int  #: number of the bucket's model
    flat: torch.Tensor
    version: int  #: how often ``flat`` had been changed
    parameters: list[torch.Tensor]


@dataclass(slots=True, eq=False)
class BucketReduction:
    """The state of the backward pass of a rank's last micro-batch, in which gradients are summed over ranks."""

    accumulator: TreeGradientAccumulator
    position: MicroBatchPosition
    defers: bool  #: whether sums are started after the backward pass, in an order that does not depend on the loss
    started: list[StartedBucket] = field(default_factory=list)
    deferred: dict[tuple[int, int], Callable[[], None]] = field(default_factory=dict)  #: by model and bucket
    #: buckets on other GPUs of this rank, and their sums on the rank's own GPU
    elsewhere: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def start(self, model: int, bucket: GradBucket, begin: Callable[[], None]) -> None:
        """Call ``begin``, which starts the sum of ``bucket``: now, or in `start_deferred`."""
        if self.defers:
            self.deferred[model, bucket.index()] = begin
        else:
            begin()
        self.started.append(StartedBucket(model, bucket.buffer(), version_of(bucket.buffer()), bucket.parameters()))

    def start_deferred(self) -> None:
        """Start the sums that had to wait for the end of the backward pass, in the order of models and buckets."""
        for _, begin in sorted(self.deferred.items()):
            begin()

    def copy_to_other_gpus(self) -> None:
        """Copy the sums of buckets of this rank's other GPUs back to these GPUs."""
        while self.elsewhere:
            flat, total = self.elsewhere.pop()
            flat.copy_(total)


def finished(flat: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """The result of DDP's communication hook for a bucket with which DDP has nothing more to do."""
    future = torch.futures.Future[torch.Tensor]()
    future.set_result(flat)
    return future
