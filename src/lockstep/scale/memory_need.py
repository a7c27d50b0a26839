"""What a model, a batch and a strategy need of a GPU's memory, before they are started there.

    parameters + gradients + state of the optimizer + buffers     divided by the strategy
    + activations of a micro-batch                                 grow with it, as one forward pass kept them
    + a part for fragments and libraries

Which part of them a rank holds, for M bytes of parameters and n ranks (docs/strategies.md):

    strategy      parameters                gradients   optimizer
    ddp, dp       M                         M           all
    zero          M                         M           1 / n
    fsdp          M / n, and a layer whole  M / n       1 / n

Activations are what autograd keeps from the forward pass for the backward pass. What a kernel needs for itself while it
runs is not among them, and on a GPU other kernels may keep other things: both are in what is left for libraries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.errors import SettingError
from lockstep.formatting import size
from lockstep.scale.catalogue import Catalogue
from lockstep.step_record import RankRecord
from lockstep.strategy_kinds import BUILT_IN, read_strategy, split

#: Of a GPU's memory, what can be planned with; the rest is for fragments and for what kernels need while they run.
USABLE = 0.92
#: CUDA's own context with the libraries that torch loads, on each rank: about half a GiB.
CONTEXT_BYTES = 0.5 * 2**30
_LAYERS_AT_ONCE = 2  # whole under fsdp: the one that computes, and the next one, gathered ahead


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes on one rank."""

    parameters: float
    gradients: float
    optimizer: float
    buffers: float
    gathered: float  #: layers that are whole for a moment
    activations_per_sample: float

    @property
    def fixed(self) -> float:
        """What does not depend on the micro-batch."""
        return self.parameters + self.gradients + self.optimizer + self.buffers + self.gathered

    def total(self, micro_batch: int) -> float:
        """With a micro-batch of so many samples, and CUDA's own."""
        return self.fixed + micro_batch * self.activations_per_sample + CONTEXT_BYTES

    def largest_micro_batch(self, memory_bytes: float) -> int:
        """The most samples of a micro-batch that fit into a GPU of so much memory; 0: not even one."""
        left = memory_bytes * USABLE - self.fixed - CONTEXT_BYTES
        if left <= 0:
            return 0
        return int(left / self.activations_per_sample) if self.activations_per_sample else 1 << 30


def memory_need(record: RankRecord, strategy: str, ranks: int) -> MemoryNeed:
    """What ``strategy`` needs on each of ``ranks``, from what one rank alone has seen. A pure function.

    Args:
        record: of one rank that held everything, with activations.
        strategy: such as ``fsdp``.
        ranks: that divide what the strategy divides.

    Raises:
        SettingError: for a strategy of which no formula is known here.
    """
    kind, options = read_strategy(strategy)
    unknown = kind.unpredicted(split(strategy)[1])
    if kind.divides is None or not kind.own_activations or unknown:
        known = ", ".join(
            name for name, other in BUILT_IN.items() if other.divides is not None and other.own_activations
        )
        raise SettingError(
            f"--memory knows no formula for {unknown or 'the memory'} of strategy {strategy}; give one of {known}"
        )
    parts = getattr(options, kind.divided_by, 0) or (1 if kind.one_process else ranks)
    parameters, gradients, optimizer = (
        parts if part in kind.divides else 1 for part in ("parameters", "gradients", "optimizer")
    )
    absent = record.parameter_bytes * (1 - 1 / parameters)
    gathered = min(_LAYERS_AT_ONCE * record.largest_layer_bytes, absent)
    samples = min(record.micro_batch, record.global_batch)
    copies = ranks if kind.one_process else 1  # each device gets its part of the micro-batch
    return MemoryNeed(
        parameters=record.parameter_bytes / parameters,
        gradients=record.gradient_bytes / gradients,
        optimizer=record.optimizer_bytes / optimizer,
        buffers=record.buffer_bytes,
        gathered=gathered,
        activations_per_sample=(record.activation_bytes or 0) / samples / copies,
    )


def memory_table(
    record: RankRecord, strategies: Sequence[str], ranks: Sequence[int], catalogue: Catalogue
) -> list[str]:
    """What each strategy needs on so many ranks, and the largest micro-batch on each GPU; lines of 80 columns."""
    micro = record.micro_batch
    lines = [
        f"micro_batch={micro}, {record.precision}: bytes on each rank",
        f"{'':<14}{'parameters':>11}{'gradients':>11}{'optimizer':>11}{'activations':>12}{'total':>10}",
    ]
    needs = {(s, r): memory_need(record, s, r) for r in ranks for s in strategies}
    for (strategy, number), need in needs.items():
        cells = (need.parameters + need.gathered + need.buffers, need.gradients, need.optimizer)
        lines.append(
            f"{f'{strategy} x {number}':<14}{size(cells[0]):>11}{size(cells[1]):>11}{size(cells[2]):>11}"
            f"{size(micro * need.activations_per_sample):>12}{size(need.total(micro)):>10}"
        )
    lines += ["", f"largest micro-batch{'':<6}" + "".join(f"{f'{s} x {r}':>13}" for s, r in list(needs)[:4])]
    gpus = [gpu for gpu in catalogue.gpus.values() if gpu.name != "cpu"]
    for gpu in sorted(gpus, key=lambda gpu: gpu.memory_bytes):
        fits = [need.largest_micro_batch(gpu.memory_bytes) for need in list(needs.values())[:4]]
        cells_of_gpu = "".join(f"{'-' if not fit else 'any' if fit >= 1 << 30 else fit:>13}" for fit in fits)
        lines.append(f"{gpu.name:<16}{size(gpu.memory_bytes):>9}{cells_of_gpu}")
    return lines
