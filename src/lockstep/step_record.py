"""What a benchmark asks a rank to measure, and what the rank has seen: what `run` writes and `scale` reads.

Both are values with a JSON form, which is in no way a public format: the two rooms are of one version.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from lockstep.records import JsonRecord
from lockstep.small_files import replace_text


@dataclass(frozen=True, slots=True)
class MeasureRequest(JsonRecord):
    """What each rank of a run measures before it ends, with exit code 0 and without a checkpoint."""

    directory: str  #: where each rank writes its record
    steps: int  #: then the run ends
    gradients: bool = False  #: when each gradient is ready; else only when the last one is
    memory: bool = False  #: what the first forward pass keeps for the backward pass
    flops: bool = False  #: count the operations of one more step after the others
    waits: bool = False  #: count where the host waits for values, in ten more steps after the others
    budget_s: float = 0.0  #: as few of the steps as fit in so many seconds, by the first ones; 0: all of them
    sum_bytes: tuple[int, ...] = ()  #: sizes of sums over all ranks to be timed after the steps
    sum_budget_s: float = 60.0  #: how long that may take

    def record(self, rank: int) -> Path:
        """Where a rank writes its record."""
        return Path(self.directory, f"rank-{rank:04d}.json")


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where the time of one step went on one rank, in seconds. The parts add up to `total_s`.

    On a GPU these are times of its stream: work that was queued while it was busy counts where it was executed.
    """

    step: int  #: how many were done before it
    samples: int  #: over all ranks
    began_s: float  #: since the first step began
    begins_pass: bool  #: the first step of a pass over the data, in which loader processes may have to start
    data_s: tuple[float, ...]  #: of each micro-batch: waiting for the loader
    forward_s: tuple[float, ...]  #: of each micro-batch, with the loss and whatever else the script does there
    backward_s: tuple[float, ...]  #: of each micro-batch, until its last gradient is ready
    exposed_s: float  #: communication that no computation hides
    optimizer_s: float
    other_s: float  #: the rest of the step
    cpu_s: float | None  #: CPU time of the main thread in forward and backward; None: not told, on a GPU

    @property
    def total_s(self) -> float:
        """The whole step."""
        parts = sum(self.data_s) + sum(self.forward_s) + sum(self.backward_s)
        return parts + self.exposed_s + self.optimizer_s + self.other_s

    @property
    def compute_s(self) -> float:
        """Forward and backward."""
        return sum(self.forward_s) + sum(self.backward_s)


@dataclass(frozen=True, slots=True)
class GradientTime:
    """One parameter's gradient."""

    name: str
    bytes: int
    ready_s: float  #: since the backward pass began, median over the steps


@dataclass(frozen=True, slots=True)
class HostWait:
    """A line of a script that needs values of tensors."""

    file: str
    line: int
    calls: str  #: such as ``.item()``
    count: float  #: of calls in a step
    seconds: float  #: in a step


@dataclass(frozen=True, slots=True)
class RankRecord(JsonRecord):
    """What one rank has seen."""

    rank: int
    ranks: int
    host: str
    device: str  #: name of the GPU, or of the CPU
    on_gpu: bool
    threads: int
    backend: str  #: by which gradients travel: gloo, nccl; none for one rank
    strategy: str
    precision: str
    global_batch: int
    micro_batch: int
    steps_per_epoch: int | None
    epochs: int | None
    began_at: float  #: the first step, in seconds since 1970 on the clock of its host
    steps: tuple[StepTimes, ...]
    parameter_bytes: int
    gradient_bytes: int
    buffer_bytes: int
    optimizer_bytes: int
    peak_bytes: int  #: of the GPU's memory; on a CPU of the process
    activation_bytes: int | None = None  #: kept by the forward pass of one micro-batch; None: not asked for
    largest_layer_bytes: int = 0  #: parameters of the largest direct child of a model, or of its like in a list
    flops_per_sample: float | None = None  #: forward and backward; None: not asked for
    gradients: tuple[GradientTime, ...] = field(default=())  #: in the order in which they become ready
    sums: tuple[tuple[int, float], ...] = ()  #: bytes and median seconds of sums over all ranks
    training_steps: int | None = None  #: of a training that counts steps; None: it counts epochs
    samples_per_epoch: int | None = None
    workers: int = 0  #: processes of its own, which read the data
    free_bytes: int = 0  #: what this rank may still take of its memory; 0: not known
    unused: tuple[str, ...] = ()  #: parameters that learn and got no gradient; looked for where `gradients` are
    waits: tuple[HostWait, ...] = ()  #: in the loop's body

    def write(self, path: Path) -> None:
        """Write the record to ``path``, completely or not at all."""
        replace_text(path, self.to_text())

    @classmethod
    def read(cls, path: Path) -> Self:
        """The record at ``path``.

        Raises:
            OSError: if there is none.
        """
        return cls.from_text(path.read_bytes())
