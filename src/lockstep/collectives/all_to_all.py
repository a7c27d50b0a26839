"""All-to-all over gloo that uses both directions of a link at once.

Gloo asks the receiver before it sends a large message, and the answer waits behind what the receiver itself has begun
to send. Gloo's own all-to-all sends first, so ranks take turns on a link that could carry both ways: at 100 Mbit/s it
takes 1.8 times as long for two ranks, and 1.2 times for four (benchmarks/links.py). In this module every rank announces
what it is ready to receive before any rank sends.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def all_to_all(
    received: torch.Tensor,
    sent: torch.Tensor,
    take: Sequence[int],
    give: Sequence[int],
    group: dist.ProcessGroup | None,
) -> list[dist.Work]:
    """Begin to send the first ``give[0]`` elements of ``sent`` to rank 0 of ``group``, and so on. Collective.

    Args:
        received: one-dimensional; ``take[0]`` elements from rank 0, and so on, once all returned works are waited for.
        sent: one-dimensional; neither tensor may be used before the works are waited for.
        take: number of elements from each rank to this rank.
        give: number of elements from this rank to each rank.
        group: of torch's; for tensors on the CPU over gloo, else over NCCL, on the current stream: nothing is returned.
    """
    if sent.is_cuda or received.is_cuda:
        dist.all_to_all_single(received, sent, list(take), list(give), group=group)  # on the current stream
        return []
    rank, size = dist.get_rank(group), len(give)
    into, out = received.split(list(take)), sent.split(list(give))
    # Each rank begins with its neighbour, so that not all ranks send to the same rank first.
    before, after = ([(rank + way * step) % size for step in range(1, size)] for way in (-1, 1))
    works = [dist.irecv(into[peer], group=group, group_src=peer) for peer in before if take[peer]]
    works += [dist.isend(out[peer], group=group, group_dst=peer) for peer in after if give[peer]]
    into[rank].copy_(out[rank])
    return [work for work in works if work is not None]
