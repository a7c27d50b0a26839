"""What a row of a published table is for the simulator: a system, and a profile made of a throughput."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Final

from lockstep.errors import SettingError
from lockstep.scale.catalogue import Catalogue
from lockstep.scale.links import Link
from lockstep.scale.published import PublishedRow
from lockstep.scale.simulated_strategy import SimulatedStrategy
from lockstep.scale.simulator import simulate
from lockstep.scale.step_profile import MIB, GradientReady, StepProfile, Timing
from lockstep.scale.systems import System

_TENSORS: Final = 60  #: into which parameters are cut where a table says only how many there are
_FORWARD: Final = 1 / 3  #: of forward and backward: a backward pass has two products for each of the forward pass
#: Gbit/s of an adapter, by the name of its generation.
_GENERATIONS: Final = {"fdr": 56, "edr": 100, "hdr": 200, "ndr": 400, "xdr": 800}
_REACHED: Final = 0.8  #: of an adapter's speed, by an all-reduce


def precision_class(precision: str) -> str:
    """Two bytes, tensor cores in tf32, or fp32."""
    text = precision.lower()
    if any(word in text for word in ("16", "amp", "fp8", "half", "mixed")):
        return "half"
    return "tf32" if "tf32" in text else "fp32"


def system_of(row: PublishedRow, catalogue: Catalogue) -> tuple[System, list[str]]:
    """The system that ``row`` was measured on, and what had to be assumed of it."""
    notes: list[str] = []
    gpu = catalogue.find_gpu(row.gpu)
    if gpu is None:
        notes.append(f"GPU {row.gpu or 'not named'}: not in the catalogue; taken for a V100")
        gpu = catalogue.gpu("V100")
    within, between = catalogue.links[gpu.within], catalogue.links[gpu.between]
    if "gloo" in f"{row.strategy} {row.within}".lower():
        within = catalogue.links["host-gloo"]
    elif found := re.search(r"pcie?\s*-?\s*(?:gen)?\s*(\d)?|nvlink\s*-?\s*(\d)|nvlink|nvswitch", row.within.lower()):
        name = found.group().replace(" ", "")
        name = (f"pcie{found.group(1) or 4}" if name.startswith("pci") else None) or (
            f"nvlink{found.group(2)}" if found.group(2) else gpu.within
        )
        within = catalogue.links.get(name, within)
    elif row.within:
        notes.append(f"link {row.within!r} within a node: taken for {within.name}")
    if row.nodes > 1:
        between, said = _between(row.between, between, catalogue)
        notes += said
    return System(gpu, row.nodes, max(1, row.ranks // row.nodes), within, between), notes


def _between(text: str, default: Link, catalogue: Catalogue) -> tuple[Link, list[str]]:
    words = text.lower()
    adapters = int(found.group(1)) if (found := re.search(r"(\d+)\s*x", words)) else 1
    gbits: float | None = None
    if found := re.search(r"(\d+(?:\.\d+)?) ?(?:Gb(?:ps|E|it|/s)?|G|gbps|gbe|gbit)(?![A-Za-z])", text):  # not GB
        gbits = adapters * float(found.group(1))
    elif found := re.search(r"(" + "|".join(_GENERATIONS) + r")\s*(\d+)?", words):
        gbits = adapters * float(found.group(2) or _GENERATIONS[found.group(1)])
    if gbits:
        like = catalogue.links["rdma-measured" if gbits >= 50 else "10gbe"]
        scaled = like.scaled(gbits / 8 * 1e9 * _REACHED / like.bytes_per_s)
        return replace(scaled, name=f"{gbits:g} Gbit/s", error=0.3, source=f"the table: {text}"), []
    try:
        return catalogue.link(text, default.name), []
    except SettingError:
        return default, [f"link {text or 'not named'!r} between nodes: taken for {default.name}"]


def step_s(row: PublishedRow, rate: float) -> float | None:
    """Seconds of one pass of a GPU at ``rate`` of the row's unit; None where the batch is in another unit."""
    if row.batch is None:
        return None
    unit = row.unit.split("/")[0].strip().lower()
    if unit.startswith(("img", "image", "seq", "sample", "example")) and not _of_signals(row, rate):
        return row.batch / rate
    if unit.startswith("tok"):
        if found := re.match(r"\d+", row.sample):
            return row.batch * float(found.group()) / rate
        if row.batch >= 1024:  # a batch in tokens
            return row.batch / rate
    return None


def _of_signals(row: PublishedRow, rate: float) -> bool:
    """Whether samples are those of a signal, not of a data set: more of them than a GPU could look at one by one."""
    return row.unit.lower().startswith("sample") and row.batch is not None and rate > 2000 * row.batch


def simulated_loss(row: PublishedRow, rate: float, catalogue: Catalogue) -> float | None:
    """Log of the time of a step over that of one GPU, by the simulator alone; None where the table does not say enough.

    Args:
        row: of several GPUs, or one.
        rate: throughput of one GPU.
        catalogue: of links.
    """
    seconds = step_s(row, rate)
    if seconds is None or row.parameters is None or row.ranks == 1:
        return 0.0 if row.ranks == 1 else None
    system, _ = system_of(row, catalogue)
    profile = profile_of(row, seconds)
    kind = row.strategy.lower()
    name = "fsdp" if "fsdp" in kind or "zero-3" in kind else "dp" if "dataparallel" in kind else "ddp"
    limits = re.search(r"cap\s*=\s*(\d+)", kind)
    strategy = SimulatedStrategy(
        name,
        reduction="fast",
        bucket_bytes=(float(limits.group(1)) if limits else 25.0) * MIB,
        first_bucket_bytes=MIB,
    )
    if name == "dp" and system.nodes > 1:
        return None
    from_one = simulate(profile, replace(system, nodes=1, gpus_per_node=1), strategy).seconds
    return _log_ratio(simulate(profile, system, strategy).seconds, from_one)


def _log_ratio(several: float, one: float) -> float:
    return max(0.0, math.log(several / one))


def profile_of(row: PublishedRow, pass_s: float) -> StepProfile:
    """A profile in which gradients of equal size become ready evenly."""
    passes = max(1, round(row.accumulation or 1))
    parameters = row.parameters or 0.0
    pure_half = re.fullmatch(r"(bf16|fp16|float16|bfloat16)", row.precision.lower())
    size = parameters * (2 if pure_half else 4)
    backward = pass_s * (1 - _FORWARD)
    gradients = tuple(
        GradientReady(f"gradient {number}", round(size / _TENSORS), backward * (number + 1) / _TENSORS)
        for number in range(_TENSORS)
    )
    nothing = _steady(0.0)
    return StepProfile(
        script=row.model,
        device=row.gpu,
        precision=row.precision,
        global_batch=round((row.batch or 1) * passes),
        micro_batch=max(1, round(row.batch or 1)),
        micro_batches=passes,
        steps=1,
        data=nothing,
        forward=_steady(pass_s * _FORWARD),
        backward=_steady(backward),
        optimizer=nothing,
        other=nothing,
        gradients=gradients,
        parameter_bytes=round(size),
        optimizer_bytes=round(2 * size),
        peak_bytes=None,
    )


def _steady(seconds: float) -> Timing:
    return Timing(seconds, seconds, seconds)
