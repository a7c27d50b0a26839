"""What a few steps on one device say about a script: all that a prediction needs to know of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """Durations of one kind over the measured steps, in seconds."""

    median_s: float
    p10_s: float
    p90_s: float

    @property
    def cv(self) -> float:
        """Coefficient of variation, from the inter-decile range as for a normal distribution."""
        return (self.p90_s - self.p10_s) / 2.563 / self.median_s if self.median_s else 0.0


@dataclass(frozen=True, slots=True)
class GradientReady:
    """One parameter's gradient within the backward pass."""

    name: str
    bytes: int  #: of the gradient, as it is communicated
    ready_s: float  #: since the backward pass began, median


@dataclass(frozen=True, slots=True)
class StepProfile:
    """One optimizer step of a script on one device. Times are seconds, sizes bytes."""

    script: str
    device: str  #: name of the GPU, or of the CPU with the number of threads
    precision: str
    global_batch: int
    micro_batch: int
    micro_batches: int  #: per step, on one device
    steps: int  #: that were measured, after the warm-up
    data: Timing  #: waiting for the loader, per micro-batch
    forward: Timing  #: per micro-batch
    backward: Timing  #: per micro-batch
    optimizer: Timing  #: per step
    other: Timing  #: the rest of the step
    gradients: tuple[GradientReady, ...]  #: in the order in which they became ready
    parameter_bytes: int
    optimizer_bytes: int  #: state of the optimizers
    peak_bytes: int | None  #: memory of the device at its highest; None: not known (a CPU)
    flops_per_sample: float | None = None  #: forward and backward; None: not counted
    steps_per_epoch: int | None = None
    epochs: int | None = None
    training_steps: int | None = None  #: of a training that counts steps, in place of epochs


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """A measured all-reduce between `ranks` ranks: times over sizes, to be interpolated on a log-log scale."""

    ranks: int
    nodes: int
    backend: str  #: gloo, nccl
    bytes: tuple[int, ...]
    seconds: tuple[float, ...]  #: median of each size
