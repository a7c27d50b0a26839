"""The strategy ``auto``, which chooses ddp, zero or fsdp by the model's size, the free memory and the link.

    fits whole                     ddp      one sum of all gradients a step: the least traffic
    fits without Adam's moments    zero     the moments divided
    else                           fsdp     everything divided, at half as much traffic again

All three give the same bits, so the choice changes only the duration of a step. Strategies that would be faster on a
slow link, but have other results, are only mentioned.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, NoReturn

import torch
from torch import nn

from lockstep.collectives import Group
from lockstep.errors import UsageError
from lockstep.formatting import size
from lockstep.strategies.delegation import DelegatingStrategy
from lockstep.strategies.replicated import ddp, zero
from lockstep.strategies.sharded import fully_sharded
from lockstep.strategies.strategy import ReplicaAssignment, Strategy, StrategyContext
from lockstep.strategy_kinds import DdpOptions, FsdpOptions, NoOptions, ZeroOptions

_MIB = 1 << 20
# The part of free memory that may be planned with: activations and libraries need the rest.
_USABLE = 0.6
# Sums of these sizes tell the latency and the rate of the link.
_SMALL, _LARGE = 1 << 12, _MIB
_TRIES = 3
# Below this rate, in bytes a second, compressing gradients is worth mentioning.
_SLOW = 250e6 / 8


def open_strategy(context: StrategyContext, options: NoOptions) -> Auto:
    """The strategy ``auto``. Collective."""
    return Auto(context)


@dataclass(frozen=True, slots=True)
class Link:
    """The latency and rate of sums over ranks, between machines or GPUs."""

    latency_s: float
    rate: float  #: bytes a second of a ring's traffic

    def bucket_mb(self, size_bytes: int) -> float:
        """MiB of gradients to be summed at once, so that sums overlap the backward pass at little cost.

        More buckets begin earlier, but each costs a latency: for K buckets of S bytes in all, the cost that cannot be
        hidden is about K * latency + S / K / rate, which is least for buckets of sqrt(latency * rate * S) bytes.
        """
        return min(25.0, max(0.5, math.sqrt(self.latency_s * self.rate * size_bytes) / _MIB))


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen strategy, and the reason."""

    name: str
    why: str
    bucket_mb: float | None = None


def choose(parameter_bytes: int, free_bytes: int, ranks: int, link: Link | None) -> Choice:
    """The choice of a strategy for a model of ``parameter_bytes`` on ``ranks`` ranks. A pure function.

    Args:
        parameter_bytes: of all parameters.
        free_bytes: of each rank's memory, beside the parameters; the least of all ranks.
        ranks: number of ranks.
        link: between ranks; None where ranks sum in the memory of one machine, or for one rank.
    """
    # Beside the parameters: gradients of the same size, and Adam's two moments, since the optimizer is not known yet.
    whole, divided = 3 * parameter_bytes, parameter_bytes + 2 * parameter_bytes // ranks
    usable = int(_USABLE * free_bytes)
    has = f"gradients and Adam's moments take {size(whole)} and {size(usable)} can be used"
    if ranks == 1 or whole <= usable:
        name, why = "ddp", has
    elif divided <= usable:
        name, why = "zero", f"{has}; {size(divided)} with the moments divided between {ranks} ranks"
    else:
        name, why = "fsdp", f"{has}; so parameters are divided between {ranks} ranks, too"
    if link is None:
        return Choice(name, why)
    bucket_mb = round(link.bucket_mb(parameter_bytes), 1)
    why += f"; a link of {link.rate * 8 / 1e9:.2g} Gbit/s, {link.latency_s * 1e3:.2g} ms: buckets of {bucket_mb:g} MiB"
    if link.rate < _SLOW:
        why += ". On so slow a link ddp:compress=powersgd or diloco is much faster; each computes something else"
    return Choice(name, why, bucket_mb)


def measure(group: Group, clock: Callable[[], float] = time.perf_counter) -> Link:
    """Measure the link between the ranks of ``group`` by a few sums, in less than one second. Collective."""
    took = {}
    for size_bytes in (_SMALL, _LARGE):
        tensor = torch.zeros(size_bytes // 4, device=group.device)
        tries = []
        for _ in range(1 + _TRIES):  # the first opens connections
            group.barrier("measuring of the link")
            began = clock()
            group.sum_tensor(tensor, "measuring of the link")
            if group.device.type == "cuda":
                torch.cuda.synchronize(group.device)
            tries.append(clock() - began)
        took[size_bytes] = min(tries[1:])
    latency, whole = max(
        zip(group.gather_objects(took[_SMALL], "latency"), group.gather_objects(took[_LARGE], "rate"), strict=True),
        key=lambda both: both[1],
    )
    travels = 2 * (group.size - 1) / group.size * _LARGE
    return Link(latency, travels / max(whole - latency, 1e-6))


def _refuse(*_: object, **__: object) -> NoReturn:
    raise UsageError("strategy='auto' chooses when it sees the model: call `model = run.model(model)` first")


class _Undecided(Strategy):
    """The strategy inside `Auto` before the first model is known; refuses all work."""

    state_layout = property(_refuse)
    setup_model = resync = backward = normalize_by_count = end_micro_batch = end_replay = discard_step = _refuse

    def close(self) -> None:
        """Do nothing, since nothing was opened."""


class Auto(DelegatingStrategy):
    """The strategy ``auto``, which delegates to a strategy that is chosen for the first model."""

    def __init__(self, context: StrategyContext) -> None:
        self.assignment = ReplicaAssignment(context.group.rank, context.group.size)
        self._context: Final = context
        self._chosen: Strategy = _Undecided()

    def setup_model(self, model: nn.Module, *, find_unused_parameters: bool, static_graph: bool = False) -> nn.Module:
        """Choose a strategy for the first model, and let it set up each model. Collective."""
        if isinstance(self._chosen, _Undecided):
            self._chosen = self._choose(model)
        return self._chosen.setup_model(model, find_unused_parameters=find_unused_parameters, static_graph=static_graph)

    def _choose(self, model: nn.Module) -> Strategy:
        group = self._context.group
        parameter_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        free_bytes = min(group.gather_objects(self._context.free_bytes(), "free memory"))
        on_links = group.size > 1 and (group.device.type == "cuda" or not group.on_one_machine)
        choice = choose(parameter_bytes, free_bytes, group.size, measure(group) if on_links else None)
        self._context.say(f"strategy auto: {choice.name}, for {choice.why}")
        context = replace(self._context, bucket_mb=self._context.bucket_mb or choice.bucket_mb)
        if choice.name == "zero":
            return zero.open_strategy(context, ZeroOptions())
        if choice.name == "fsdp":
            return fully_sharded.open_strategy(context, FsdpOptions())
        return ddp.open_strategy(context, DdpOptions())

    def delegate(self) -> Strategy:
        """The chosen strategy."""
        return self._chosen
