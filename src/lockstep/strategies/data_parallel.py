"""Replicas on many ranks, wrapped in torch's DistributedDataParallel; its buckets are summed along the tree.

Gradients become ready last layer first; DDP gathers them into buckets, and each is exchanged while the backward pass
goes on::

    backward     |g3|g2|g1|g0|
    buckets           [g3 g2][g1 g0]
    exchange          [  bucket 0  ][  bucket 1  ]
"""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with the types themselves.

import contextlib
import inspect
from typing import Any, Final

import torch
from torch import nn
from torch._C._distributed_c10d import GradBucket  # what torch.distributed hands on, with types
from torch.nn.parallel import DistributedDataParallel

from lockstep.collectives import FastExchange, Group, Runs, naming_lost_peers, open_exchange
from lockstep.errors import UsageError
from lockstep.strategies.buffers import Buffers
from lockstep.strategies.gradients import Pending, Target, Turn

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


class DataParallel:
    """The strategy ``ddp``."""

    def __init__(self, group: Group, runs: Runs, *, exact: bool, bucket_mb: float | None) -> None:
        self._group: Final = group
        self._exact: Final = exact
        self._bucket_mb: Final = bucket_mb or _BUCKET_MB[group.device.type]
        self._exchange: Final = open_exchange(group, runs)
        self._fast: Final = FastExchange()
        self._buffers: Final = Buffers(self._exchange, group.check_equal)
        self._models: list[DistributedDataParallel] = []
        self._names: dict[int, str] = {}  # of the parameters that DDP waits for
        self._held = contextlib.ExitStack()
        self._pending: dict[Target, Pending] = {}
        self._awaited: dict[Target, int] = {}  # how many parameters DDP waits for in a target's backward pass
        self._learning: dict[Target, list[DistributedDataParallel]] = {}  # the models of a target
        self._now: tuple[Pending, Turn]
        self._summed = 0  # parameters whose bucket has been handed to the exchange in this backward pass

    def adopt(self, model: nn.Module, *, find_unused_parameters: bool) -> nn.Module:
        """``model`` wrapped in DDP, with rank 0's parameters and buffers on every rank. All ranks."""
        self._group.check_equal(
            "the model's parameters and buffers",
            [(n, tuple(t.shape), t.dtype) for n, t in model.state_dict().items() if isinstance(t, torch.Tensor)],
        )
        trainable = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
        if not trainable:
            return model
        wrapped = DistributedDataParallel(
            model,
            device_ids=[self._group.device] if self._group.device.type == "cuda" else None,
            **_BUFFERS_ARE_OURS,
            bucket_cap_mb=self._bucket_mb,
            gradient_as_bucket_view=True,
            find_unused_parameters=find_unused_parameters,
        )
        wrapped.register_comm_hook(None, self._sum_exactly if self._exact else self._sum_fast)
        if not find_unused_parameters:
            self._names |= trainable
        self._buffers.adopt(model)
        self._models.append(wrapped)
        _forbid_bypass(model, wrapped)
        return wrapped

    def begin(self, turn: Turn) -> None:
        """See `Strategy.begin`."""
        # DDP would make ready for the exchange in each forward pass, and be surprised later where no backward pass
        # follows, as when a GAN's generator learns through its discriminator. So only `backward` makes it ready.
        for model in self._models:
            self._held.enter_context(model.no_sync())

    def backward(self, loss: torch.Tensor, weight: torch.Tensor | None, target: Target, turn: Turn) -> None:
        """See `Strategy.backward`."""
        if target not in self._pending:
            self._pending[target] = Pending(target, turn.of)
        pending = self._pending[target]
        if not turn.last:
            target.backward(loss, weight)
            if self._exact:
                pending.take(turn)
            return
        self._now, self._summed = (pending, turn), 0
        for model in self._models_of(target):
            if model.find_unused_parameters:
                pending.fill_up(model.parameters())
            model.reducer.prepare_for_backward([loss] if model.find_unused_parameters else [])
        with naming_lost_peers("the reduction of gradients"):
            target.backward(loss, weight)
            self._check_all_summed(target)
            self._exchange.finish()
            self._fast.finish()
        del self._pending[target]

    def end(self, turn: Turn) -> None:
        """See `Strategy.end`."""
        self._held.close()
        with naming_lost_peers("the reduction of buffers"):
            self._buffers.settle(turn)

    def abandon(self) -> None:
        """See `Strategy.abandon`."""
        self._held.close()
        self._pending.clear()
        self._buffers.restore()

    def rebase(self) -> None:
        """See `Strategy.rebase`."""
        self._buffers.rebase()

    def close(self) -> None:
        """See `Strategy.close`."""
        self._held.close()
        self._exchange.close()

    def _models_of(self, target: Target) -> list[DistributedDataParallel]:
        if target not in self._learning:
            self._learning[target] = [m for m in self._models if any(id(p) in target.places for p in m.parameters())]
        return self._learning[target]

    # DDP is told that each bucket is done at once. Its buckets are what `.grad` shows, so the sums need not be handed
    # back to it: they only have to be there when `backward` returns.

    def _sum_exactly(self, state: object, bucket: GradBucket) -> Sum:
        pending, turn = self._now
        flat, parameters = bucket.buffer(), bucket.parameters()
        self._summed += len(parameters)
        partials = [] if turn.shadow else pending.partials(turn, parameters, bucket.gradients(), flat)
        self._exchange.begin(flat, partials, turn.of)
        return _done(flat)

    def _sum_fast(self, state: object, bucket: GradBucket) -> Sum:
        _, turn = self._now
        flat = bucket.buffer()
        self._summed += len(bucket.parameters())
        if turn.shadow:
            flat.zero_()
        self._fast.begin(flat)
        return _done(flat)

    def _check_all_summed(self, target: Target) -> None:
        awaited = self._awaited.get(target)
        if awaited is None:
            awaited = self._awaited[target] = sum(id(p) in self._names for p in target.parameters)
        if self._summed < awaited:
            unused = [self._names[id(p)] for p in target.parameters if id(p) in self._names and p.grad is None]
            raise UsageError(
                f"{len(unused) or 'some'} of {awaited} parameters had no part in the loss: {', '.join(unused[:5])}. "
                "Use them in forward(), freeze them with requires_grad_(False), or say "
                "run.model(model, find_unused_parameters=True), which costs a little in each step"
            )


def _done(flat: torch.Tensor) -> Sum:
    future = Sum()
    future.set_result(flat)
    return future


def _forbid_bypass(model: nn.Module, wrapped: DistributedDataParallel) -> None:
    """Calling ``model`` instead of ``wrapped`` in training raises: its gradients would not be summed as planned."""
    inside = False

    def enter(*_: object) -> None:
        nonlocal inside
        inside = True

    def leave(*_: object) -> None:
        nonlocal inside
        inside = False

    def check(*_: object) -> None:
        if not inside and torch.is_grad_enabled() and model.training:
            raise UsageError(
                f"{type(model).__name__} was called past its wrapper, so ranks would drift apart; "
                "call what run.model(...) returned"
            )

    wrapped.register_forward_pre_hook(enter)
    wrapped.register_forward_hook(leave, always_call=True)
    model.register_forward_pre_hook(check)
