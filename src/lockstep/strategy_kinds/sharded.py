"""The strategies that divide parameters between ranks and gather a block while it computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lockstep.errors import SettingError
from lockstep.strategy_kinds.kind import EVERYTHING, StrategyKind

#: In what blocks are gathered and computed: as they are stored, or in a lower precision.
MIXED: Final = ("none", "bf16", "fp16")
_RESHARD: Final = ("true", "false", "step")
_KEEPS_BITS: Final = ("wrap", "reshard", "prefetch", "offload")


@dataclass(frozen=True, slots=True)
class FsdpOptions:
    """The options of ``fsdp``."""

    #: Which modules are gathered as one: ``auto`` (members of lists of modules), ``whole`` (the model), a least number
    #: of parameters such as ``1M``, names of classes such as ``Block+Head``, or ``package.module:function``.
    wrap: str = "auto"
    #: ``bf16`` or ``fp16``: blocks are gathered and computed in it, with master parameters and sums in fp32. The bits
    #: are the same for any number of ranks, and those of no other strategy. ``fp16`` needs ``precision="fp16"``.
    mixed: str = "none"
    #: When a gathered block is dropped: ``true``, after its forward pass, and it is gathered again for the backward
    #: pass; ``false``, after its backward pass; ``step``, after that of the step's last micro-batch: less traffic, more
    #: memory.
    reshard: str = "true"
    #: Modules whose parameters stay whole on each rank, by class or by name in the model, joined by ``+``.
    ignored_modules: str = ""
    #: How many blocks are gathered ahead of the one that computes; 0: as torch does, one, on GPUs only.
    prefetch: int = 0
    #: Keep parameters, gradients and optimizer state in the memory of the CPU, for models on GPUs.
    offload: bool = False
    #: Keep only the inputs of blocks, and compute their forward pass once more in the backward pass; the same bits.
    checkpoint_activations: bool = False
    #: Neighbouring ranks that compute each layer together, by the plan of ``run.model(..., tensor_plan=...)``.
    tensor: int = 1

    def __post_init__(self) -> None:
        if self.mixed not in MIXED:
            raise SettingError(f"mixed={self.mixed!r}: give one of {', '.join(MIXED)}")
        if self.mixed != "none" and self.ignored_modules:
            raise SettingError(
                f"mixed={self.mixed} with ignored_modules={self.ignored_modules}: they would stay fp32 between modules "
                f"in {self.mixed}; use precision='{self.mixed}' without mixed={self.mixed}"
            )
        if self.reshard not in _RESHARD:
            raise SettingError(f"reshard={self.reshard!r}: give one of {', '.join(_RESHARD)}")
        if self.prefetch < 0:
            raise SettingError(f"prefetch={self.prefetch}: give the number of blocks to gather ahead, 0 or more")
        if self.tensor < 1:
            raise SettingError(f"tensor={self.tensor}: give the ranks that compute a layer together, 1 or more")


@dataclass(frozen=True, slots=True)
class HsdpOptions(FsdpOptions):
    """The options of ``hsdp``."""

    #: Ranks that hold one copy of the model, or of a tensor group's part of it; 0: those of a node.
    shard: int = 0

    def __post_init__(self) -> None:
        FsdpOptions.__post_init__(self)
        if self.shard < 0:
            raise SettingError(f"shard={self.shard}: give the ranks that hold a copy, 1 or more")


KINDS: Final = (
    StrategyKind(
        "fsdp",
        "lockstep.strategies.sharded.fully_sharded",
        "parameters, gradients and optimizer state divided between all ranks",
        FsdpOptions,
        same_bits=True,
        keeps_bits=frozenset(_KEEPS_BITS),
        elsewhere=dict.fromkeys(("zero3", "zero-3", "deepspeed-stage-3", "full-shard", "fully-shard", "fsdp2"), ""),
        divides=EVERYTHING,
        cost="lockstep.scale.simulator:fsdp",
        not_predicted=frozenset(("tensor",)),
    ),
    StrategyKind(
        "hsdp",
        "lockstep.strategies.sharded.hybrid_sharded",
        "as fsdp among the ranks of a node, with a copy on each node",
        HsdpOptions,
        same_bits=True,
        keeps_bits=frozenset((*_KEEPS_BITS, "shard")),
        elsewhere=dict.fromkeys(("hybrid-shard", "hybrid-sharded"), ""),
        divides=EVERYTHING,
        divided_by="shard",
        within_node=True,
        cost="lockstep.scale.simulator:hsdp",
        not_predicted=frozenset(("tensor",)),
    ),
)
