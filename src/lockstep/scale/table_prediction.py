"""Predictions for the rows of a published table, each held against what was measured.

For the simulator a row is a system, and a profile made of a throughput.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from lockstep.errors import SettingError
from lockstep.scale.catalogue import Catalogue
from lockstep.scale.links import Link
from lockstep.scale.published import Comparison, PublishedRow, compare
from lockstep.scale.scaling_loss import Constants, LeftOut, Loss, ScalingLoss, Traits
from lockstep.scale.simulated_strategy import SimulatedStrategy
from lockstep.scale.simulator import simulate
from lockstep.scale.step_profile import MIB, GradientReady, StepProfile, Timing, rate_at
from lockstep.scale.systems import System

_UNKNOWN = 0.02  #: by which an interval grows for each thing that is not known, as a part of the throughput
_TENSORS: Final = 60  #: into which parameters are cut where a table says only how many there are
_FORWARD: Final = 1 / 3  #: of forward and backward: a backward pass has two products for each of the forward pass
#: Gbit/s of an adapter, by the name of its generation.
_GENERATIONS: Final = {"fdr": 56, "edr": 100, "hdr": 200, "ndr": 400, "xdr": 800}
_REACHED: Final = 0.8  #: of an adapter's speed, by an all-reduce


@dataclass(frozen=True, slots=True)
class TablePrediction:
    """Throughput of all GPUs of a row; `low` and `high` hold the measured one in nine cases of ten."""

    row: PublishedRow
    base_ranks: int
    predicted: float
    low: float
    high: float
    notes: tuple[str, ...]

    @property
    def error(self) -> float | None:
        """Of the prediction, as a part of what was measured; None where nothing was."""
        return None if self.row.throughput is None else self.predicted / self.row.throughput - 1

    @property
    def inside(self) -> bool | None:
        """Whether what was measured lies in the interval."""
        return None if self.row.throughput is None else self.low <= self.row.throughput <= self.high

    def interval(self) -> dict[str, float]:
        """The prediction and its interval, as a part of a row of JSON."""
        return {"predicted": self.predicted, "low": self.low, "high": self.high}

    def as_dict(self) -> dict[str, object]:
        """As a row of JSON."""
        return {
            "line": self.row.line,
            "source": self.row.source,
            "model": self.row.model,
            "gpu": self.row.gpu,
            "precision": self.row.precision,
            "strategy": self.row.strategy,
            "group": self.row.group,
            "ranks": self.row.ranks,
            "nodes": self.row.nodes,
            "base_ranks": self.base_ranks,
            "scaling_kind": self.row.scaling,
            "unit": self.row.unit,
            "suspect": self.row.suspect,
            "measured": self.row.throughput,
            **self.interval(),
            "notes": list(self.notes),
        }


def predict_table(
    rows: Sequence[PublishedRow],
    model: ScalingLoss,
    catalogue: Catalogue,
    anchor: int | None = None,
    left_out: LeftOut = "subject",
) -> tuple[list[TablePrediction], list[str]]:
    """Predict each row from those of its group with fewer GPUs; returns notes on those that cannot be, too.

    Of what the model knows, rows of the same source, model and GPU as the one asked for are left out, or all of the
    same source, so that nothing is predicted from itself, also where the table is the one that the model was
    calibrated on.
    """
    comparisons, notes = compare(rows, anchor)
    alike = defaultdict[object, list[Comparison]](list)
    for comparison in comparisons:
        alike[getattr(traits_of(comparison, comparison.row, catalogue), left_out)].append(comparison)
    found: list[TablePrediction] = []
    for value, asked in alike.items():
        unseen = model.without(left_out, value)
        if anchor is None:
            losses = unseen.predict([traits_of(one, one.row, catalogue) for one in asked])
        else:
            losses = [_anchored(one, unseen, catalogue) for one in asked]
        found += (_prediction(one, loss, model.constants, catalogue) for one, loss in zip(asked, losses, strict=True))
    return sorted(found, key=lambda one: one.row.line), notes


def traits_of(comparison: Comparison, row: PublishedRow, catalogue: Catalogue) -> Traits:
    """What the model looks at in ``row``, seen from the comparison's base."""
    base, rate = comparison.base[0], comparison.base_rate
    gpu = catalogue.find_gpu(row.gpu)
    explained = 0.0
    for one, sign in ((row, 1), (base, -1)):
        explained += sign * (simulated_loss(one, rate, catalogue) or 0.0)
    return Traits(
        source=row.source,
        framework=row.framework,
        unit=row.unit.split("/")[0].split(" ")[0],
        precision=precision_class(row.precision),
        gpu=gpu.name.split("-")[0] if gpu else row.gpu,
        model=row.model,
        run=row.group,
        parameters=row.parameters,
        rate=rate,
        accumulation=row.accumulation or 1.0,
        ranks=row.ranks,
        nodes=row.nodes,
        base_ranks=base.ranks,
        base_nodes=base.nodes,
        simulated=max(0.0, explained),
        loss=math.log(rate * row.ranks / row.throughput) if row.throughput else None,
    )


def _anchored(comparison: Comparison, model: ScalingLoss, catalogue: Catalogue) -> Loss:
    also = [traits_of(comparison, row, catalogue) for row in comparison.anchor]
    return model.predict([traits_of(comparison, comparison.row, catalogue)], also)[0]


def _prediction(comparison: Comparison, loss: Loss, c: Constants, catalogue: Catalogue) -> TablePrediction:
    row, base = comparison.row, comparison.base[0]
    _, assumed = system_of(row, catalogue)
    notes = [*row.remarks, *assumed]
    if row.suspect:
        notes.append("the table calls this row suspect")
    if base.ranks > 1:
        notes.append(f"from {base.ranks} GPUs: the table has no row with fewer")
    linear = comparison.base_rate * row.ranks
    slower, faster = 0.0, 0.0
    if not comparison.same_batch and row.batch and base.batch and row.batch != base.batch:
        ratio = row.batch / base.batch
        likely = rate_at(ratio, c.fixed_share)
        extremes = sorted(rate_at(ratio, share) for share in (c.fixed_share_least, c.fixed_share_most))
        linear *= likely
        slower, faster = (abs(math.log(rate / likely)) for rate in extremes)
        notes.append(f"from a batch of {base.batch:g} on {base.ranks} GPUs")
    elif row.strong and (row.batch is None or base.batch is None):
        # It may be smaller by as much as there are more GPUs, or not at all where passes are accumulated.
        slower = -math.log(rate_at(base.ranks / row.ranks, c.fixed_share))
        notes.append("strong scaling, and the batch of a GPU is not said")
    # What had to be assumed, and what is not there to be looked at.
    unknown = _UNKNOWN * (len(assumed) + (row.parameters is None) + (not row.gpu))
    # The loss and the batch err independently of each other.
    down = math.hypot(loss.high - loss.median, slower) + unknown
    up = math.hypot(loss.median - loss.low, faster) + unknown
    predicted = linear * math.exp(-loss.median)
    low, high = predicted * math.exp(-down), predicted * math.exp(up)
    return TablePrediction(row, base.ranks, predicted, low, high, tuple(notes))


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
