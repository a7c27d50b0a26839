"""What everything but a strategy's own code has to know of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal

from lockstep.settings import read_options

Divided = Literal["parameters", "gradients", "optimizer"]
"""What a strategy may divide between ranks."""

WHOLE: Final[frozenset[Divided]] = frozenset()  #: of `StrategyKind.divides`: each rank holds everything
EVERYTHING: Final[frozenset[Divided]] = frozenset(("parameters", "gradients", "optimizer"))


@dataclass(frozen=True, slots=True)
class NoOptions:
    """Of a strategy that has no options."""


@dataclass(frozen=True, slots=True)
class StrategyKind:
    """A strategy, as the launcher, the command line and the predictions know it before any rank starts."""

    name: str  #: the word after ``--strategy``
    #: Of the module with ``open_strategy(context: StrategyContext, options) -> Strategy``; imported by ranks only.
    module: str
    summary: str  #: a few words for ``--help`` and for lists
    #: A frozen dataclass with a default for each field, which refuses by SettingError the values that cannot be used.
    options: type[Any] = NoOptions
    #: Whether a training has the bits of one rank, on any number of ranks, while all options have their defaults.
    same_bits: bool = False
    #: Options that leave these bits alone whatever their value.
    keeps_bits: frozenset[str] = frozenset()
    #: What other libraries call one of ours, in small letters and with hyphens, each with the options that are meant.
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    one_process: bool = False  #: one process computes on all devices, in place of a rank for each

    # For predictions of memory and time -----------------------------------------------------------------------------

    #: What of a model is divided between ranks; None: no formula is known for the memory of a rank.
    divides: frozenset[Divided] | None = None
    #: The option that says between how many ranks, 0 meaning all of them or, with `within_node`, those of a node.
    divided_by: str = ""
    within_node: bool = False
    own_activations: bool = True  #: a rank keeps the activations of one micro-batch at a time, whole
    #: ``package.module:function``, called with a profile, a system and a `SimulatedStrategy`, that returns the
    #: `lockstep.scale.StrategyCost` of a step; empty: the time of a step cannot be predicted.
    cost: str = ""
    not_predicted: frozenset[str] = frozenset()  #: options of which, but for their defaults, no formula is known

    @property
    def option_names(self) -> tuple[str, ...]:
        """In the order in which they are declared."""
        return tuple(field.name for field in fields(self.options))

    def unpredicted(self, options: Mapping[str, str]) -> str:
        """The first of ``options`` of which no formula is known, as it was written; empty without one."""
        defaults, given = self.options(), read_options(f"strategy {self.name}", self.options, options)
        others = (name for name in options if getattr(given, name) != getattr(defaults, name))
        return next((f"{name}={options[name]}" for name in others if name in self.not_predicted), "")
