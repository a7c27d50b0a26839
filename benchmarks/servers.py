"""Parameter servers beside an all-reduce, as servers and workers grow.

python benchmarks/servers.py
python benchmarks/servers.py --speeds 100mbit --servers 1 2 3 --workers 2 4 --page docs/strategies/measured.md

Each rank has a host of its own (see `visits.py`), and each worker computes as many samples a step.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pages
from hosts import why_not
from visits import Visits, Way, add_options, build, crew, size, steps_of

PLAIN = "ddp"


def measure(speed: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """As servers and workers grow: time, and what a worker and a server send a step, beside the formula."""
    parameters = size(list(build(options.millions).parameters()))
    cases = [
        (way, count, workers)
        for workers in options.workers
        for way, count in [
            *((Way(PLAIN), 0) for _ in [0] if workers > 1),
            *((Way(f"parameter-server:servers={count}"), count) for count in options.servers),
            *((Way(f"parameter-server:servers={count},mode=async"), count) for count in options.servers),
        ]
    ]
    seen = [Visits() for _ in cases]
    with crew(speed, max(count + workers for _, count, workers in cases), options) as ready:
        for number in range(options.rounds):
            for (way, count, workers), visits in zip(cases, seen, strict=True):
                if not visits.error:
                    steps = steps_of(way, visits, options.seconds)
                    visits.add(way, ready.visit(way, count + workers, steps, workers=workers))
                print(f"{speed}, round {number + 1}: {way.spec}, {workers} workers", file=sys.stderr)
    rows = []
    for (way, count, workers), visits in zip(cases, seen, strict=True):
        row = {"way": way.spec, "servers": count, "workers": workers, "error": visits.error}
        if not visits.error:
            # All that workers send, servers receive, and the other way round.
            into_servers = median(sum(sent) for sent in visits.sent) / count if count else None
            row |= {
                "median_ms": median(visits.steps_ms),
                "worker_sent_bytes": median(max(sent) for sent in visits.sent),
                "worker_formula_bytes": parameters if count else 2 * (workers - 1) / workers * parameters,
                "server_received_bytes": into_servers,
                "server_formula_bytes": workers / count * parameters if count else None,
            }
        rows.append(row)
    return rows


def table(speed: str, rows: list[dict[str, Any]]) -> str:
    """For people."""
    lines = [
        f"{speed}: MB a step that a worker sends, and that a server receives",
        f"{'strategy':<40}{'workers':>8}{'median ms':>10}{'worker':>9}{'formula':>9}{'server':>9}{'formula':>9}",
    ]
    for row in rows:
        if row["error"]:
            lines.append(f"{row['way']:<40}{row['workers']:>8}  {row['error'].splitlines()[0]}")
            continue
        numbers = [
            row[f"{who}_bytes"] for who in ("worker_sent", "worker_formula", "server_received", "server_formula")
        ]
        cells = "".join(f"{'-' if number is None else f'{number / 1e6:.2f}':>9}" for number in numbers)
        lines.append(f"{row['way']:<40}{row['workers']:>8}{row['median_ms']:>10.1f}{cells}")
    return "\n".join(lines)


def page_of(speed: str, rows: list[dict[str, Any]], rounds: int) -> str:
    """The same in Markdown."""
    head = ["strategy", "workers", "ms", "a worker sends, MB", "formula", "a server receives, MB", "formula"]
    lines = [
        [f"`{row['way']}`", str(row["workers"]), "failed" if row["error"] else f"{row['median_ms']:.0f}"]
        + ["" if number is None else f"{number / 1e6:.2f}" for number in _numbers(row)]
        for row in rows
    ]
    return f"{pages.circumstances()}, {speed}, {rounds} rounds, medians:\n\n{pages.markdown(head, lines)}"


def _numbers(row: dict[str, Any]) -> list[float | None]:
    figures = ("worker_sent", "worker_formula", "server_received", "server_formula")
    return [row.get(f"{figure}_bytes") for figure in figures]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 3])
    options = parser.parse_args()
    if why_not():
        sys.exit(f"there can be no hosts here: {why_not()}")
    found = []
    for speed in options.speeds or ["1gbit"]:
        rows = measure(speed, options)
        found.append({"speed": speed, "rows": rows})
        print(table(speed, rows), end="\n\n", flush=True)
    if options.page:
        texts = [page_of(part["speed"], part["rows"], options.rounds) for part in found]
        pages.put(options.page, "servers", "\n\n".join(texts))
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=2))
    sys.exit(any(row["error"] for part in found for row in part["rows"]))


if __name__ == "__main__":
    main()
