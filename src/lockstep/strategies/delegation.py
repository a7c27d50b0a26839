"""Strategies around another strategy, to which they leave all methods that they do not override.

Zero ──► Ddp
TensorParallel ──► FullySharded
Auto ──► the strategy that it chooses
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from lockstep.strategies.strategy import Strategy


class _Delegated:
    """An attribute or method of the other strategy, unless an instance sets its own."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: DelegatingStrategy | None, owner: type) -> object:
        return self if instance is None else getattr(instance.delegate(), self._name)


def _delegated() -> Any:
    """A `_Delegated`, typed as the attribute in its place."""
    return _Delegated()


class DelegatingStrategy(Strategy):
    """A strategy with the methods and attributes of another strategy, but for those that its class overrides."""

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
