"""One replica, on one rank, which holds the whole tree. Every other strategy is measured against it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from lockstep.collectives import Group, Runs, open_exchange
from lockstep.errors import SettingError
from lockstep.strategies.buffers import Buffers
from lockstep.strategies.gradients import Pending, Target, Turn, divide_by_counts, total_count
from lockstep.strategies.holding import Whole
from lockstep.strategies.protocol import Share, Terms


@dataclass(frozen=True, slots=True)
class Options:
    """The strategy ``none`` has none."""


def open_strategy(terms: Terms, options: Options) -> Replicate:
    """The strategy ``none``.

    Raises:
        SettingError: if there are several ranks.
    """
    ranks = terms.group.size
    if ranks > 1:
        raise SettingError(f"strategy='none' is for one rank, and there are {ranks}; use 'ddp' or start one rank")
    return Replicate(terms.group, terms.runs, exact=terms.exact)


class Replicate:
    """The strategy ``none``.

    Args:
        group: of one rank.
        runs: the micro-batches of each rank.
        exact: whether gradients are folded along the tree.
        wrap: what is called in place of a model.
    """

    share: Final = Share(0, 1)
    meets_in_forward: Final = False
    takes_up: Final = True

    def __init__(
        self, group: Group, runs: Runs, *, exact: bool, wrap: Callable[[nn.Module], nn.Module] = lambda model: model
    ) -> None:
        self._wrap: Final = wrap
        self.holding: Final = Whole()
        self._group: Final = group
        self._exact: Final = exact
        self._buffers: Final = Buffers(open_exchange(group, runs), group, group.device)
        self._pending: dict[Target, Pending] = {}

    def adopt(self, model: nn.Module, *, find_unused_parameters: bool, static_graph: bool = False) -> nn.Module:
        """``model`` itself, or wrapped."""
        self._buffers.adopt(model)
        return self._wrap(model)

    def take_up(self, target: Target) -> None:
        """See `TakesUp.take_up`."""
        self._buffers.check_known()

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
        else:
            for parameter in target.sparse:
                if parameter.grad is not None:
                    # As a sum over ranks is: clipping before two entries of a row are added rounds otherwise.
                    parameter.grad = parameter.grad.coalesce()

    def divide(self, target: Target, samples: int, counted: int) -> None:
        """See `Strategy.divide`."""
        divide_by_counts(target, samples, total_count(self._group, counted))

    def own(self, target: Target) -> None:
        """Everything is this rank's."""

    def end(self, turn: Turn) -> None:
        """See `Strategy.end`."""
        self._buffers.settle(turn)

    def evaluating(self) -> AbstractContextManager[None]:
        """The model is what it is."""
        return contextlib.nullcontext()

    def settle(self) -> None:
        """The model is trained."""

    def abandon(self) -> None:
        """See `Strategy.abandon`."""
        self._pending.clear()
        self._buffers.restore()

    def rebase(self) -> None:
        """See `Strategy.rebase`."""
        self._buffers.rebase()

    def state(self) -> dict[str, Any]:
        """Nothing beside model and optimizer."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Nothing to put back."""

    def close(self) -> None:
        """Nothing is held open."""
