"""What a few steps on one device say about a script: all that a prediction needs to know of it.

As a file, so that a prediction can be made elsewhere and later::

    {"schema": "lockstep-profile", "version": 1, "step": {...}, "link": {...} or null}

``step`` has the fields of `StepProfile` and ``link`` those of `LinkProfile`, under their names. A field may be added
under the same version; a reader leaves out what it does not know. What is there keeps its name and unit as long as the
version stays.

How long a device computes on a smaller batch: a fixed cost, and one for each sample::

    t(b) = F + s b,   so   t(b) / t(b0) = (b / b0 + h) / (1 + h),   h = F / (s b0)

F is what does not shrink: kernels are started, weights are read, and a small batch leaves a part of the device idle.
Seen from a batch that fills the device, h is much the same for devices whose speeds differ by ten: in MXNet's
measurements of ResNet-50 and Inception-v3 on K80, M60 and V100 between 0.07 and 0.1 from 1 to 32 images
(benchmarks/published/batch_sizes.csv). benchmarks/calibrate.py takes its median and its range from all published single
GPUs with several batches. Profiles measure it: `StepProfile.fixed_samples` is F / s.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from lockstep.errors import DataError
from lockstep.records import from_known, read_object
from lockstep.small_files import replace_text

SCHEMA, VERSION = "lockstep-profile", 1
MIB: Final = 2**20


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
    fixed_samples: float | None = None  #: in whose time a pass does what does not shrink with it; None: not measured


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """A measured all-reduce between `ranks` ranks: times over sizes, to be interpolated on a log-log scale."""

    ranks: int
    nodes: int
    backend: str  #: gloo, nccl
    bytes: tuple[int, ...]
    seconds: tuple[float, ...]  #: median of each size


def write_profile(path: Path, step: StepProfile, link: LinkProfile | None = None) -> None:
    """Write both to ``path``, as JSON, completely or not at all."""
    content = {
        "schema": SCHEMA,
        "version": VERSION,
        "step": asdict(step),
        "link": None if link is None else asdict(link),
    }
    replace_text(path, json.dumps(content, indent=1) + "\n")


def read_profile(path: Path) -> tuple[StepProfile, LinkProfile | None]:
    """What `write_profile` has written, of this version.

    Raises:
        DataError: if ``path`` holds something else, or a newer version.
        OSError: if it cannot be read.
    """
    try:
        content = read_object(path)
        if content.get("schema") != SCHEMA:
            raise DataError(f"{path} is no profile of a script; lockstep bench --profile FILE writes one")
        if content["version"] != VERSION:
            raise DataError(
                f"{path} has version {content['version']} and this is of version {VERSION}: measure the script again"
            )
        step, link = content["step"], content["link"]
        profile = from_known(StepProfile, step)
        _check_step(profile)
        if link is None:
            return profile, None
        measured = from_known(LinkProfile, link)
        _check_link(measured)
        return profile, measured
    except (ValueError, KeyError) as error:
        raise DataError(f"{path} is no whole profile of a script: {error!r}") from error


def _check_step(profile: StepProfile) -> None:
    """Raises ValueError for what no measurement can be."""
    sizes = (profile.global_batch, profile.micro_batch, profile.micro_batches, profile.steps)
    timings = (profile.data, profile.forward, profile.backward, profile.optimizer, profile.other)
    seconds = [s for timing in timings for s in (timing.median_s, timing.p10_s, timing.p90_s)]
    seconds += [gradient.ready_s for gradient in profile.gradients]
    if min(sizes) < 1 or not all(0 <= s < math.inf for s in seconds) or not profile.forward.median_s > 0:
        raise ValueError(
            "batches and steps must be at least 1, durations at least 0, and that of a forward pass above 0"
        )
    if not 0 <= (profile.fixed_samples or 0) < math.inf:
        raise ValueError("fixed_samples must be at least 0")


def _check_link(profile: LinkProfile) -> None:
    """Raises ValueError for what no measurement can be."""
    sizes, seconds = profile.bytes, profile.seconds
    if profile.ranks < 2 or not sizes or len(sizes) != len(seconds) or list(sizes) != sorted(set(sizes)):
        raise ValueError("a link must have two ranks or more, and a duration for each of its sizes, which must ascend")
    if not all(0 < s < math.inf for s in (*sizes, *seconds)):
        raise ValueError("sizes and durations of a link must be above 0")


def time_at(ratio: float, share: float) -> float:
    """Time of a pass with ``ratio`` times the samples, over that with all; grows with ``ratio``."""
    return (ratio + share) / (1 + share)


def rate_at(ratio: float, share: float) -> float:
    """Samples a second with ``ratio`` times the samples of a pass, over those with all."""
    return ratio / time_at(ratio, share)


def fixed_share(ratio: float, time: float) -> float:
    """The share with which a pass of ``ratio`` times the samples, below 1, takes ``time`` times as long as the whole.

    0 where it is shorter than in proportion; where it is hardly shorter at all, as if it were by a hundredth.
    """
    return max(0.0, (min(time, 0.99) - ratio) / (1 - min(time, 0.99))) if ratio < 0.99 else 0.0


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are sent as one."""

    bytes: int
    ready_s: float  #: since the backward pass began, when the last of them was there
    gradients: int


def buckets_of(gradients: Sequence[GradientReady], limit: float, first_limit: float | None = None) -> list[Bucket]:
    """The buckets of ``gradients``, which are in the order in which they became ready, by DDP's own rule.

    After the first step DDP lays its buckets out in that order. A bucket takes the next gradient and closes once it has
    *reached* its limit, so that a large gradient may exceed it by far. The first bucket's limit is 1 MiB where DDP's
    own default is used; where a script names a limit, it is that of the first one, too.

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
