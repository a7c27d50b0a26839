"""Tables of throughput over numbers of GPUs, as papers and READMEs publish them, in the columns of a CSV file.

Only `gpus_total` and `throughput_total` are needed; every other column may be missing or blank, and what is said there
makes a prediction narrower. Columns: source, framework, model, params_M, strategy, precision, gpu, gpus_total, nodes,
intra_link, inter_link, batch_per_gpu, grad_accum, seq_len_or_img, throughput_total, unit, scaling_kind, group, notes.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from lockstep.errors import DataError

_NEEDED = ("gpus_total", "throughput_total")


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """One measurement, or one that is to be predicted."""

    line: int  #: of the file, from 2
    source: str
    framework: str
    model: str
    parameters: float | None
    strategy: str
    precision: str
    gpu: str
    ranks: int
    nodes: int
    within: str
    between: str
    batch: float | None  #: of a GPU, and of one pass
    accumulation: float | None
    sample: str  #: length of a sequence, or size of a picture
    throughput: float | None  #: of all GPUs; None: not measured
    unit: str
    scaling: str
    group: str  #: rows that differ in the number of GPUs only
    notes: str

    @property
    def strong(self) -> bool:
        """Whether the batch of a GPU shrinks as there are more."""
        return "strong" in self.scaling and "accum" not in self.scaling

    @property
    def suspect(self) -> bool:
        """Whether the source contradicts itself here."""
        return "SUSPECT" in self.notes

    @property
    def subject(self) -> tuple[str, str]:
        """Model and GPU: what a prediction may not have seen."""
        return (self.model, self.gpu)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A row to be predicted, and measured rows of the same group with the fewest GPUs."""

    row: PublishedRow
    base: tuple[PublishedRow, ...]
    same_batch: bool = True  #: as far as the table says
    anchor: tuple[PublishedRow, ...] = ()  #: measured rows with more GPUs than the base, and fewer than the row

    @property
    def base_rate(self) -> float:
        """Throughput of one GPU of the base: the median of its rows."""
        return median(row.throughput / row.ranks for row in self.base if row.throughput)


def read_rows(text: str) -> list[PublishedRow]:
    """The rows of a CSV file; those without a number of GPUs are left out.

    Raises:
        DataError: if a column that is needed is missing.
    """
    reader = csv.DictReader(io.StringIO(text))
    missing = [column for column in _NEEDED if column not in (reader.fieldnames or ())]
    if missing:
        raise DataError(f"the table has no column {' and none '.join(missing)}; its first line must name the columns")
    rows = []
    for entry in reader:
        ranks = _number(entry.get("gpus_total"))
        if ranks and ranks >= 1:
            rows.append(_row(reader.line_num, int(ranks), entry))
    return rows


def compare(rows: Sequence[PublishedRow], anchor: int | None = None) -> tuple[list[Comparison], list[str]]:
    """What can be predicted from rows with fewer GPUs, and for the others why not.

    A row's base are the rows of its group with the fewest GPUs; if its group has none with fewer than itself, those of
    the same model, GPU and precision with another batch. With ``anchor`` rows of so many GPUs are known, too, and only
    rows with more are predicted.
    """
    usable = [row for row in rows if row.throughput and not row.suspect]
    comparisons, notes = [], []
    for row in rows:
        fewest = [other for other in usable if _group(other) == _group(row) and other.ranks < row.ranks]
        same_batch = True
        if not any(other.ranks == 1 for other in fewest):
            alike = [other for other in usable if _alike(other) == _alike(row) and other.ranks < row.ranks]
            if row.strong or not fewest:
                fewest, same_batch = fewest or alike, bool(fewest)
        if not fewest:
            smallest = not any(_alike(other) == _alike(row) and other.ranks < row.ranks for other in rows)
            if not smallest:
                notes.append(f"line {row.line}: no measured row with fewer GPUs")
            continue
        ranks = min(other.ranks for other in fewest)
        base = [other for other in fewest if other.ranks == ranks]
        base = [other for other in base if other.strategy == row.strategy] or base
        known = [other for other in fewest if anchor == other.ranks > ranks and other.strategy == row.strategy]
        if anchor is not None and (row.ranks <= anchor or not (known or ranks == anchor)):
            continue
        comparisons.append(Comparison(row, tuple(base), same_batch, tuple(known)))
    return comparisons, notes


def _group(row: PublishedRow) -> tuple[object, ...]:
    if row.group:
        return (row.group, row.precision, row.gpu)
    return (*_alike(row), row.batch, row.sample)


def _alike(row: PublishedRow) -> tuple[object, ...]:
    # A strategy that has rows with several GPUs only is compared with one GPU of any strategy.
    return (row.source, row.model, row.precision, row.gpu, row.unit)


def _row(line: int, ranks: int, entry: Mapping[str, str | None]) -> PublishedRow:
    def word(column: str) -> str:
        return (entry.get(column) or "").strip()

    parameters = _number(entry.get("params_M"))
    nodes = _number(entry.get("nodes")) or -(-ranks // int(_number(entry.get("gpus_per_node")) or 8))
    return PublishedRow(
        line=line,
        source=word("source"),
        framework=word("framework"),
        model=word("model"),
        parameters=None if parameters is None else parameters * 1e6,
        strategy=word("strategy"),
        precision=word("precision"),
        gpu=word("gpu"),
        ranks=ranks,
        nodes=max(1, min(ranks, int(nodes))),
        within=word("intra_link"),
        between=word("inter_link"),
        batch=_number(entry.get("batch_per_gpu")),
        accumulation=_number(entry.get("grad_accum")),
        sample=word("seq_len_or_img"),
        throughput=_number(entry.get("throughput_total")),
        unit=word("unit"),
        scaling=word("scaling_kind"),
        group=word("group"),
        notes=word("notes"),
    )


def _number(text: str | None) -> float | None:
    """A number above 0; None for anything else."""
    try:
        value = float((text or "").replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None
