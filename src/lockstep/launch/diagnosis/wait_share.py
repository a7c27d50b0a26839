"""How much each rank waits for the others, from its heartbeats."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from lockstep.heartbeat_message import Heartbeat
from lockstep.launch.timeouts import Silence

_BEATS = 40  # remembered: twenty seconds
_FEW = 4


@dataclass(frozen=True, slots=True)
class Waiting:
    """One rank, as it was last heard."""

    beat: Heartbeat
    waits: float | None  #: the part of its heartbeats in which it waited; None: too few are known
    silent_s: float


class WaitShare:
    """How much each rank waited in its last heartbeats. A rank that all others wait for waits least itself."""

    def __init__(self) -> None:
        self._waited: dict[int, deque[bool]] = {}
        self._last: dict[int, Silence[Heartbeat]] = {}

    def hear(self, beats: Iterable[Heartbeat], now: float) -> None:
        """Take in heartbeats that have come at ``now``."""
        for beat in beats:
            # Only while it trains: at the start and in an evaluation waiting is normal.
            if beat.step >= 0 and beat.phase not in ("start", "evaluate", "exit"):
                self._waited.setdefault(beat.rank, deque(maxlen=_BEATS)).append(beat.meets)
            self._last[beat.rank] = Silence(beat, now)

    def ranks(self, now: float) -> list[Waiting]:
        """Every rank that has sent a heartbeat, by rank."""
        return [Waiting(heard.said, self._part(rank), heard.for_s(now)) for rank, heard in sorted(self._last.items())]

    def _part(self, rank: int) -> float | None:
        waited = self._waited.get(rank, ())
        return sum(waited) / len(waited) if len(waited) >= _FEW else None
