"""Tables of throughput over numbers of GPUs, as papers and READMEs publish them, in the columns of a CSV file.

Only `gpus_total` and `throughput_total` are needed; every other column may be missing or blank, and what is said there
makes a prediction narrower. Columns: source, framework, model, params_M, strategy, precision, gpu, gpus_total, nodes,
intra_link, inter_link, batch_per_gpu, grad_accum, seq_len_or_img, throughput_total, unit, scaling_kind, group, notes.
Columns may be parted by semicolons or tabs, too.
"""

from __future__ import annotations

import csv
import io
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from lockstep.errors import DataError
from lockstep.formatting import plural

_NEEDED = ("gpus_total", "throughput_total")
_NUMBER = re.compile(r"[+-]?(\d{1,3}(,\d{3})+|\d+)?(\.\d*)?(e[+-]?\d+)?", re.IGNORECASE)
_SHOWN = 12  #: lines of those that a note is about
_LEAST, _MOST = 1e-12, 1e15  #: beyond these nothing that a table counts is a measurement
_COUNTED = ("params_m", "nodes", "gpus_per_node", "batch_per_gpu", "grad_accum", "throughput_total")
_MOST_PARAMETERS_M = 1e7  #: ten trillion: a table with more counts them one by one
#: A unit of time that nothing is counted in: such rows say how long something takes.
_DURATION = re.compile(r"(h|hrs?|hours?|m|min|minutes?|s|secs?|seconds?|ms|us|days?)( |/|$)", re.IGNORECASE)


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
    remarks: tuple[str, ...] = ()  #: what of it could not be read

    @property
    def strong(self) -> bool:
        """Whether the batch of a GPU shrinks as there are more."""
        return "strong" in self.scaling and "accum" not in self.scaling

    @property
    def suspect(self) -> bool:
        """Whether the source contradicts itself here."""
        return "SUSPECT" in self.notes.upper()

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


def read_rows(text: str) -> tuple[list[PublishedRow], list[str]]:
    """The rows of a CSV file; those that cannot be used are left out, with a note on each.

    Raises:
        DataError: if it is no table, or a column that is needed is missing.
    """
    head = text.partition("\n")[0]
    delimiter = max(",;\t", key=head.count)  # a comma, where there is none of them
    reader = csv.reader(io.StringIO(text.removeprefix("\ufeff")), delimiter=delimiter, strict=True)
    rows, notes = [], []
    try:
        columns = [name.strip().lower() for name in next(reader, [])]
        missing = [column for column in _NEEDED if column not in columns]
        if missing:
            raise DataError(
                f"the table has no column {' and none '.join(missing)}; its first line must name the columns"
            )
        for cells in reader:
            entry = dict(zip(columns, (cell.strip() for cell in cells), strict=False))
            if any(entry.values()):
                made = _row(reader.line_num, entry)
                if isinstance(made, str):
                    notes.append(f"line {reader.line_num}: {made}; left out")
                    continue
                rows.append(made)
                notes += [f"line {made.line}: {said}" for said in made.remarks if "throughput_total" in said]
    except csv.Error as error:
        raise DataError(f"line {reader.line_num} of the table: {error}") from None
    return rows, notes


def compare(rows: Sequence[PublishedRow], anchor: int | None = None) -> tuple[list[Comparison], list[str]]:
    """What can be predicted from rows with fewer GPUs, and for the others why not.

    A row's base are the rows of its group with the fewest GPUs; if its group has none with fewer than itself, those of
    the same model, GPU and precision with another batch. With ``anchor`` rows of so many GPUs are known, too, and only
    rows with more are predicted.
    """
    usable = [row for row in rows if row.throughput and not row.suspect]
    in_group, like = _by(_group, usable), _by(_alike, usable)
    smallest = {key: min(row.ranks for row in found) for key, found in _by(_alike, rows).items()}
    comparisons: list[Comparison] = []
    notes: list[str] = []
    without_anchor: list[str] = []
    for row in rows:
        fewest = [other for other in in_group[_group(row)] if other.ranks < row.ranks]
        within_group = True
        if not any(other.ranks == 1 for other in fewest):
            alike = [other for other in like[_alike(row)] if other.ranks < row.ranks]
            if row.strong or not fewest:
                fewest, within_group = fewest or alike, bool(fewest)
        if not fewest:
            if smallest[_alike(row)] < row.ranks:
                notes.append(f"line {row.line}: no measured row with fewer GPUs")
            continue
        ranks = min(other.ranks for other in fewest)
        base = [other for other in fewest if other.ranks == ranks]
        base = [other for other in base if other.strategy == row.strategy] or base
        base = [other for other in base if other.batch == row.batch] or base
        known = [other for other in fewest if anchor == other.ranks > ranks and other.strategy == row.strategy]
        if anchor is not None and row.ranks <= anchor:
            continue
        if anchor is not None and not (known or ranks == anchor):
            without_anchor.append(str(row.line))
            continue
        same_batch = within_group and (None in (row.batch, base[0].batch) or row.batch == base[0].batch)
        comparisons.append(Comparison(row, tuple(base), same_batch, tuple(known)))
    if without_anchor:
        lines = ", ".join(without_anchor[:_SHOWN]) + (" and more" if len(without_anchor) > _SHOWN else "")
        notes.append(
            f"{plural(len(without_anchor), 'row')} left out, since no row of {anchor} GPUs is measured of their group "
            f"and strategy: line {lines}"
        )
    return comparisons, notes


def _by(
    key: Callable[[PublishedRow], tuple[object, ...]], rows: Sequence[PublishedRow]
) -> defaultdict[tuple[object, ...], list[PublishedRow]]:
    found = defaultdict[tuple[object, ...], list[PublishedRow]](list)
    for row in rows:
        found[key(row)].append(row)
    return found


def _group(row: PublishedRow) -> tuple[object, ...]:
    if row.group:
        return (row.group, row.precision, row.gpu, row.unit)
    return (*_alike(row), row.batch, row.sample)


def _alike(row: PublishedRow) -> tuple[object, ...]:
    # A strategy that has rows with several GPUs only is compared with one GPU of any strategy.
    return (row.source, row.model, row.precision, row.gpu, row.unit)


def _row(line: int, entry: Mapping[str, str]) -> PublishedRow | str:
    """A row, or why it is none."""

    def word(column: str) -> str:
        return entry.get(column, "")

    ranks, unit = _number(word("gpus_total")), word("unit")
    if ranks is None or ranks != int(ranks):
        return f"gpus_total {word('gpus_total')!r} is no number of GPUs"
    if _DURATION.match(unit):
        return f"{unit!r} is a duration, and what is predicted is a rate, such as img/s"
    counted = {name: _number(word(name)) for name in _COUNTED}
    remarks = [f"{name} {word(name)!r}: no number above 0" for name in _COUNTED if word(name) and not counted[name]]
    parameters = counted["params_m"]
    if parameters is not None and parameters > _MOST_PARAMETERS_M:
        remarks.append(f"params_M {word('params_m')}: no model has so many millions; left out")
        parameters = None
    nodes = counted["nodes"] or -(-ranks // max(1, int(counted["gpus_per_node"] or 8)))
    return PublishedRow(
        line=line,
        source=word("source"),
        framework=word("framework"),
        model=word("model"),
        parameters=None if parameters is None else parameters * 1e6,
        strategy=word("strategy"),
        precision=word("precision"),
        gpu=word("gpu"),
        ranks=int(ranks),
        nodes=max(1, min(int(ranks), int(nodes))),
        within=word("intra_link"),
        between=word("inter_link"),
        batch=counted["batch_per_gpu"],
        accumulation=counted["grad_accum"],
        sample=word("seq_len_or_img"),
        throughput=counted["throughput_total"],
        unit=unit,
        scaling=word("scaling_kind"),
        group=word("group"),
        notes=word("notes"),
        remarks=tuple(remarks),
    )


def _number(text: str) -> float | None:
    """A number above 0; None for anything else. A comma parts thousands: as a point of decimals it is refused."""
    if not _NUMBER.fullmatch(text) or not any(map(str.isdigit, text)):
        return None
    value = float(text.replace(",", ""))
    return value if _LEAST <= value <= _MOST else None
