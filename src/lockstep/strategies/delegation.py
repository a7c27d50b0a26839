"""A strategy around another one, to which it leaves everything that it does not do itself.

Zero ──► Ddp
TensorParallel ──► FullySharded
Auto ──► the strategy that it chooses
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from lockstep.strategies.strategy import Strategy


class _Delegated:
    """An attribute or a method that is the other strategy's, unless an instance sets it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: DelegatingStrategy | None, owner: type) -> object:
        return self if instance is None else getattr(instance.delegate(), self._name)


def _delegated() -> Any:
    """A `_Delegated`, of whatever type it stands for."""
    return _Delegated()


class DelegatingStrategy(Strategy):
    """A strategy that does, and is, what another one does and is, but for what its class overrides."""

    @abstractmethod
    def delegate(self) -> Strategy:
        """The other strategy."""

    assignment = _delegated()
    state_layout = _delegated()
    state_part = _delegated()
    update_share = _delegated()
    divides_construction = _delegated()
    can_update_trainable = _delegated()
    forward_is_collective = _delegated()
    repeats_step = _delegated()
    repeats_bits = _delegated()
    repeats_other_ranks = _delegated()

    construct = _delegated()
    make_stages = _delegated()
    plan_layers = _delegated()
    setup_model = _delegated()
    check_optimizer = _delegated()
    update_trainable = _delegated()
    resync = _delegated()
    begin_micro_batch = _delegated()
    begin_count = _delegated()
    backward = _delegated()
    normalize_by_count = _delegated()
    before_update = _delegated()
    before_optimizer_step = _delegated()
    end_micro_batch = _delegated()
    replay = _delegated()
    end_replay = _delegated()
    discard_step = _delegated()
    evaluating = _delegated()
    finish_training = _delegated()
    state_dict = _delegated()
    load_state_dict = _delegated()
    explain = _delegated()
    close = _delegated()
