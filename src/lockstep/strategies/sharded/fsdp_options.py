"""The options of ``fsdp``, all of which ``hsdp`` has, too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from lockstep.errors import SettingError

#: The type in which blocks are gathered and computed, by the word for it.
MIXED: Final = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_RESHARD: Final = ("true", "false", "step")


@dataclass(frozen=True, slots=True)
class Options:
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
