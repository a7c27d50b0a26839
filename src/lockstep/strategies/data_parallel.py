"""Replicas on many ranks, wrapped in torch's DistributedDataParallel; its buckets are summed along the tree.

Gradients become ready last layer first; DDP gathers them into buckets, and each is exchanged while the backward pass
goes on::

    backward     |g3|g2|g1|g0|
    buckets           [g3 g2][g1 g0]
    exchange          [  bucket 0  ][  bucket 1  ]
"""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with the types themselves.

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch._C._distributed_c10d import GradBucket  # what torch.distributed hands on, with types
from torch.nn.parallel import DistributedDataParallel

from lockstep.collectives import Group, Runs, naming_lost_peers, open_exchange
from lockstep.errors import SettingError, UsageError
from lockstep.strategies.buffers import Buffers
from lockstep.strategies.compress import Cast, Compression, Uncompressed
from lockstep.strategies.gradients import Pending, Target, Turn, divide_by_counts, total_count
from lockstep.strategies.holding import Whole
from lockstep.strategies.module_states import verify_module_states
from lockstep.strategies.placement import check_reached, spans_gpus
from lockstep.strategies.powersgd import PowerSGD
from lockstep.strategies.protocol import Share, Strategy, Terms
from lockstep.strategies.replicate import Replicate

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


_COMPRESSIONS: Final[dict[str, Callable[[Terms, Options], Compression]]] = {
    "none": lambda terms, _: Uncompressed(terms.group),
    "fp16": lambda terms, _: Cast(terms.group, torch.float16),
    "bf16": lambda terms, _: Cast(terms.group, torch.bfloat16),
    "powersgd": lambda terms, options: PowerSGD(
        terms.group, rank=options.rank, start=options.start, may_skip=terms.dtype is torch.float16
    ),
}


def open_strategy(terms: Terms, options: Options) -> Strategy:
    """The strategy ``ddp``; one rank alone needs none, and has nothing to compress. All ranks."""
    if terms.group.size == 1:
        return Replicate(terms.group, terms.runs, exact=terms.exact)
    if options.compress != "none" and terms.exact:
        terms.say(f"compress={options.compress}: the bits of the trained model depend on the number of ranks")
    return DataParallel(
        terms.group,
        terms.runs,
        exact=terms.exact and options.compress == "none",
        bucket_mb=terms.bucket_mb,
        compression=_COMPRESSIONS[options.compress](terms, options),
    )


class _Handed(NamedTuple):
    """A bucket, as DDP handed it over."""

    model: int  #: whose, by its number
    flat: torch.Tensor
    version: int  #: how often ``flat`` had been changed
    parameters: list[torch.Tensor]


class DataParallel:
    """The strategy ``ddp``.

    Args:
        group: all ranks.
        runs: what each of them computes.
        exact: whether gradients are summed along the tree over micro-batches.
        bucket_mb: MiB of gradients exchanged at once; None: chosen.
        compression: how the ranks' gradients are summed where that is not exact; None: as they are.
    """

    meets_in_forward: Final = False

    def __init__(
        self,
        group: Group,
        runs: Runs,
        *,
        exact: bool,
        bucket_mb: float | None,
        compression: Compression | None = None,
    ) -> None:
        self.share: Final = Share(group.rank, group.size)
        self.holding: Final = Whole()
        self._group: Final = group
        self._exact: Final = exact
        self._bucket_mb: Final = bucket_mb or _BUCKET_MB[group.device.type]
        self._exchange: Final = open_exchange(group, runs)
        self._compression: Final = compression or Uncompressed(group)
        self._buffers: Final = Buffers(self._exchange, group.check_equal, group.device)
        self._models: list[DistributedDataParallel] = []
        self._unlearnt: set[int] = set()  # models with a static graph before their first step, by their numbers
        self._names: dict[int, str] = {}  # of the parameters that DDP waits for
        self._held = contextlib.ExitStack()
        self._in_step = False
        self._pending: dict[Target, Pending] = {}
        self._awaited: dict[Target, int] = {}  # how many parameters DDP waits for in a target's backward pass
        self._learning: dict[Target, dict[int, DistributedDataParallel]] = {}  # the models of a target
        self._now: tuple[Pending, Turn]  # within the backward pass of a rank's last turn
        self._handed: list[_Handed] = []  # buckets of this backward pass
        self._away: list[tuple[torch.Tensor, torch.Tensor]] = []  # buckets of other GPUs, and their sums on this one
        self._waiting: dict[tuple[int, int], Callable[[], None]] | None = None  # sums to begin after it, if they must

    def adopt(self, model: nn.Module, *, find_unused_parameters: bool, static_graph: bool = False) -> nn.Module:
        """``model`` wrapped in DDP, with rank 0's parameters and buffers on every rank. All ranks."""
        verify_module_states(self._group, model)
        self._buffers.adopt(model)
        trainable = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
        if not trainable:
            return model
        find_unused_parameters &= not static_graph  # they are found once
        spans = spans_gpus(model)
        check_reached(model, self._group.device)
        if spans and not self._exact:
            raise SettingError(
                f"{type(model).__name__} lies on several GPUs of each rank, and then gradients are summed exactly; "
                "leave out reduction=fast and compress="
            )
        wrapped = DistributedDataParallel(
            model,
            device_ids=[self._group.device] if self._group.device.type == "cuda" and not spans else None,
            **_BUFFERS_ARE_OURS,
            bucket_cap_mb=self._bucket_mb,
            gradient_as_bucket_view=True,
            find_unused_parameters=find_unused_parameters,
            # DDP tells the ranks which parameters were used, whenever a model is through: in which order, that depends
            # on the loss, of which a model may be no part on one rank. So it has a line of its own for that. NCCL's
            # lines are for one GPU of each rank; gloo takes what lies on any.
            process_group=(
                self._group.line(backend="gloo")
                if spans
                else self._group.line()
                if find_unused_parameters
                else self._group.lines
            ),
        )
        if static_graph:
            self._unlearnt.add(len(self._models))
        wrapped.register_comm_hook(len(self._models), self._hand_over)
        if not find_unused_parameters:
            self._names |= trainable
        self._buffers.rebase()  # DDP has given every rank the buffers of rank 0
        self._models.append(wrapped)
        self._compression.adopt(model)
        _forbid_bypass(model, wrapped)
        return wrapped

    def begin(self, turn: Turn) -> None:
        """See `Strategy.begin`."""
        if not self._in_step:
            # DDP lays out its buckets anew after the first step, in which all ranks meet. Left to the forward pass, one
            # rank could be there for the second model while another one already reduces the first.
            self._in_step = True
            for model in self._models:
                model.reducer._rebuild_buckets()
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
        models = self._models_of(target)
        self._now, self._handed = (pending, turn), []
        # Which of several models comes first depends on the loss, which may differ between ranks; sums must not.
        self._waiting = {} if len(models) > 1 and any(m.find_unused_parameters for m in models.values()) else None
        for number, model in models.items():
            if number in self._unlearnt:
                # From here on, for DDP counts how often each gradient comes in the first step; with earlier turns, it
                # would wait for too many later.
                model._set_static_graph()
                model._static_graph_delay_allreduce_enqueued = True  # it would hand over after each first turn
            if model.find_unused_parameters:
                pending.fill_up(model.parameters())
            # Torch has no public name for this but the forward pass, see `begin`.
            model.reducer.prepare_for_backward([loss] if model.find_unused_parameters else [])
        with naming_lost_peers("the reduction of gradients"):
            target.backward(loss, weight)
            self._hand_over_rest(models)
            self._check_handed(target)
            for _, begin in sorted((self._waiting or {}).items()):
                begin()
            self._exchange.finish()
            self._compression.finish()
        while self._away:
            home, total = self._away.pop()
            home.copy_(total)
        # Else the sums of earlier turns would live until the next reduction.
        del self._pending[target], self._now
        self._waiting = None

    def divide(self, target: Target, samples: int, counted: int) -> None:
        """See `Strategy.divide`."""
        divide_by_counts(target, samples, total_count(self._group, counted))

    def own(self, target: Target) -> None:
        """Every rank makes every step."""

    def end(self, turn: Turn) -> None:
        """See `Strategy.end`."""
        self._held.close()
        self._in_step = not turn.last
        with naming_lost_peers("the reduction of buffers"):
            self._buffers.settle(turn)

    def evaluating(self) -> AbstractContextManager[None]:
        """The model is what it is."""
        return contextlib.nullcontext()

    def settle(self) -> None:
        """Every rank holds the model."""

    def abandon(self) -> None:
        """See `Strategy.abandon`."""
        self._held.close()
        self._in_step = False
        self._pending.clear()
        self._away.clear()
        self._buffers.restore()

    def rebase(self) -> None:
        """See `Strategy.rebase`."""
        self._buffers.rebase()

    def state(self) -> dict[str, Any]:
        """What the compression of gradients left over."""
        return self._compression.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See `Strategy.load_state`."""
        self._compression.load_state(state)

    def close(self) -> None:
        """See `Strategy.close`."""
        self._held.close()
        self._exchange.close()
        self._compression.close()

    def _models_of(self, target: Target) -> dict[int, DistributedDataParallel]:
        """The models that ``target`` is about, by their numbers."""
        if target not in self._learning:
            self._learning[target] = {
                number: model
                for number, model in enumerate(self._models)
                if any(id(p) in target.places for p in model.parameters())
            }
        return self._learning[target]

    # DDP is told that each bucket is done at once. Its buckets are what `.grad` shows, so the sums need not be handed
    # back to it: they only have to be there when `backward` returns.

    def _hand_over(self, model: int, bucket: GradBucket) -> Sum:
        pending, turn = self._now
        flat, parameters, gradients = bucket.buffer(), bucket.parameters(), bucket.gradients()
        if self._exact:
            partials = [] if turn.shadow else pending.partials(turn, parameters, gradients, flat)
            # The sum arrives in the same memory, and in a tensor of its own that counts its own changes.
            out = flat.data
            if flat.device != self._group.device:
                partials = [partial.to(self._group.device) for partial in partials]
                out = torch.empty_like(flat, device=self._group.device)
                self._away.append((flat.data, out))
            begin = functools.partial(self._exchange.begin, out, partials, turn.of)
        else:
            if turn.shadow:
                flat.zero_()
            begin = functools.partial(self._compression.begin, flat, parameters, gradients)
        if self._waiting is None:
            begin()
        else:
            self._waiting[model, bucket.index()] = begin
        self._handed.append(_Handed(model, flat, flat._version, parameters))
        return _done(flat)

    def _hand_over_rest(self, models: Mapping[int, DistributedDataParallel]) -> None:
        """Models of which nothing was handed over, though other ranks may wait for it.

        No parameter had a part in this rank's loss, so DDP was never called; or it is a static graph's first step, in
        which DDP only counts.
        """
        begun = {handed.model for handed in self._handed}
        for number, model in models.items():
            if number in self._unlearnt or (model.find_unused_parameters and number not in begun):
                model.reducer._delay_all_reduce()  # type: ignore[attr-defined]
            self._unlearnt.discard(number)

    def _check_handed(self, target: Target) -> None:
        awaited = self._awaited.get(target)
        if awaited is None:
            awaited = self._awaited[target] = sum(id(p) in self._names for p in target.parameters)
        found = [handed for handed in self._handed if not self._models[handed.model].find_unused_parameters]
        if sum(len(handed.parameters) for handed in found) < awaited:
            unused = [self._names[id(p)] for p in target.parameters if id(p) in self._names and p.grad is None]
            raise UsageError(
                f"{len(unused) or 'some'} of {awaited} parameters had no part in the loss: {', '.join(unused[:5])}. "
                "Use them in forward(), freeze them with requires_grad_(False), or say "
                "run.model(model, find_unused_parameters=True), which costs a little in each step"
            )
        for handed in self._handed:
            if handed.flat._version != handed.version:
                names = [self._names.get(id(p), "?") for p in handed.parameters]
                raise UsageError(
                    f"parameters got more gradient after theirs was sent, among them some of {', '.join(names[:5])}: "
                    "what checkpoint(..., use_reentrant=True) is given was called twice in one forward pass; say "
                    "use_reentrant=False, or run.model(model, static_graph=True)"
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
