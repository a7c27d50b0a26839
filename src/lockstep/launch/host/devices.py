"""What this node's ranks run on, and what of it is left out after it was found to compute wrong bits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from lockstep.formatting import format_ranks, plural
from lockstep.launch.diagnosis.root_cause import RankExit


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of one node: its local ranks take those that are not left out, in their order."""

    ranks: int  #: asked for
    gpus: tuple[str, ...] = ()  #: as ``CUDA_VISIBLE_DEVICES`` names them; empty: CPUs, or not looked up
    left_out: frozenset[int] = frozenset()  #: by place among the GPUs, or among the ranks where there are none

    @property
    def can_start(self) -> int:
        """How many ranks this node can start: as many as asked for, while it has spare GPUs."""
        return min(self.ranks, len(self._free))

    def without(self, local_ranks: Collection[int], gpus: Callable[[], Sequence[str]]) -> Self:
        """The devices without those of ``local_ranks``; ``gpus`` looks up which the node has.

        Where ranks share GPUs, ranks are left out, and no GPU.
        """
        if not local_ranks:
            return self
        names = self.gpus or tuple(gpus())
        here = self if self.left_out or len(names) < self.ranks else replace(self, gpus=names)
        return replace(here, left_out=here.left_out | {here._free[rank] for rank in local_ranks})

    def variables(self) -> Mapping[str, str]:
        """What hides from ranks the GPUs that are left out."""
        if not (self.gpus and self.left_out):
            return {}
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus[place] for place in self._free)}

    @property
    def _free(self) -> list[int]:
        return [place for place in range(len(self.gpus) or self.ranks) if place not in self.left_out]


def without_accused(
    devices: Devices, endings: Sequence[RankExit], ranks: range, gpus: Callable[[], Sequence[str]]
) -> tuple[Devices, str]:
    """The devices for the next generation, after this node's ``ranks`` of one have ended; and what to tell the user.

    They are ``devices`` without those of ranks that were found to compute wrong bits.
    """
    accused = {rank for ending in endings if ending.failure for rank in ending.failure.accused}
    odd = sorted(accused.intersection(ranks))
    if not odd:
        return devices, ""
    rest = devices.without([rank - ranks[0] for rank in odd], gpus)
    whose = "whose device is" if len(odd) == 1 else "whose devices are"
    return rest, (
        f"wrong bits on {format_ranks(odd)}, {whose} left out from now on: {plural(rest.can_start, 'rank')} of "
        f"{rest.ranks} can start here"
    )
