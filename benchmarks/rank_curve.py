"""How much more a strategy trains with more ranks: the same work for each rank, on 1, 2, 4, 8 of them.

`strategies.py --curve` measures it, prints it, and puts it into a page. A round is one visit (see `visits.py`) to each
strategy on each number of ranks, in an order that changes from round to round; what is compared is compared within it.
"""

import argparse
import os
import sys
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import pages
from visits import Visits, Way, crew, quartiles, steps_of

Seen = dict[tuple[str, int], Visits]


def measure(ways: list[Way], ranks: list[int], speed: str, options: argparse.Namespace) -> Seen:
    """Each way on each number of ranks, round by round; those that take more ranks are left out."""
    cells = [(way, number) for way, number in product(ways, ranks) if number == 1 or number >= way.least]
    seen = {(way.spec, number): Visits() for way, number in cells}
    with crew(speed, max(ranks), options) as ready:
        for turn in range(options.rounds):
            begin = turn * len(cells) // options.rounds
            for way, number in cells[begin:] + cells[:begin]:
                visits = seen[way.spec, number]
                if not visits.error:
                    visits.add(way, ready.visit(way, number, steps_of(way, visits, options.seconds)))
                    print(f"{speed}, round {turn + 1}: {way.spec} on {number}", file=sys.stderr)
    return seen


def rows_of(seen: Seen, batch: int) -> list[dict[str, Any]]:
    """For each way and number of ranks: the time of a step, and samples a second beside those of the fewest ranks."""
    least = min(number for _, number in seen)
    rows = []
    for (spec, number), visits in seen.items():
        row: dict[str, Any] = {"way": spec, "ranks": number}
        if visits.error:
            rows.append(row | {"error": visits.error})
            continue
        row |= {"median_ms": median(visits.rounds_ms), "quartiles_ms": quartiles(visits.rounds_ms)}
        row["samples_per_s"] = number * batch / row["median_ms"] * 1e3
        fewest = seen.get((spec, least))
        if fewest is not None and not fewest.error:
            times = [number / least * a / b for a, b in zip(fewest.rounds_ms, visits.rounds_ms, strict=True)]
            row |= {"times_fewest": median(times), "quartiles_times": quartiles(times)}
        rows.append(row)
    return rows


def table(speed: str, rows: list[dict[str, Any]]) -> str:
    """For people."""
    lines = [
        f"{speed}, {os.cpu_count()} CPU cores",
        f"{'strategy':<24}{'ranks':>6}{'median ms':>10}{'quartiles':>18}{'samples/s':>11}"
        f"{'x fewest':>9}{'quartiles':>14}",
    ]
    for row in rows:
        head = f"{row['way']:<24}{row['ranks']:>6}"
        if "error" in row:
            lines.append(f"{head}  {row['error'].splitlines()[0]}")
            continue
        low, high = row["quartiles_ms"]
        line = f"{head}{row['median_ms']:>10.1f}{f'{low:.1f} to {high:.1f}':>18}{row['samples_per_s']:>11.0f}"
        if "times_fewest" in row:
            low, high = row["quartiles_times"]
            line += f"{row['times_fewest']:>9.2f}{f'{low:.2f} to {high:.2f}':>14}"
        lines.append(line)
    return "\n".join(lines)


def page_of(speed: str, rows: list[dict[str, Any]], rounds: int) -> str:
    """A row for each way and a column for each number of ranks, in Markdown."""
    ranks = sorted({row["ranks"] for row in rows})
    found = {(row["way"], row["ranks"]): row for row in rows}
    lines = []
    for way in dict.fromkeys(row["way"] for row in rows):
        cells = [f"`{way}`"]
        for number in ranks:
            row = found.get((way, number), {})
            low, high = row.get("quartiles_times", (0, 0))
            times = f" ({row['times_fewest']:.2f}; {low:.2f} to {high:.2f})" if "times_fewest" in row else ""
            cells.append(f"{row['samples_per_s']:.0f}{times}" if "samples_per_s" in row else "failed" if row else "")
        lines.append(cells)
    head = ["strategy", *(f"{number} rank{'s' * (number > 1)}" for number in ranks)]
    made = f"{pages.circumstances()}, {speed}, {rounds} rounds, samples a second (times the first column's; quartiles):"
    return f"{made}\n\n{pages.markdown(head, lines)}"


def picture(speed: str, rows: list[dict[str, Any]], path: str) -> None:
    """Samples a second over ranks, with their quartiles; dashed: each rank as quick as one alone."""
    import matplotlib

    matplotlib.use("svg" if path.endswith(".svg") else "agg")
    matplotlib.rcParams |= {"svg.hashsalt": "rank_curve", "svg.fonttype": "none", "font.size": 9}
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(5.5, 3.6))
    good = [row for row in rows if "error" not in row]
    for way in dict.fromkeys(row["way"] for row in good):
        mine = [row for row in good if row["way"] == way]
        rates = [row["samples_per_s"] for row in mine]
        # A quartile of the time of a step is one of the rate: the lower of one is the higher of the other.
        low, high = (
            [rate * row["median_ms"] / row["quartiles_ms"][end] for row, rate in zip(mine, rates, strict=True)]
            for end in (1, 0)
        )
        off = [[r - at for r, at in zip(rates, low, strict=True)], [at - r for r, at in zip(rates, high, strict=True)]]
        panel.errorbar([row["ranks"] for row in mine], rates, yerr=off, marker="o", markersize=3, capsize=2, label=way)
    ranks = sorted({row["ranks"] for row in good})
    alone = max((row["samples_per_s"] for row in good if row["ranks"] == ranks[0]), default=0.0)
    panel.plot(ranks, [alone * number / ranks[0] for number in ranks], color="black", linewidth=0.8, linestyle="--")
    panel.set_xscale("log", base=2)
    panel.set_xticks(ranks, [str(number) for number in ranks])
    panel.set_ylim(bottom=0)
    panel.set_xlabel("ranks")
    panel.set_ylabel("samples a second")
    panel.set_title(f"{speed}, {os.cpu_count()} CPU cores")
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False)
    figure.tight_layout()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)
