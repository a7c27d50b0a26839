"""The strategies under which ranks step by themselves and average now and then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lockstep.errors import SettingError
from lockstep.strategy_kinds.kind import WHOLE, StrategyKind

#: Formats of what ranks of ``diloco`` exchange.
WIRES: Final = ("fp32", "bf16", "fp16")


@dataclass(frozen=True, slots=True)
class LocalSgdOptions:
    """The options of ``local-sgd``."""

    period: int = 8  #: steps between two averages over all ranks
    warmup: int = 0  #: steps at the beginning that are those of ddp
    node_period: int = 0  #: steps between two averages over the ranks of a node; 0: there are none
    moments: str = "keep"  #: of optimizers: keep each rank's own, or average them with the parameters

    def __post_init__(self) -> None:
        if self.period < 1 or self.warmup < 0 or self.node_period < 0:
            raise SettingError(
                f"strategy local-sgd: period={self.period}, warmup={self.warmup}, node_period={self.node_period}; give "
                "a period from 1, and the others from 0"
            )
        if self.node_period and self.period % self.node_period:
            raise SettingError(
                f"strategy local-sgd: node_period={self.node_period} does not divide period={self.period}; give a "
                f"multiple of it, such as period={self.node_period * max(1, round(self.period / self.node_period))}"
            )
        if self.moments not in ("keep", "average"):
            raise SettingError(f"strategy local-sgd: moments={self.moments!r}; give keep or average")


@dataclass(frozen=True, slots=True)
class DilocoOptions:
    """The options of ``diloco``."""

    period: int = 100  #: steps between two exchanges of the same parameters
    outer_lr: float = 0.7  #: learning rate of the outer optimizer
    outer_momentum: float = 0.9  #: its momentum
    fragments: int = 1  #: parts of the parameters, each exchanged at its own time within the period
    overlap: int = 0  #: steps that ranks go on while an exchange is under way
    mix: float = 0.5  #: with overlap, how much of a rank's own parameters stays; 0 drops what it did meanwhile
    wire: str = "fp32"  #: format of what is exchanged: fp32 (as the parameters are), bf16 or fp16

    def __post_init__(self) -> None:
        given = f"strategy diloco: period={self.period}, fragments={self.fragments}, overlap={self.overlap}"
        if self.period < 1 or not 1 <= self.fragments <= self.period:
            raise SettingError(f"{given}; give a period from 1, and from 1 to {max(self.period, 1)} fragments")
        if not 0 <= self.overlap < self.period // self.fragments:
            raise SettingError(
                f"{given}: an exchange begins every {self.period // self.fragments} steps, and the one before must "
                f"have been applied by then; give an overlap from 0 to {self.period // self.fragments - 1}"
            )
        if self.outer_lr <= 0 or not 0 <= self.outer_momentum < 1 or not 0 <= self.mix < 1:
            raise SettingError(
                f"strategy diloco: outer_lr={self.outer_lr:g}, outer_momentum={self.outer_momentum:g}, "
                f"mix={self.mix:g}; give an outer_lr above 0, and from 0 to below 1 for the others"
            )
        if self.wire not in WIRES:
            raise SettingError(f"strategy diloco: wire={self.wire!r}; give one of {', '.join(WIRES)}")


KINDS: Final = (
    StrategyKind(
        "local-sgd",
        "lockstep.strategies.local.local_sgd",
        "each rank steps by itself, and parameters are averaged every few steps",
        LocalSgdOptions,
        divides=WHOLE,
        cost="lockstep.scale.simulator:local_sgd",
    ),
    StrategyKind(
        "diloco",
        "lockstep.strategies.local.diloco",
        "each rank steps by itself for long, and an outer optimizer takes the mean of the moves",
        DilocoOptions,
        cost="lockstep.scale.simulator:diloco",
    ),
)
