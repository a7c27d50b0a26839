"""What a step of `ddp` launches on a GPU beside the model, and what its host waits for, counted without a GPU.

    python tests/harness/gpu_counts.py

For GPT-2 small and ResNet-50, as `benchmarks/gpu_step.py` makes them: the parts of a step run on tensors that hold
nothing, and operations are counted as torch would launch them. Microseconds are guesses: 6 of the host for each launch.
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from device_costs import DEVICE, Costs
from gpu_step import Gpt2, resnet50
from lockstep.batch import BatchPlan, MicroBatchPosition
from lockstep.collectives import Group
from lockstep.collectives.all_reduce import _fold, _NoAllReduce
from lockstep.collectives.reduction_plan import ReductionPlans
from lockstep.run.batches.pinned_copy import PinnedCopy
from lockstep.run.checks.nonfinite import NonFiniteChecks
from lockstep.strategies.parts.buffers import Buffers
from lockstep.strategies.parts.gradient_accumulation import align_gradients
from lockstep.strategies.parts.state_layout import ReplicatedLayout

BUCKET = 25 << 20  # bytes
HOST_US = 6.0


def counted(work: Callable[[], object]) -> Costs:
    """What ``work`` launches and waits for."""
    with Costs() as costs:
        work()
    return costs


def parts(make: Callable[[], nn.Module], ranks: int, each: int) -> dict[str, Costs | int]:
    """By part of a step of ``each`` micro-batches a rank."""
    with DEVICE:
        model = make()
    parameters = list(model.parameters())
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
        buffers.setup_model(model)

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
        elements = sum(p.numel() for p in parameters)
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
    for name, make in (("GPT-2 small", Gpt2), ("ResNet-50", resnet50)):
        for ranks in (1, 8):
            for each in (1, 4):
                found: dict[str, Any] = parts(make, ranks, each)
                clip = found.pop("clip_norm")
                waits = sum(part.waits for part in found.values() if isinstance(part, Costs))
                launches = sum(part.launches if isinstance(part, Costs) else part for part in found.values())
                host = f"{launches * HOST_US / 1000:.2f} ms"
                lines.append(f"| {name} | {ranks} | {each} | {launches} | {waits} | {host} | + {clip} |")
    return lines


if __name__ == "__main__":
    print(*table(), sep="\n")
