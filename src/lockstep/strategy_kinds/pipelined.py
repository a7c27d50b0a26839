"""The strategy that cuts a model into stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lockstep.errors import SettingError
from lockstep.strategy_kinds.kind import EVERYTHING, StrategyKind

#: How many stages a rank may have under each schedule: at least, and at most.
CHUNKS: Final = {
    "gpipe": (1, 1),
    "1f1b": (1, 1),
    "interleaved": (2, 1 << 20),
    "zero-bubble": (1, 1 << 20),
    "zbv": (2, 2),
}
_SAMPLES: Final = ("float32", "int64")


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """The options of ``pipeline``."""

    stages: int = 0  #: ranks that hold one replica of the model; 0: all ranks
    schedule: str = "1f1b"  #: gpipe, 1f1b, interleaved, zero-bubble or zbv
    chunks: int = 0  #: stages on each rank; 0: two for interleaved and zbv, else one
    cut: str = ""  #: the first module of each stage but the first, as in layer2+layer3+head; empty: balanced
    sample: str = ""  #: shape of a micro-batch by whose times to balance, as in 32x3x224x224 or 8x128:int64

    def __post_init__(self) -> None:
        if self.schedule not in CHUNKS:
            raise SettingError(f"strategy pipeline: schedule={self.schedule!r}; give one of {', '.join(CHUNKS)}")
        if self.stages < 0 or self.chunks < 0:
            raise SettingError(f"strategy pipeline: stages={self.stages}, chunks={self.chunks}; give numbers from 1")
        least, most = CHUNKS[self.schedule]
        if not least <= self.chunks_per_rank <= most:
            raise SettingError(
                f"strategy pipeline: schedule={self.schedule}, chunks={self.chunks}; interleaved is for two chunks or "
                "more, zbv for two, zero-bubble for any number, gpipe and 1f1b for one"
            )
        self.sample_shape()

    @property
    def chunks_per_rank(self) -> int:
        """Stages on each rank."""
        return self.chunks or CHUNKS[self.schedule][0]

    def sample_shape(self) -> tuple[tuple[int, ...], str] | None:
        """Shape and name of the type of `sample`; None without a sample.

        Raises:
            SettingError: if `sample` is neither a shape nor a shape with one of these types.
        """
        shape, _, dtype = self.sample.partition(":")
        numbers = shape.split("x")
        if not self.sample:
            return None
        if (dtype or "float32") not in _SAMPLES or not all(number.isdecimal() for number in numbers):
            raise SettingError(
                f"strategy pipeline: sample={self.sample!r}; give a shape, as in 32x3x224x224, or 8x128:int64 for "
                "indices"
            )
        return tuple(map(int, numbers)), dtype or "float32"


KINDS: Final = (
    StrategyKind(
        "pipeline",
        "lockstep.strategies.pipelined.pipeline",
        "each rank holds some layers, and micro-batches go through them one after another",
        PipelineOptions,
        same_bits=True,
        elsewhere=dict.fromkeys(("pp", "gpipe", "1f1b"), ""),
        divides=EVERYTHING,
        divided_by="stages",
        own_activations=False,
        cost="lockstep.scale.simulator:pipeline",
    ),
)
