"""The options of ``pipeline``, and torch's schedules by their words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from lockstep.errors import SettingError
from lockstep.strategies.pipelined.division import Sample

#: Torch's schedule of each name, and how many stages a rank may have under it: at least, and at most.
SCHEDULES: Final[dict[str, tuple[Any, int, int]]] = {
    "gpipe": (ScheduleGPipe, 1, 1),
    "1f1b": (Schedule1F1B, 1, 1),
    "interleaved": (ScheduleInterleaved1F1B, 2, 1 << 20),
    "zero-bubble": (ScheduleInterleavedZeroBubble, 1, 1 << 20),
    "zbv": (ScheduleZBVZeroBubble, 2, 2),
}
#: Those that compute the gradients of inputs and of weights in passes of their own.
SPLITTING: Final = ("zero-bubble", "zbv")
_SAMPLES: Final = {"float32": torch.float32, "int64": torch.int64}


@dataclass(frozen=True, slots=True)
class Options:
    """The options of ``pipeline``."""

    stages: int = 0  #: ranks that hold one replica of the model; 0: all ranks
    schedule: str = "1f1b"  #: gpipe, 1f1b, interleaved, zero-bubble or zbv
    chunks: int = 0  #: stages on each rank; 0: two for interleaved and zbv, else one
    cut: str = ""  #: the first module of each stage but the first, as in layer2+layer3+head; empty: balanced
    sample: str = ""  #: shape of a micro-batch by whose times to balance, as in 32x3x224x224 or 8x128:int64

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise SettingError(f"strategy pipeline: schedule={self.schedule!r}; give one of {', '.join(SCHEDULES)}")
        if self.stages < 0 or self.chunks < 0:
            raise SettingError(f"strategy pipeline: stages={self.stages}, chunks={self.chunks}; give numbers from 1")
        _, least, most = SCHEDULES[self.schedule]
        if not least <= self.chunks_per_rank <= most:
            raise SettingError(
                f"strategy pipeline: schedule={self.schedule}, chunks={self.chunks}; interleaved is for two chunks or "
                "more, zbv for two, zero-bubble for any number, gpipe and 1f1b for one"
            )
        self.sample_like()

    @property
    def chunks_per_rank(self) -> int:
        """Stages on each rank."""
        return self.chunks or SCHEDULES[self.schedule][1]

    def sample_like(self) -> Sample | None:
        """Shape and type of the sample; None without one."""
        shape, _, dtype = self.sample.partition(":")
        try:
            return (tuple(int(n) for n in shape.split("x")), _SAMPLES[dtype or "float32"]) if self.sample else None
        except (ValueError, KeyError):
            raise SettingError(
                f"strategy pipeline: sample={self.sample!r}; give a shape, as in 32x3x224x224, or 8x128:int64 for "
                "indices"
            ) from None
