"""Replicas that divide the optimizer's work and memory: each rank steps its own parameters and hands them on.

backward, reduction          as with ddp: .grad is the same on all ranks
the optimizer's step         rank 0: A B      rank 1: C       rank 2: D E       each its own parameters
then                         A B C D E        A B C D E       A B C D E         which all ranks receive

It is the first of the three stages of ZeRO (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054). With AdamW in
fp32 a parameter takes 4 bytes for itself, 4 for its gradient and 8/W of W ranks' memory for the state of the optimizer,
where ddp takes 16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from lockstep.collectives import Group, Spread, open_spread
from lockstep.owners import owners_of
from lockstep.strategies.data_parallel import DataParallel
from lockstep.strategies.gradients import Target, Turn
from lockstep.strategies.holding import OwnedStates
from lockstep.strategies.protocol import Share, Strategy, Terms
from lockstep.strategies.replicate import Replicate


@dataclass(frozen=True, slots=True)
class Options:
    """The strategy ``zero`` has none."""


def open_strategy(terms: Terms, options: Options) -> Strategy:
    """The strategy ``zero``; one rank alone owns everything, and needs none. All ranks."""
    if terms.group.size == 1:
        return Replicate(terms.group, terms.runs, exact=terms.exact)
    replicas = DataParallel(terms.group, terms.runs, exact=terms.exact, bucket_mb=terms.bucket_mb)
    return Zero(terms.group, replicas, open_spread(terms.group))


class Zero:
    """The strategy ``zero``: the bits of ``ddp``, for optimizers that step each parameter by itself, as torch's do.

    The user's own optimizer steps: where a parameter has no gradient, optimizers leave it alone and make no state for
    it. So its groups, hooks and schedulers are what they are on one rank, and so is the state that is saved. An
    optimizer that makes its states when it is made, such as Adagrad, keeps the useless ones, too.
    """

    meets_in_forward: Final = False
    takes_up: Final = True

    def __init__(self, group: Group, replicas: DataParallel, spread: Spread) -> None:
        self.share: Final = Share(group.rank, group.size)
        self.holding: Final = OwnedStates(group, self._owner_of)
        self._rank: Final = group.rank
        self._replicas: Final = replicas
        self._spread: Final = spread
        self._owners: Final[dict[int, int]] = {}  # of parameters, by their ids
        self._loads: list[int] = [0] * group.size  # bytes of parameters that each rank owns
        self._stepped: list[Target] = []  # in this step

    def adopt(self, model: nn.Module, *, find_unused_parameters: bool, static_graph: bool = False) -> nn.Module:
        """As ``ddp`` does, and from now on each parameter has an owner. All ranks."""
        adopted = self._replicas.adopt(model, find_unused_parameters=find_unused_parameters, static_graph=static_graph)
        # What is frozen has an owner, too, to whom its state belongs if it learns later, also after a resume.
        frozen = [p for p in model.parameters() if not p.requires_grad]
        self._share_out([p for p in model.parameters() if p.requires_grad])
        loads, self._loads = self._loads, [0] * len(self._loads)
        self._share_out(frozen)
        self._loads = loads
        return adopted

    def take_up(self, target: Target) -> None:
        """See `TakesUp.take_up`. What learns anew gets an owner; what does not learn any more keeps its own."""
        self._replicas.take_up(target)
        self._share_out(target.parameters)

    def _share_out(self, parameters: Sequence[nn.Parameter]) -> None:
        new = [p for p in parameters if id(p) not in self._owners]
        owners, self._loads = owners_of([p.numel() * p.element_size() for p in new], self._loads)
        self._owners.update(zip(map(id, new), owners, strict=True))

    def begin(self, turn: Turn) -> None:
        """See `Strategy.begin`."""
        self._replicas.begin(turn)

    def backward(self, loss: torch.Tensor, weight: torch.Tensor | None, target: Target, turn: Turn) -> None:
        """See `Strategy.backward`."""
        self._replicas.backward(loss, weight, target, turn)

    def divide(self, target: Target, samples: int, counted: int) -> None:
        """See `Strategy.divide`."""
        self._replicas.divide(target, samples, counted)

    def own(self, target: Target) -> None:
        """See `Strategy.own`."""
        for parameter in target.parameters:
            if self._owner_of(parameter) != self._rank:
                parameter.grad = None
        self._stepped.append(target)

    def end(self, turn: Turn) -> None:
        """See `Strategy.end`."""
        if turn.last:
            parameters = [p for target in self._stepped for p in target.parameters]
            self._spread([p.detach() for p in parameters], [self._owner_of(p) for p in parameters])
            self._stepped.clear()
        self._replicas.end(turn)

    def evaluating(self) -> AbstractContextManager[None]:
        """See `Strategy.evaluating`."""
        return self._replicas.evaluating()

    def settle(self) -> None:
        """See `Strategy.settle`."""
        self._replicas.settle()

    def abandon(self) -> None:
        """See `Strategy.abandon`."""
        self._stepped.clear()
        self._replicas.abandon()

    def rebase(self) -> None:
        """See `Strategy.rebase`."""
        self._replicas.rebase()

    def state(self) -> dict[str, Any]:
        """See `Strategy.state`."""
        return self._replicas.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See `Strategy.load_state`."""
        self._replicas.load_state(state)

    def close(self) -> None:
        """See `Strategy.close`."""
        self._replicas.close()
        self._spread.close()

    def _owner_of(self, parameter: nn.Parameter) -> int:
        # One that is in no model, or frozen, has no gradient that ranks share: it is as on one rank.
        return self._owners.get(id(parameter), 0)
