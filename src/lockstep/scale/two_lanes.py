"""Computation and communication side by side: two lanes, each with one piece of work at a time, in its order.

While data moves, computation may be slower by a factor: gloo's threads and the script share processors, NCCL's kernels
share multiprocessors. Where it is not slower, this is the bucket queue of DDP:

    e_k = max(e_{k-1}, r_k) + T(S_k)        the k-th exchange ends: after the one before it, and not before it is ready
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class TwoLanes:
    """A schedule as it grows. Works are added in the order in which they would be started."""

    contention: float = 0.0  #: how much longer computation takes while data is moving, as a part of it
    computed_s: float = 0.0  #: when the computation so far ends
    moved_s: float = 0.0  #: when the communication so far ends
    transfers: list[tuple[float, float]] = field(default_factory=list)  #: begin and end of each
    _seen: int = 0

    def compute(self, seconds: float, after: float = 0.0) -> float:
        """Compute for ``seconds``, not before ``after``; returns when it ends."""
        now, left = max(self.computed_s, after), seconds
        while self.contention and left > 0:
            while self._seen < len(self.transfers) and self.transfers[self._seen][1] <= now:
                self._seen += 1
            if self._seen == len(self.transfers):
                break
            begin, end = self.transfers[self._seen]
            free = max(0.0, begin - now)
            if free >= left:
                break
            now, left = now + free, left - free
            done = min(left, (end - now) / (1 + self.contention))
            now, left = now + done * (1 + self.contention), left - done
        self.computed_s = now + left
        return self.computed_s

    def move(self, seconds: float, after: float = 0.0) -> float:
        """Let data move for ``seconds``, not before ``after``; returns when it has arrived."""
        begin = max(self.moved_s, after)
        self.moved_s = begin + seconds
        if seconds > 0:
            self.transfers.append((begin, self.moved_s))
        return self.moved_s
