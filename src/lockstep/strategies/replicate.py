"""One replica, on one rank, which holds the whole tree. Every other strategy is measured against it."""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

from lockstep.collectives import Group, Runs, open_exchange
from lockstep.strategies.buffers import Buffers
from lockstep.strategies.gradients import Pending, Target, Turn


class Replicate:
    """The strategy ``none``."""

    def __init__(self, group: Group, runs: Runs, *, exact: bool) -> None:
        self._exact: Final = exact
        self._buffers: Final = Buffers(open_exchange(group, runs), group.check_equal)
        self._pending: dict[Target, Pending] = {}

    def adopt(self, model: nn.Module, *, find_unused_parameters: bool) -> nn.Module:
        """``model`` itself."""
        self._buffers.adopt(model)
        return model

    def begin(self, turn: Turn) -> None:
        """Nothing has to be prepared."""

    def backward(self, loss: torch.Tensor, weight: torch.Tensor | None, target: Target, turn: Turn) -> None:
        """See `Strategy.backward`."""
        target.backward(loss, weight)
        if self._exact and turn.of > 1:
            if target not in self._pending:
                self._pending[target] = Pending(target, turn.of)
            self._pending[target].take(turn)
            if turn.last:
                self._pending.pop(target).give()

    def end(self, turn: Turn) -> None:
        """See `Strategy.end`."""
        self._buffers.settle(turn)

    def abandon(self) -> None:
        """See `Strategy.abandon`."""
        self._pending.clear()
        self._buffers.restore()

    def rebase(self) -> None:
        """See `Strategy.rebase`."""
        self._buffers.rebase()

    def close(self) -> None:
        """Nothing is held open."""
