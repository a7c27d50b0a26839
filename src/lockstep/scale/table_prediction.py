"""Predictions for the rows of a published table, each held against what was measured."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.scale.catalogue import Catalogue
from lockstep.scale.published import Comparison, PublishedRow, compare
from lockstep.scale.published_system import precision_class, simulated_loss, system_of
from lockstep.scale.scaling_loss import Constants, LeftOut, Loss, ScalingLoss, Traits
from lockstep.scale.step_profile import rate_at

_UNKNOWN = 0.02  #: by which an interval grows for each thing that is not known, as a part of the throughput


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
