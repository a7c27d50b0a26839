"""Which variants of a script a benchmark compares, and with which settings each is started."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from lockstep.errors import SettingError
from lockstep.strategy_kinds import kind_of, split

Scaling = Literal["strong", "weak"]


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Of a script, as it says them."""

    global_batch: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to start the script. None: as the script has it."""

    strategy: str
    ranks: int  #: of `dp`: devices of its one rank
    batch: int | None = None  #: samples of a step; with weak scaling, of one rank's part of it
    bucket_mb: float | None = None
    precision: str | None = None
    workers: int | None = None

    @property
    def group(self) -> tuple[int | None, float | None, str | None, int | None]:
        """What variants have in common that are compared over strategies and ranks."""
        return self.batch, self.bucket_mb, self.precision, self.workers

    def __str__(self) -> str:
        """Such as ``ddp x 4, bucket 1 MiB``."""
        parts = [f"{self.strategy} x {self.ranks}"]
        parts += [f"batch {self.batch}"] if self.batch is not None else []
        parts += [f"bucket {self.bucket_mb:g} MiB"] if self.bucket_mb is not None else []
        parts += [self.precision] if self.precision is not None else []
        parts += [f"{self.workers} workers"] if self.workers is not None else []
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Sweep:
    """All combinations of what is to be varied.

    Raises:
        SettingError: for a number of ranks below 1, an unknown strategy, or nothing to vary.
    """

    ranks: tuple[int, ...] = (1,)
    strategies: tuple[str, ...] = ("ddp",)
    batches: tuple[int | None, ...] = (None,)
    buckets: tuple[float | None, ...] = (None,)
    precisions: tuple[str | None, ...] = (None,)
    workers: tuple[int | None, ...] = (None,)
    scaling: Scaling = "strong"
    settings: Mapping[str, str] = field(default_factory=dict)  #: of every variant

    def __post_init__(self) -> None:
        if not all((self.ranks, self.strategies, self.batches, self.buckets, self.precisions, self.workers)):
            raise SettingError("a sweep with nothing in it: give each option at least one value")
        for least, name, values in (
            (1, "--ranks", self.ranks),
            (1, "--batch", self.batches),
            (0, "--workers", self.workers),
        ):
            for value in values:
                if value is not None and value < least:
                    raise SettingError(f"{name} {value}: it must be at least {least}")
        for strategy in self.strategies:
            split(strategy)

    def variants(self) -> tuple[Variant, ...]:
        """Each combination once, in the order in which they are listed: ranks grow slowest."""
        axes = (self.ranks, self.strategies, self.batches, self.buckets, self.precisions, self.workers)
        found = (
            Variant(strategy, ranks, batch, bucket, precision, workers)
            for ranks, strategy, batch, bucket, precision, workers in itertools.product(*axes)
        )
        return tuple(dict.fromkeys(found))


@dataclass(frozen=True, slots=True)
class Start:
    """How a variant is started."""

    ranks: int  #: processes
    settings: Mapping[str, str]  #: over those of the script


def start_of(variant: Variant, sweep: Sweep, sizes: BatchSizes | None, *, on_gpu: bool) -> Start:
    """The ranks and settings of ``variant``. A pure function.

    Strong scaling keeps the samples of a step whatever the number of ranks, weak scaling those of a rank. The
    micro-batch is the script's, unless a step then has fewer micro-batches than ranks: so it becomes smaller. Of `dp`,
    which divides each micro-batch among its devices, it is so many times larger, so that each device gets as many
    samples at once as a rank does.

    Args:
        variant: one of ``sweep``.
        sweep: what is varied.
        sizes: of the script; None: not known.
        on_gpu: whether there are GPUs; without, CPU threads stand in for those of `dp`.

    Raises:
        SettingError: with weak scaling, if no batch size is known.
    """
    settings = dict(sweep.settings)
    ranks, name = variant.ranks, variant.strategy
    kind = kind_of(name)
    one_process = kind.one_process
    if one_process and "devices" in kind.option_names and "devices" not in split(name)[1]:
        name = f"{name}{',' if ':' in name else ':'}devices={ranks}"
        settings |= {} if on_gpu else {"rehearse": "true"}
    processes = 1 if one_process else ranks
    settings["strategy"] = name
    batch = variant.batch if variant.batch is not None or sizes is None else sizes.global_batch
    if batch is None and sweep.scaling == "weak":
        raise SettingError("--scaling weak, and the script's batch size could not be measured: give --batch")
    if batch is not None:
        whole = batch * ranks if sweep.scaling == "weak" else batch
        micro = min(sizes.micro_batch if sizes else -(-batch // 8), whole)
        if -(-whole // micro) < ranks:
            micro = max(1, whole // ranks)
        if processes != ranks:
            micro = min(whole, micro * ranks)
        settings |= {"global_batch": str(whole), "micro_batch": str(micro)}
    for key, value in (
        ("bucket_mb", variant.bucket_mb),
        ("precision", variant.precision),
        ("workers", variant.workers),
    ):
        if value is not None:
            settings[key] = f"{value:g}" if isinstance(value, float) else str(value)
    return Start(processes, settings)


def rounds_of(variants: tuple[Variant, ...], rounds: int) -> list[tuple[Variant, ...]]:
    """The order of each round: every variant once, another one first each time, so that none is always the first."""
    shift = max(1, len(variants) // max(1, rounds))
    return [variants[n * shift % len(variants) :] + variants[: n * shift % len(variants)] for n in range(rounds)]
