"""Which gradients DDP sends together, and when: its own rule, so that what is simulated is what runs.

After the first step DDP lays its buckets out in the order in which gradients became ready. A bucket takes the next
gradient and closes once it has *reached* its limit, so that a large gradient may exceed it by far. The first bucket's
limit is 1 MiB where DDP's own default is used; where a script names a limit, it is that of the first one, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lockstep.scale.step_profile import GradientReady

MIB: Final = 2**20


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are sent as one."""

    bytes: int
    ready_s: float  #: since the backward pass began, when the last of them was there
    gradients: int


def buckets_of(gradients: Sequence[GradientReady], limit: float, first_limit: float | None = None) -> list[Bucket]:
    """The buckets of ``gradients``, which are in the order in which they became ready.

    Args:
        gradients: of one backward pass.
        limit: bytes at which a bucket closes; infinite: all gradients are one bucket.
        first_limit: that of the first one; None: the same.
    """
    buckets: list[Bucket] = []
    size, ready, count = 0, 0.0, 0
    for gradient in gradients:
        size, ready, count = size + gradient.bytes, max(ready, gradient.ready_s), count + 1
        if size >= (limit if buckets or first_limit is None else first_limit):
            buckets.append(Bucket(size, ready, count))
            size, count = 0, 0
    if count:
        buckets.append(Bucket(size, ready, count))
    return buckets
