"""The states of random generators on their way from stage to stage: over the CPU, beside what GPUs send.

    host     forward 1 ── state ──►            what the generators of a GPU will have drawn is known when it is queued
    GPU               forward 1 ── activations ──►

With the activations, a state would arrive on the GPU, and the host would wait for it there before each forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

from lockstep.collectives import Group

_WHAT: Final = "the state of random generators"


class RandomStates:
    """Hands states on between the stages of a replica.

    Args:
        group: the ranks of the replica.
        rank_of: which of them has each stage.
    """

    def __init__(self, group: Group, rank_of: Sequence[int]) -> None:
        self._group: Final = group
        self._rank_of: Final = rank_of
        self._sending: Final[list[Callable[[], None]]] = []
        self._here: Final[dict[int, torch.Tensor]] = {}  # between stages of this rank

    def send(self, stage: int, micro_batch: int, state: torch.Tensor) -> None:
        """``state``, on the CPU, is what ``stage`` has left of a micro-batch: the next stage goes on from it."""
        to, tag = self._rank_of[stage + 1], self._tag(stage + 1, micro_batch)
        if to == self._group.rank:
            self._here[tag] = state
        else:
            self._sending.append(self._group.begin_send(state, to, _WHAT, tag))

    def receive(self, stage: int, micro_batch: int, like: torch.Tensor) -> torch.Tensor:
        """What the stage before ``stage`` has left of a micro-batch, as long as ``like``; waits until it is known."""
        source, tag = self._rank_of[stage - 1], self._tag(stage, micro_batch)
        if source == self._group.rank:
            return self._here.pop(tag)
        state = torch.empty_like(like)
        self._group.receive(state, source, _WHAT, tag)
        return state

    def finish(self) -> None:
        """The step is over: wait until the other ranks have what was sent to them."""
        sending = self._sending[:]
        self._sending.clear()
        for arrives in sending:
            arrives()

    def discard(self) -> None:
        """Forget what is under way."""
        self._sending.clear()
        self._here.clear()

    def _tag(self, stage: int, micro_batch: int) -> int:
        """By which it is known: ranks may compute stages in another order than others receive what they leave."""
        return micro_batch * len(self._rank_of) + stage
