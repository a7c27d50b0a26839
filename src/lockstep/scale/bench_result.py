"""The result of a benchmark: its rows as plain values, and as JSON.

::

    {"schema": "lockstep-bench", "version": 1, "script": ..., "machine": {...}, "scaling": ..., "rows": [...], ...}

with the fields of `BenchResult`, `BenchRow` and what they hold under their names. A field may be added under the same
version; what is there keeps its name and unit. docs/bench.md has the list.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep.errors import DataError
from lockstep.records import from_known, read_object
from lockstep.scale.steady_state import MedianInterval
from lockstep.scale.sweep import Scaling, Variant

SCHEMA, VERSION = "lockstep-bench", 1
PARTS = ("data", "forward", "backward", "exposed", "optimizer", "other")


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of a variant, over its rounds, without warm-up."""

    global_batch: int
    micro_batch: int
    step_s: MedianInterval
    parts_s: Mapping[str, float]  #: of a step, mean over ranks and steps, by `PARTS`; they add up to the mean step
    peak_bytes: int  #: of the rank with most; on a CPU of its process, with all libraries
    steps: int  #: that count
    warm_up_steps: int  #: that were cut off, of all rounds
    steady: bool  #: whether durations had settled in each round
    first_step_s: float  #: how much longer the first step of a pass takes, where one was seen after the first pass
    steps_per_epoch: int | None
    epochs: int | None
    other_cores: float  #: kept busy by what is not this benchmark
    disturbed: bool  #: whether that was in the way


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One variant. What is None cannot be told, as everything where ``failed`` says why."""

    variant: Variant
    measured: Measured | None
    failed: str = ""
    out_of_memory: bool = False
    oversubscribed: bool = False  #: more threads than cores: it says how the script behaves, not how it scales
    samples_per_s: float | None = None
    speed_up: float | None = None  #: over the reference of its group, see `rows.with_reference`
    efficiency: float | None = None  #: speed-up by how many times more ranks
    epoch_s: float | None = None  #: without evaluation, checkpoints and what comes before the first step
    gpu_hours: float | None = None  #: of an epoch
    cost: float | None = None  #: of an epoch
    mfu: float | None = None  #: operations that the model needs, of those that the device can do


@dataclass(frozen=True, slots=True)
class BenchMachine:
    """Where it was measured."""

    host: str
    device: str
    on_gpu: bool
    cores: int
    versions: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class BenchResult:
    """A whole benchmark."""

    script: str
    machine: BenchMachine
    scaling: Scaling
    rounds: int
    steps: int  #: of each round
    rows: tuple[BenchRow, ...]
    currency: str = ""  #: of `cost`; "": no price is known
    flops_per_sample: float | None = None

    def write(self, path: Path) -> None:
        """Write it to ``path`` as JSON."""
        content = {"schema": SCHEMA, "version": VERSION, **asdict(self)}
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> BenchResult:
        """What `write` has written.

        Raises:
            DataError: if ``path`` holds something else, or another version.
        """
        try:
            content = read_object(path)
            if content.pop("schema") != SCHEMA or content.pop("version") != VERSION:
                raise DataError(f"{path} is no benchmark of version {VERSION}; lockstep bench --out DIR writes one")
            return from_known(cls, content)
        except (ValueError, KeyError) as error:
            raise DataError(f"{path} is no whole benchmark: {error!r}") from error
