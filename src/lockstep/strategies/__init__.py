"""How replicas are kept in step: one file for each way, behind one word."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from lockstep.collectives import Group, Runs
from lockstep.errors import SettingError
from lockstep.strategies.data_parallel import DataParallel
from lockstep.strategies.gradients import Target, Turn
from lockstep.strategies.replicate import Replicate

__all__ = ["STRATEGIES", "Strategy", "Target", "Turn", "by_name"]

#: The words that `by_name` knows.
STRATEGIES = ("none", "ddp")


class Strategy(Protocol):
    """What the loop asks of a strategy, in the order in which it asks."""

    def adopt(self, model: nn.Module, *, find_unused_parameters: bool) -> nn.Module:
        """The module to call instead of ``model``; equal on all ranks from now on. All ranks."""
        ...

    def begin(self, turn: Turn) -> None:
        """Before the forward pass of one micro-batch."""
        ...

    def backward(self, loss: torch.Tensor, weight: torch.Tensor | None, target: Target, turn: Turn) -> None:
        """After a rank's last turn of a step, ``.grad`` holds the sum over the step's micro-batches, on each rank.

        Each counts as ``weight * loss``, both of no dimension; None weighs 1.

        All ranks, on their last turns; before that, ``.grad`` may hold anything.
        """
        ...

    def end(self, turn: Turn) -> None:
        """After the backward passes of one micro-batch; after the last turn, buffers are in step too. All ranks."""
        ...

    def abandon(self) -> None:
        """The step in work is given up: its gradients and what it did to buffers are forgotten."""
        ...

    def rebase(self) -> None:
        """What models hold now is what the next step starts from, as after a checkpoint was loaded."""
        ...

    def close(self) -> None:
        """Nothing more is asked."""
        ...


def by_name(name: str, group: Group, runs: Runs, *, exact: bool, bucket_mb: float | None) -> Strategy:
    """The strategy called ``name`` for this group; one rank alone needs none. All ranks.

    Raises:
        SettingError: if there is no such strategy, or it cannot keep this many ranks in step.
    """
    if name not in STRATEGIES:
        raise SettingError(f"strategy={name!r}: give one of {', '.join(STRATEGIES)}")
    if group.size == 1:
        return Replicate(group, runs, exact=exact)
    if name == "none":
        raise SettingError(f"strategy='none' is for one rank, and there are {group.size}; use 'ddp' or start one rank")
    return DataParallel(group, runs, exact=exact, bucket_mb=bucket_mb)
