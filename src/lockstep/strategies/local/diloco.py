"""The strategy ``diloco``: ranks step separately for long, and their mean change is a step of an outer optimizer.

DiLoCo (arXiv 2311.08105), and with ``fragments`` and ``overlap`` Streaming DiLoCo (arXiv 2501.18512)::

    --strategy diloco:period=8,fragments=2,overlap=1

    step                1 2 3 4 5 6 7 8 9
    fragment 0                b a               b  begin: hand this rank's change since the fragment's start,
    fragment 1                        b a          the pseudo-gradient, to the exchange, which goes on in the background
                                                a  apply: outer step with the mean over ranks, from the fragment's start

The outer optimizer is SGD with Nesterov momentum, as torch's, on the mean pseudo-gradient; all ranks make the same
step. Without ``overlap`` ranks restart from its result. With ``overlap`` ranks have stepped meanwhile, and mix the
result with their own parameters, whose share is ``mix``. Fragments are equal parts of all trained parameters, cut
without regard to layers, so the peak of the traffic is a ``fragments``-th.

A step is one optimizer step of each rank, on the mean gradient of its own micro-batches, clipped by its own norm. The
result depends on the number of ranks; an equal number gives equal bits.

- The inner optimizer's moments stay each rank's own; nothing of them is averaged or forgotten while training.
- Each rank changes its own running statistics of BatchNorm and other buffers; they are averaged at the end of each
  period, also with ``overlap``. Models with neither buffers nor frozen parameters need no such average.
- Evaluations and checkpoints see the mean over ranks of parameters, buffers and moments. A checkpoint also holds the
  outer optimizer and each rank's own, so the same number of ranks goes on exactly, also within a period, and with an
  exchange begun. Another number starts from the mean and keeps the outer optimizer; another strategy, from the mean.
  At the end of `Run.epochs` the mean stays.

Memory of a rank: 2 M more, for M bytes of parameters, and an exchange of M / fragments. Traffic of a rank, in bytes a
step: 2 M (n - 1) / (n period) on n ranks; half of it with ``wire=bf16`` or ``fp16``, which are then summed in that
format.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from lockstep.batch import MicroBatchPosition
from lockstep.strategies.local.flat_ranges import FlatRange, by_dtype, cut, gather, scatter, sizes_of
from lockstep.strategies.local.local_steps import NO_FP16_REASON, LocalStrategy
from lockstep.strategies.strategy import StateDict, StrategyContext
from lockstep.strategy_kinds import DilocoOptions

_WIRES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def open_strategy(context: StrategyContext, options: DilocoOptions) -> DiLoCo:
    """The strategy ``diloco``; on one rank, only its outer optimizer. Collective.

    Raises:
        SettingError: with precision fp16.
    """
    context.refuse_fp16("diloco", NO_FP16_REASON)
    return DiLoCo(context, options)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The schedule of the fragments' exchanges; steps are counted from 1."""

    period: int
    fragments: int
    overlap: int

    def begins(self, step: int) -> int | None:
        """The fragment whose exchange begins after ``step``: each once a period, the last at the period's end."""
        place = (step - 1) % self.period + 1
        for fragment in range(self.fragments):
            if place == self.period * (fragment + 1) // self.fragments:
                return fragment
        return None

    def applies(self, step: int) -> int | None:
        """The fragment whose exchange is applied after ``step``, before another exchange may begin."""
        return self.begins(step - self.overlap) if step > self.overlap else None

    def as_tuple(self) -> tuple[int, int, int]:
        """The values that two equal schedules have in common."""
        return self.period, self.fragments, self.overlap


class OuterOptimizer:
    """The outer optimizer: the starts of its fragments, and its momentum; equal on all ranks."""

    def __init__(self, lr: float, momentum: float, fragments: int) -> None:
        self._lr: Final = lr
        self._momentum: Final = momentum
        self._fragments: Final = fragments
        self._parameters: list[nn.Parameter] = []
        self._start: list[torch.Tensor] = []  # of each parameter
        self._velocity: list[torch.Tensor] = []
        self._ranges: list[list[list[FlatRange]]] = []  # of each fragment, for each type of numbers

    def add_parameters(self, parameters: list[nn.Parameter]) -> None:
        """Add the new ones of all ``parameters`` so far, with their present values as start."""
        new = parameters[len(self._parameters) :]
        self._parameters += new
        start = [p.detach().clone(memory_format=torch.contiguous_format) for p in new]
        self._start += start
        self._velocity += [torch.zeros_like(s) for s in start]
        sizes, of_types = sizes_of(self._parameters), []
        for places in by_dtype(self._parameters):
            cuts = cut([sizes[place] for place in places], self._fragments)
            of_types.append([[FlatRange(places[p.index], p.first, p.end) for p in ranges] for ranges in cuts])
        self._ranges = [[cuts[f] for cuts in of_types if cuts[f]] for f in range(self._fragments)]

    def pseudo_gradient(self, fragment: int) -> list[torch.Tensor]:
        """The pseudo-gradient of a fragment: its change since the start, negated; one flat tensor for each type."""
        device = self._parameters[0].device
        return [
            gather(self._start, ranges, device).sub_(gather(self._parameters, ranges, device))
            for ranges in self._ranges[fragment]
        ]

    def step(self, fragment: int, gradients: list[torch.Tensor], mix: float) -> None:
        """Make a step of SGD with Nesterov momentum, as torch's; a share ``mix`` of the parameters' values stays."""
        for ranges, gradient in zip(self._ranges[fragment], gradients, strict=True):
            device = self._parameters[0].device
            start, velocity = gather(self._start, ranges, device), gather(self._velocity, ranges, device)
            velocity.mul_(self._momentum).add_(gradient)
            start.sub_(gradient.add(velocity, alpha=self._momentum), alpha=self._lr)
            scatter(self._velocity, ranges, velocity)
            scatter(self._start, ranges, start)
            mixed = gather(self._parameters, ranges, device).mul_(mix).add_(start, alpha=1 - mix) if mix else start
            scatter(self._parameters, ranges, mixed)

    def restart(self) -> None:
        """Start from the parameters' present values; the momentum stays."""
        for parameter, start in zip(self._parameters, self._start, strict=True):
            start.copy_(parameter.detach())

    def state_dict(self) -> StateDict:
        """The start of each parameter, and the momentum."""
        return {"start": list(self._start), "velocity": list(self._velocity)}

    def load_state_dict(self, state: StateDict) -> None:
        """Load `state_dict`."""
        for tensors, saved in ((self._start, state["start"]), (self._velocity, state["velocity"])):
            for tensor, value in zip(tensors, saved, strict=True):
                tensor.copy_(value)


class DiLoCo(LocalStrategy):
    """The strategy ``diloco``."""

    def __init__(self, context: StrategyContext, options: DilocoOptions) -> None:
        super().__init__(context)
        self._options: Final = options
        self._ranks: Final = context.group.size
        self._device: Final = context.group.device
        self._schedule: Final = Schedule(options.period, options.fragments, options.overlap)
        self._outer: Final = OuterOptimizer(options.outer_lr, options.outer_momentum, options.fragments)
        self._in_flight: list[torch.Tensor] = []  # the exchange that was begun and is not applied yet
        self._arrived_mean: list[torch.Tensor] = []  # or its mean
        self._left_start = False  # whether parameters have left the outer optimizer's start

    def setup_model(self, model: nn.Module, *, find_unused_parameters: bool, static_graph: bool = False) -> nn.Module:
        """``model`` itself. Collective."""
        super().setup_model(model, find_unused_parameters=find_unused_parameters)
        self._outer.add_parameters(self._replicas.trained)
        return model

    def end_micro_batch(self, position: MicroBatchPosition) -> None:
        """After the last micro-batch, begin and apply the exchanges of fragments that are due. Collective then."""
        self._local.end_micro_batch(position)
        if not position.last:
            return
        self._steps += 1
        self._left_start = True
        self._replicas.mark_stepped()
        beginning = self._schedule.begins(self._steps)
        if beginning is not None:
            self._begin_exchange(beginning)
        applied = self._schedule.applies(self._steps)
        if applied is not None:
            self._apply_exchange(applied)
        if self._steps % self._options.period == 0:
            self._replicas.average_untrained()
            if self._options.fragments == 1 and not self._options.overlap:
                self._replicas.mark_averaged()
                self._left_start = False
            self._local.resync()

    def finish_training(self) -> None:
        """Give every rank the mean, for good, from which the outer optimizer then starts. Collective."""
        self._finish_exchange()
        self._arrived_mean = []
        self._replicas.average()
        self._left_start = False
        self.resync()

    def resync(self) -> None:
        """Start from the models' present values."""
        super().resync()
        if not self._left_start:
            self._outer.restart()  # else values set by the script would count as progress

    def state_dict(self) -> StateDict:
        """The outer optimizer, the exchange under way, and each rank's own. Collective.

        After `AveragedLayout.optimizer_state` of each optimizer.
        """
        self._finish_exchange()
        return {
            "steps": self._steps,
            "away": self._left_start,
            "schedule": self._schedule.as_tuple(),
            "arrived": list(self._arrived_mean),
            "outer": self._outer.state_dict(),
            "replicas": self._replicas.state_dict(self._layout.optimizers),
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Load `state_dict`; ranks start from the mean, if another strategy or number of ranks saved. Collective."""
        self._steps, self._left_start = (state["steps"], state["away"]) if state else (0, False)
        self._in_flight, self._arrived_mean = [], []
        self._replicas.load_state_dict(state.get("replicas"), self._layout.optimizers, self._say)
        if state:
            self._outer.load_state_dict(state["outer"])
            if state["schedule"] == self._schedule.as_tuple():
                self._arrived_mean = [mean.to(self._device) for mean in state["arrived"]]
            elif state["arrived"]:
                self._say("the exchange under way when the run was saved is dropped, for its schedule was another")
        self.resync()

    def _begin_exchange(self, fragment: int) -> None:
        wire = _WIRES[self._options.wire]
        self._in_flight = [moved if wire is None else moved.to(wire) for moved in self._outer.pseudo_gradient(fragment)]
        for flat in self._in_flight:
            self._averager.begin(flat)

    def _finish_exchange(self) -> None:
        """Wait for the mean of the exchange that is under way, if there is one. Collective."""
        if self._in_flight:
            self._averager.finish()
            sums = [s if s.is_floating_point() and s.itemsize > 2 else s.float() for s in self._in_flight]
            self._arrived_mean, self._in_flight = [s.div_(self._ranks) for s in sums], []

    def _apply_exchange(self, fragment: int) -> None:
        self._finish_exchange()
        if self._arrived_mean:  # else the mean was dropped, as at the end of training
            self._outer.step(fragment, self._arrived_mean, self._options.mix if self._options.overlap else 0.0)
            self._arrived_mean = []
