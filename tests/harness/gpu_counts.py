"""What a step of `ddp` launches on a GPU beside the model, and what its host waits for, counted without a GPU.

    python tests/harness/gpu_counts.py

For GPT-2 small and ResNet-50, by their shapes: the parts of a step run on tensors that hold nothing, and operations are
counted as torch would launch them. Microseconds are guesses: 6 of the host for each launch.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from device_costs import DEVICE, Costs
from lockstep.batch import BatchPlan, MicroBatchPosition
from lockstep.collectives import Group
from lockstep.collectives.all_reduce import _fold, _NoAllReduce
from lockstep.collectives.reduction_plan import ReductionPlans
from lockstep.run.batches.pinned_copy import PinnedCopy
from lockstep.run.checks.nonfinite import NonFiniteChecks
from lockstep.strategies.parts.buffers import Buffers
from lockstep.strategies.parts.state_layout import ReplicatedLayout
from lockstep.strategies.replicated.ddp_reducer import align_gradients

BUCKET = 25 << 20  # bytes
HOST_US = 6.0


def gpt2_small() -> tuple[list[tuple[int, ...]], nn.Module]:
    """The shapes of its parameters, and what has its buffers."""
    d = 768
    block = [(d,), (d,), (3 * d, d), (3 * d,), (d, d), (d,), (d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,)]
    return [(50257, d), (1024, d), *block * 12, (d,), (d,)], nn.Module()


def resnet50() -> tuple[list[tuple[int, ...]], nn.Module]:
    """The shapes of its parameters, and what has its buffers."""
    convolutions = [(64, 3, 7, 7)]
    inner = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolutions += [(width, inner, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            convolutions += [(4 * width, inner, 1, 1)] if block == 0 else []
            inner = 4 * width
    shapes = [shape for c in convolutions for shape in (c, c[:1], c[:1])]
    with DEVICE:
        return [*shapes, (1000, 2048), (1000,)], nn.ModuleList(nn.BatchNorm2d(c[0]) for c in convolutions)


def counted(work: Callable[[], object]) -> Costs:
    """What ``work`` launches and waits for."""
    with Costs() as costs:
        work()
    return costs


def parts(shapes: list[tuple[int, ...]], norms: nn.Module, ranks: int, each: int) -> dict[str, Costs | int]:
    """By part of a step of ``each`` micro-batches a rank."""
    parameters = [nn.Parameter(torch.empty(shape, device=DEVICE)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    gradients = [cast(torch.Tensor, p.grad) for p in parameters]
    loss = torch.empty((), device=DEVICE)

    def finite() -> None:
        checks = NonFiniteChecks("stop", 0, print, lambda: None, read_later=lambda v: cast(PinnedCopy, v))
        for index in range(each):
            checks.loss(loss, 0, index, each, 4)
        checks.gradients(parameters, str, 0)
        checks.step_ended()

    group = cast(Group, SimpleNamespace(rank=0, size=1, device=DEVICE, gather_objects=lambda own, _: [own], leads=True))
    buffers = Buffers(_NoAllReduce(), group)
    with Costs():
        buffers.setup_model(norms)

    def move() -> None:
        for index in range(each):
            buffers.end_micro_batch(MicroBatchPosition(index, each, last=index == each - 1))

    for _ in range(2):  # first steps look at more
        with Costs():
            buffers.end_micro_batch(MicroBatchPosition(0, 1, last=True))
    found: dict[str, Costs | int] = {"finite": counted(finite), "buffers": counted(move)}
    found["own sums"] = (each - 1) * counted(lambda: torch._foreach_add_(gradients, gradients)).launches
    if ranks > 1:
        total = ranks * each
        plan = ReductionPlans(0, ranks, BatchPlan(total, 1, ranks).run)(total)
        elements = sum(math.prod(shape) for shape in shapes)
        buckets = math.ceil(4 * elements / BUCKET)
        length = plan.chunk(BUCKET // 4)
        received = torch.empty(len(plan.all_nodes) * length, device=DEVICE)
        fold = counted(lambda: _fold(plan, received, length)).launches
        # All-to-all, all-gather, and the rest that does not divide: a copy and a broadcast.
        found["exchange"] = buckets * (fold + 4)
        found["aligned"] = counted(lambda: align_gradients(parameters))
    found["clip_norm"] = counted(lambda: ReplicatedLayout().norm(parameters)).launches
    return found


def table() -> list[str]:
    """The lines of the table of docs/gpu.md."""
    lines = [
        "| model | GPUs | micro-batches | launches | waits | host | `clip_norm` |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, shape_of in (("GPT-2 small", gpt2_small), ("ResNet-50", resnet50)):
        for ranks in (1, 8):
            for each in (1, 4):
                found: dict[str, Any] = parts(*shape_of(), ranks, each)
                clip = found.pop("clip_norm")
                waits = sum(part.waits for part in found.values() if isinstance(part, Costs))
                launches = sum(part.launches if isinstance(part, Costs) else part for part in found.values())
                host = f"{launches * HOST_US / 1000:.2f} ms"
                lines.append(f"| {name} | {ranks} | {each} | {launches} | {waits} | {host} | + {clip} |")
    return lines


if __name__ == "__main__":
    print(*table(), sep="\n")
