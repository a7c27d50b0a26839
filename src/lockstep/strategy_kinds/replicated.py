"""The strategies under which each rank holds the whole model while a step computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lockstep.errors import SettingError
from lockstep.strategy_kinds.kind import WHOLE, StrategyKind

#: What ranks of ``ddp`` may send in place of their gradients.
COMPRESSIONS: Final = ("none", "fp16", "bf16", "powersgd")


@dataclass(frozen=True, slots=True)
class DpOptions:
    """The options of ``dp``."""

    devices: int = 0  #: among how many a micro-batch is divided; 0: all GPUs, or two threads

    def __post_init__(self) -> None:
        if self.devices < 0:
            raise SettingError(f"strategy dp: devices={self.devices}; give a number from 1")


@dataclass(frozen=True, slots=True)
class DdpOptions:
    """The options of ``ddp``."""

    compress: str = "none"  #: what ranks send: ``fp16``, ``bf16`` or ``powersgd``; the bits depend on their number then
    rank: int = 1  #: of PowerSGD's approximations: more are nearer to the gradient, and more to send
    start: int = 0  #: how many steps go by before PowerSGD begins

    def __post_init__(self) -> None:
        if self.compress not in COMPRESSIONS:
            raise SettingError(f"strategy ddp: compress={self.compress!r}; give one of {', '.join(COMPRESSIONS)}")
        if self.rank < 1 or self.start < 0:
            raise SettingError(
                f"strategy ddp: rank={self.rank}, start={self.start}; give a rank from 1 and a start from 0"
            )
        if self.compress != "powersgd" and (self.rank, self.start) != (1, 0):
            raise SettingError(
                f"strategy ddp: rank and start are PowerSGD's, and compress={self.compress}; leave them out, or write "
                "ddp:compress=powersgd"
            )


@dataclass(frozen=True, slots=True)
class ZeroOptions:
    """The options of ``zero``."""

    #: Of ZeRO: 1 divides the state of the optimizer, 2 gradients as well. Parameters are whole while a step computes.
    stage: int = 1

    def __post_init__(self) -> None:
        if self.stage not in (1, 2):
            raise SettingError(f"stage={self.stage}: give 1 or 2; the third stage of ZeRO is the strategy fsdp")


AUTO: Final = StrategyKind(
    "auto",
    "lockstep.strategies.replicated.auto",
    "ddp, zero or fsdp: the first whose parts fit into a GPU",
    divides=WHOLE,
    cost="lockstep.scale.simulator:ddp",
)
KINDS: Final = (
    StrategyKind(
        "none",
        "lockstep.strategies.replicated.single_process",
        "one rank alone",
        same_bits=True,
        elsewhere=dict.fromkeys(("single-device", "single"), ""),
        divides=WHOLE,
        cost="lockstep.scale.simulator:none",
    ),
    StrategyKind(
        "dp",
        "lockstep.strategies.replicated.dp",
        "one process divides each micro-batch between all devices",
        DpOptions,
        elsewhere=dict.fromkeys(("data-parallel", "dataparallel"), ""),
        one_process=True,
        divides=WHOLE,
        cost="lockstep.scale.simulator:dp",
    ),
    StrategyKind(
        "ddp",
        "lockstep.strategies.replicated.ddp",
        "each rank holds the model, and gradients are summed",
        DdpOptions,
        same_bits=True,
        elsewhere=dict.fromkeys(
            (
                *("distributed-data-parallel", "distributeddataparallel", "ddp-spawn", "ddp-notebook"),
                *("ddp-find-unused-parameters-true", "horovod", "allreduce", "multi-gpu"),
            ),
            "",
        ),
        divides=WHOLE,
        cost="lockstep.scale.simulator:ddp",
    ),
    StrategyKind(
        "zero",
        "lockstep.strategies.replicated.zero",
        "as ddp, with the state of optimizers divided between ranks",
        ZeroOptions,
        same_bits=True,
        keeps_bits=frozenset(("stage",)),
        elsewhere={
            **dict.fromkeys(("zero1", "zero-1", "deepspeed-stage-1", "shard-optimizer"), ""),
            **dict.fromkeys(("deepspeed", "zero2", "zero-2", "deepspeed-stage-2", "shard-grad-op"), "stage=2"),
        },
        divides=frozenset(("optimizer",)),
        cost="lockstep.scale.simulator:zero",
    ),
)
