"""Steps that each rank makes by itself: the strategy ``none`` on the micro-batches of one rank.

step of 5 micro-batches     0 1 | 2 3 4
rank 0                      0 1             of 2, gradient of their mean, its own optimizer step
rank 1                          0 1 2       of 3, likewise
"""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

from lockstep.collectives import alone
from lockstep.errors import SettingError
from lockstep.strategies.batchnorm import normalises_over_ranks
from lockstep.strategies.gradients import Target, Turn, divide_by_counts
from lockstep.strategies.protocol import Terms
from lockstep.strategies.replicate import Replicate

BY_THEMSELVES: Final = "ranks step by themselves, so each would skip other steps and have a loss scale of its own"


class LocalSteps:
    """The part of a `Strategy` that computes gradients: here of the rank's own micro-batches, and of no others."""

    def __init__(self, terms: Terms) -> None:
        self._rank: Final = terms.group.rank
        self._ranks: Final = terms.group.size
        self._runs: Final = terms.runs
        here = alone(terms.group.device)
        self._one: Final = Replicate(here, lambda _, micro_batches: range(micro_batches), exact=terms.exact)
        self._samples = 0  # that this rank has met in the step

    def adopt(self, model: nn.Module) -> None:
        """Keep the buffers of ``model`` at the mean over each step's micro-batches of this rank.

        Raises:
            SettingError: for layers that normalise over all ranks, which do not meet here.
        """
        if normalises_over_ranks(model):
            raise SettingError(
                "sync_batchnorm: its forward passes meet those of all ranks, and here each rank steps by itself; leave "
                "it out (running statistics are averaged with the parameters), or use strategy='ddp'"
            )
        self._one.adopt(model, find_unused_parameters=False)

    def begin(self, turn: Turn) -> None:
        """See `Strategy.begin`."""
        if not turn.shadow:
            self._samples += turn.samples
            self._one.begin(self._here(turn))

    def backward(self, loss: torch.Tensor, weight: torch.Tensor | None, target: Target, turn: Turn) -> None:
        """After the rank's last turn ``.grad`` holds the mean over its own samples; nothing, if it had none.

        Then its optimizers leave parameters and moments alone.
        """
        if turn.shadow:
            _forget(target)
            return
        self._one.backward(loss, weight, target, self._here(turn))
        # The weight of each micro-batch is its part of the whole step.
        if turn.last and self._samples != turn.step_samples:
            divide_by_counts(target, turn.step_samples, self._samples)

    def divide(self, target: Target, samples: int, counted: int) -> None:
        """See `Strategy.divide`; by the rank's own count. If it counted nothing, it makes no step."""
        if self._samples and (counted or self._ranks == 1):
            self._one.divide(target, self._samples, counted)
        else:
            _forget(target)

    def end(self, turn: Turn) -> None:
        """See `Strategy.end`; buffers hold the mean over the rank's own micro-batches."""
        if turn.shadow:
            self._one.abandon()
        else:
            self._one.end(self._here(turn))
        if turn.last:
            self._samples = 0

    def abandon(self) -> None:
        """See `Strategy.abandon`."""
        self._samples = 0
        self._one.abandon()

    def rebase(self) -> None:
        """See `Strategy.rebase`."""
        self._one.rebase()

    def _here(self, turn: Turn) -> Turn:
        """The same turn in a step that is made of this rank's micro-batches alone."""
        run = self._runs(self._rank, turn.of)
        return Turn(turn.index - run.start, len(run), turn.last, False, turn.samples, turn.step_samples)


def _forget(target: Target) -> None:
    for parameter in target.parameters:
        parameter.grad = None
