"""All-reduce along the tree: the sum of flat tensors over all ranks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist

from lockstep.collectives.all_to_all import all_to_all
from lockstep.collectives.gathered_objects import all_gather_flat
from lockstep.collectives.group import Group
from lockstep.collectives.reduction_plan import HostDivision, ReductionPlan, ReductionPlans, Runs
from lockstep.collectives.shared_memory import SharedMemoryAllReduce
from lockstep.collectives.wait_clock import wait_clock
from lockstep.torch_private import foreach_add_

#: For tensors of fewer bytes, latency counts more than additional bytes that are sent or copied.
_LITTLE: Final = 1 << 18


class AllReduce(Protocol):
    """Sums flat tensors over all ranks in the background; sums are begun in the same order on every rank."""

    def begin(self, out: torch.Tensor, partials: Sequence[torch.Tensor], micro_batches: int) -> None:
        """Begin the sum over the micro-batches of a step; after `finish`, ``out`` holds it, with equal bits everywhere.

        Args:
            out: one-dimensional, of equal length on all ranks, real or complex; may be one of ``partials``.
            partials: the sums of this rank's nodes (`nodes_of` its run), each like ``out``; none for an empty run.
                Partials may be overwritten.
            micro_batches: of the step, the same on every rank.
        """

    def finish(self) -> None:
        """Wait until each begun sum is in its ``out``; on a GPU, let later work in the current stream wait.

        Raises:
            RuntimeError: of the transport, for example if a rank is gone.
        """

    def close(self) -> None:
        """End threads and connections; no sum is begun afterwards."""


def open_all_reduce(group: Group, runs: Runs) -> AllReduce:
    """The all-reduce for the group, over shared memory, NCCL or gloo; without transport for one rank. Collective."""
    if group.size == 1:
        return _NoAllReduce()
    if group.device.type == "cuda" and not group.over_cpu:
        return NcclAllReduce(group, runs)
    over_cpu = SharedMemoryAllReduce if group.on_one_machine and sys.platform == "linux" else GlooAllReduce
    all_reduce = over_cpu(group, runs)
    return StagedAllReduce(all_reduce) if group.device.type == "cuda" else all_reduce


class NativeAllReduce:
    """Torch's own all-reduce, without a promise of bits, of values that each rank has added up in any order."""

    def __init__(self, group: Group) -> None:
        self._process_group = group.process_group
        self._works: list[dist.Work] = []

    def begin(self, out: torch.Tensor) -> None:
        """Begin the sum of every rank's ``out``; after `finish`, ``out`` holds the sum."""
        self._works.append(dist.all_reduce(out, group=self._process_group, async_op=True))

    def finish(self) -> None:
        """Wait for every begun sum."""
        wait_all(self._works)


class RankOrderAllReduce:
    """Sums of one tensor from each rank, along the tree over ranks.

    Torch's all-reduce adds in an order that depends on an element's place in its bucket, and DDP cuts its buckets again
    after the first step, also after a resume. With this class the bits depend only on the values and the number of
    ranks.
    """

    def __init__(self, group: Group) -> None:
        self._size: Final = group.size
        self._all_reduce: Final = open_all_reduce(group, lambda rank, _: range(rank, rank + 1))

    def begin(self, tensor: torch.Tensor) -> None:
        """Begin the sum of every rank's ``tensor``, of one dimension; after `finish`, ``tensor`` holds the sum."""
        self._all_reduce.begin(tensor, [tensor], self._size)

    def finish(self) -> None:
        """Wait for every sum that was begun."""
        self._all_reduce.finish()

    def close(self) -> None:
        """End the threads and connections."""
        self._all_reduce.close()


class _NoAllReduce(AllReduce):
    """The all-reduce of a single rank, which holds the whole tree."""

    def begin(self, out: torch.Tensor, partials: Sequence[torch.Tensor], micro_batches: int) -> None:
        (total,) = partials
        _into(out, total)

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass


class GlooAllReduce(AllReduce):
    """The all-reduce over gloo: the caller begins the first half of each sum, and a thread does the rest, in order.

    Caller and thread have separate process groups. Collectives of one group must be issued in the same order on every
    rank; the caller's order is that of the buckets, and the thread's order that in which sums were begun: both orders
    are fixed, but not the order between caller and thread.
    """

    def __init__(self, group: Group, runs: Runs) -> None:
        self._stages: Final = _Stages(group, runs, "gloo")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lockstep-exchange")
        self._reduced: list[dist.Work] = []
        self._followed: list[Future[None]] = []

    def begin(self, out: torch.Tensor, partials: Sequence[torch.Tensor], micro_batches: int) -> None:
        """Begin the exchange of chunks; the rest follows on the thread."""
        out, partials = as_real(out), [as_real(partial) for partial in partials]
        stages = self._stages.of(out, micro_batches)
        first = stages[0]
        if len(stages) == 1 and first.plan.all_reduces:
            (total,) = partials
            _into(out, total)
            self._reduced.append(dist.all_reduce(out, group=first.scatters, async_op=True))
            return
        works, received, sent = _exchange(first, partials, out)
        self._followed.append(self._thread.submit(self._follow, works, stages, received, sent, out))

    def finish(self) -> None:
        """Wait for every sum that was begun."""
        wait_all(self._reduced)
        followed, self._followed = self._followed, []
        with wait_clock():
            for future in followed:
                future.result()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)  # after an error the thread may wait for a rank for ever

    def _follow(
        self,
        works: list[dist.Work],
        stages: Sequence[_Stage],
        received: torch.Tensor,
        sent: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        wait_all(works)
        del sent  # had to stay alive until the exchange had read its values
        _finish(stages, received, out)


class NcclAllReduce(AllReduce):
    """The all-reduce over NCCL: exchange, additions and gather are queued on a stream beside the backward pass."""

    def __init__(self, group: Group, runs: Runs) -> None:
        self._stages: Final = _Stages(group, runs, "nccl")
        self._device: Final = group.device
        # With priority over computation: the few blocks are done soon, and the next rank waits for them.
        self._stream = torch.cuda.Stream(device=group.device, priority=-1)

    def begin(self, out: torch.Tensor, partials: Sequence[torch.Tensor], micro_batches: int) -> None:
        """Queue the exchange, the additions and the gathering on the stream."""
        out, partials = as_real(out), [as_real(partial) for partial in partials]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for tensor in (out, *partials):
                tensor.record_stream(self._stream)
            _sum(self._stages.of(out, micro_batches), partials, out)

    def finish(self) -> None:
        """Let the current stream wait for every sum that was begun."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def close(self) -> None:
        """Wait for queued sums."""
        self._stream.synchronize()


class StagedAllReduce(AllReduce):
    """The all-reduce for ranks that share a GPU, which NCCL does not support: through the memory of the CPU."""

    def __init__(self, all_reduce: AllReduce) -> None:
        self._all_reduce = all_reduce
        self._begun: list[tuple[torch.Tensor, torch.Tensor]] = []

    def begin(self, out: torch.Tensor, partials: Sequence[torch.Tensor], micro_batches: int) -> None:
        """Copy ``partials`` to the CPU, and begin the sum there."""
        on_cpu = torch.empty_like(out, device="cpu")
        self._all_reduce.begin(on_cpu, [partial.cpu() for partial in partials], micro_batches)
        self._begun.append((out, on_cpu))

    def finish(self) -> None:
        """Wait for every begun sum, and copy each to the GPU."""
        begun, self._begun = self._begun, []
        self._all_reduce.finish()
        for out, on_cpu in begun:
            out.copy_(on_cpu)

    def close(self) -> None:
        """Close the all-reduce on the CPU."""
        self._all_reduce.close()


#        rank 0            rank 1            each rank cuts the sums of its nodes into one chunk for every rank,
#     a0 a1 | a2 a3     b0 b1 | b2 b3
#           \_____________/                   all_to_all: rank r receives chunk r of every node of every rank,
#     a0 a1 b0 b1       a2 a3 b2 b3
#        |                  |                 folds them in the tree's order,
#      s0 s1              s2 s3
#           \_____________/                   all_gather: and every rank receives all chunks.
#     s0 s1   s2 s3     s0 s1   s2 s3
#
# So each rank sends and receives what a ring all-reduce would, times its nodes. Among several ranks on each of several
# hosts, those of a host do that first. What each has folded then is a chunk of its host's nodes; instead of gathering
# them at once, the ranks of one place sum that chunk in the same way. Between hosts each rank so sends what a ring over
# hosts would, of a chunk, times the nodes of a host.


class _Stage(NamedTuple):
    """A stage of a sum: ranks that exchange with each other, over process groups without other traffic meanwhile."""

    plan: ReductionPlan
    scatters: dist.ProcessGroup | None
    gathers: dist.ProcessGroup | None


class _Stages:
    """The stages of each sum: one over all ranks, or one within each host and one between hosts."""

    def __init__(self, group: Group, runs: Runs, backend: Literal["gloo", "nccl"]) -> None:
        self._backend: Final = backend
        self._plans: Final = ReductionPlans(group.rank, group.size, runs)
        self._whole: Final = group.process_group, self._gathering(group, group.process_group, range(group.size))
        hosts = HostDivision(group.rank, group.nodes)
        self._hosts: Final = hosts if hosts.is_possible else None
        if hosts.is_possible:
            within = group.new_process_group(hosts.within, backend)
            self._within: Final = within, self._gathering(group, within, hosts.within)
            self._across: Final = group.new_process_group(hosts.across, backend)

    def of(self, out: torch.Tensor, micro_batches: int) -> Sequence[_Stage]:
        """The stages of the sum ``out`` over ``micro_batches``."""
        whole = self._plans(micro_batches)
        if self._hosts is None or out.nbytes < _LITTLE:
            return (_Stage(whole, *self._whole),)
        within, across = self._hosts.stages(whole)
        return _Stage(within, *self._within), _Stage(across, self._across, self._across)

    def _gathering(
        self, group: Group, scatters: dist.ProcessGroup | None, ranks: Sequence[int]
    ) -> dist.ProcessGroup | None:
        """The process group for gathering: NCCL keeps the order of queueing, but gloo's two threads need two groups."""
        return scatters if self._backend == "nccl" else group.new_process_group(ranks, self._backend)


def _sum(stages: Sequence[_Stage], partials: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Compute the sum into ``out``, stage after stage."""
    plan, scatters, _ = stages[0]
    if len(stages) == 1 and plan.all_reduces:
        (total,) = partials
        _into(out, total)
        dist.all_reduce(out, group=scatters)
        return
    works, received, _sent = _exchange(stages[0], partials, out)
    wait_all(works)
    _finish(stages, received, out)


def _exchange(
    stage: _Stage, partials: Sequence[torch.Tensor], like: torch.Tensor
) -> tuple[list[dist.Work], torch.Tensor, torch.Tensor]:
    """Begin the exchange; returns its works, the received chunk of each node of each rank, and the sent tensor."""
    plan = stage.plan
    cuts = plan.cuts(like.numel())
    first, end = cuts[plan.rank]
    if len(partials) == 1:
        sent = partials[0]
    else:
        sent = torch.cat([p[a:b] for a, b in cuts for p in partials]) if partials else like[:0]
    give = [len(partials) * (b - a) for a, b in cuts]
    take = [len(nodes) * (end - first) for nodes in plan.nodes_by_rank]
    received = like.new_empty(sum(take))
    return all_to_all(received, sent, take, give, stage.scatters), received, sent


def _finish(stages: Sequence[_Stage], received: torch.Tensor, out: torch.Tensor) -> None:
    """Add up the ``received`` chunks, in this stage and the following ones, and gather the sum into ``out``."""
    plan, *_ = stages[0]
    first, end = plan.cuts(out.numel())[plan.rank]
    partials = _fold(plan, received, end - first)
    chunk = partials[0] if partials else out.new_empty(end - first)
    if len(stages) > 1:
        _sum(stages[1:], partials, chunk)
    _gather(stages[0], chunk, out)


def _fold(plan: ReductionPlan, received: torch.Tensor, length: int) -> list[torch.Tensor]:
    """The remaining sums of a chunk of ``length`` elements after all additions, in the memory of ``received``."""
    pieces = received.view(len(plan.all_nodes), length).unbind()
    for left, right in plan.additions if length else ():
        foreach_add_([pieces[i] for i in left], [pieces[i] for i in right])
    return [pieces[place] for place in plan.folded.values()]


def _gather(stage: _Stage, chunk: torch.Tensor, out: torch.Tensor) -> None:
    """Gather every rank's chunk into ``out``."""
    size, each = len(stage.plan.nodes_by_rank), stage.plan.chunk(out.numel())
    alike, rest = out[: size * each], out[size * each :]
    if not len(rest) or out.nbytes >= _LITTLE:
        all_gather_flat(alike, chunk[:each], group=stage.gathers)
        if len(rest):  # less than a thousandth, for which the whole would have to be copied once more
            if stage.plan.rank == size - 1:
                rest.copy_(chunk[each:])
            dist.broadcast(rest, group=stage.gathers, group_src=size - 1)
        return
    longest = each + len(rest)
    padded = out.new_empty(longest)
    padded[: len(chunk)].copy_(chunk)
    gathered = out.new_empty(size * longest)
    all_gather_flat(gathered, padded, group=stage.gathers)
    by_rank = gathered.view(size, longest)
    alike.view(size, each).copy_(by_rank[:, :each])
    rest.copy_(by_rank[-1, each:])


def as_real(flat: torch.Tensor) -> torch.Tensor:
    """``flat`` itself, of one dimension; complex numbers as pairs of reals, since transports have no complex sums."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def _into(out: torch.Tensor, total: torch.Tensor) -> None:
    if total.data_ptr() != out.data_ptr():
        out.copy_(total)


def wait_all(works: list[dist.Work]) -> None:
    """Wait for each of ``works``, and empty the list, also after an error."""
    waiting = works[:]
    works.clear()
    with wait_clock():
        for work in waiting:
            work.wait()
