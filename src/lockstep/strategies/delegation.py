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

    (
        assignment,
        state_layout,
        state_part,
        update_share,
        divides_construction,
        can_update_trainable,
        forward_is_collective,
        repeats_step,
        repeats_bits,
        repeats_other_ranks,
        construct,
        make_stages,
        plan_layers,
        setup_model,
        check_optimizer,
        update_trainable,
        resync,
        begin_micro_batch,
        begin_count,
        backward,
        normalize_by_count,
        before_update,
        before_optimizer_step,
        end_micro_batch,
        replay,
        end_replay,
        discard_step,
        evaluating,
        finish_training,
        state_dict,
        load_state_dict,
        explain,
        close,
    ) = (_delegated() for _ in range(33))
