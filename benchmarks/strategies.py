"""All strategies on one model, side by side, over links of several speeds.

python benchmarks/strategies.py
python benchmarks/strategies.py --speeds 100mbit --ways ddp ddp:compress=fp16 --rounds 5 --json found.json
python benchmarks/strategies.py --page docs/strategies/measured.md --picture docs/pictures/strategies.svg
python benchmarks/strategies.py --speeds --no-memory --curve 1 2 4 8 --page docs/strategies/measured.md

A round is one visit (see `visits.py`) to each strategy, in an order that changes from round to round, and what is
compared is compared within a round. What a round saw of a way is the mean of its steps: medians and quartiles are over
rounds.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from torch import nn

import pages
import rank_curve
from hosts import why_not
from lockstep.strategy_kinds import BUILT_IN
from visits import (
    ALONE,
    LOOPBACK,
    Formula,
    Visits,
    Way,
    add_options,
    bits_per_s,
    build,
    crew,
    error_of,
    quartiles,
    size,
    steps_of,
)

PLAIN = "ddp"  # the usual way
CHOICES = (PLAIN, "zero", "fsdp")  # of `auto`
BLOCKING = "diloco:period=100"
CURVE = (PLAIN, "ddp:compress=fp16", "zero", "fsdp", "local-sgd:period=8")  # over numbers of ranks
STREAMED = "diloco:period=100,fragments=4,overlap=20"


def all_reduced(times: float) -> Formula:
    """So many all-reduces of all parameters; a scatter or a gather is half of one."""
    return lambda parameters, ranks: times * 2 * (ranks - 1) / ranks * size(parameters)


def low_rank(rank: int) -> Formula:
    """Two thin matrices instead of each matrix, and vectors as they are."""

    def formula(parameters: list[nn.Parameter], ranks: int) -> float:
        numbers = sum(rank * sum(p.shape) if p.dim() > 1 else p.numel() for p in parameters)
        return 2 * (ranks - 1) / ranks * 4 * numbers

    return formula


def in_copies(shard: int) -> Formula:
    """Each copy divided among so many ranks, and a rank's part summed over the copies."""

    def formula(parameters: list[nn.Parameter], ranks: int) -> float:
        copies = ranks / shard
        return size(parameters) * (3 * (shard - 1) / shard + 2 / shard * (copies - 1) / copies)

    return formula


def served(servers: int) -> Formula:
    """Servers send each worker its part; workers send all of theirs."""
    return lambda parameters, ranks: size(parameters) * max(1, (ranks - servers) / servers)


WAYS = (
    Way(ALONE, all_reduced(0), same_bits=True),
    Way(PLAIN, all_reduced(1), same_bits=True),
    Way("ddp:compress=fp16", all_reduced(1 / 2)),
    Way("ddp:compress=bf16", all_reduced(1 / 2)),
    Way("ddp:compress=powersgd,rank=1", low_rank(1)),
    Way("ddp:compress=powersgd,rank=4", low_rank(4)),
    Way("zero", all_reduced(3 / 2), same_bits=True),
    Way("zero:stage=2", all_reduced(1), same_bits=True),
    Way("fsdp", all_reduced(3 / 2), same_bits=True),
    Way("hsdp:shard=2", in_copies(2), same_bits=True, least=4),
    Way("local-sgd:period=8", all_reduced(1 / 8)),
    Way(BLOCKING, all_reduced(1 / 100)),
    Way(STREAMED, all_reduced(1 / 100)),
    Way("parameter-server:servers=1", served(1), same_bits=True),
    Way("parameter-server:servers=1,mode=async", served(1)),
    Way("pipeline", same_bits=True, micro=4),
    Way("auto", same_bits=True),
)


def known(way: Way, ranks: int) -> bool:
    """Whether this Lockstep has its strategy, and there are ranks enough."""
    return way.spec.partition(":")[0] in BUILT_IN and way.least <= ranks


def measure(ways: list[Way], speed: str, options: argparse.Namespace) -> dict[str, Visits]:
    """All ways in turn, round by round."""
    seen = {way.spec: Visits() for way in ways}
    with crew(speed, options.ranks, options) as ready:
        for number in range(options.rounds):
            turn = ways[number % len(ways) :] + ways[: number % len(ways)]
            for way in turn:
                if not seen[way.spec].error:
                    steps = steps_of(way, seen[way.spec], options.seconds)
                    visit = ready.visit(way, options.ranks, steps)
                    seen[way.spec].add(way, visit)
                    print(f"{speed}, round {number + 1}: {way.spec}", file=sys.stderr)
    return seen


def rows_of(ways: list[Way], speed: str, seen: dict[str, Visits], ranks: int, millions: float) -> list[dict[str, Any]]:
    """For each way: times, what they are beside `ddp` and beside computing alone, traffic."""
    parameters = list(build(millions).parameters())
    rows = []
    for way in ways:
        visits = seen[way.spec]
        if visits.error:
            rows.append({"way": way.spec, "error": visits.error})
            continue
        sent = [max(*sent, *received) for sent, received in zip(visits.sent, visits.received, strict=True)]
        rows.append(
            {
                "way": way.spec,
                "median_ms": median(visits.rounds_ms),
                "quartiles_ms": quartiles(visits.rounds_ms),
                "p10_ms": quantiles(visits.steps_ms, n=10)[0] if len(visits.steps_ms) > 1 else visits.steps_ms[0],
                **_beside("times_ddp", seen.get(PLAIN), visits),
                **_beside("of_alone", seen.get(ALONE), visits),
                "sent_bytes": None if speed == LOOPBACK else median(sent),  # ranks of one host share the card
                "formula_bytes": way.sends(parameters, ranks) if way.sends and speed != LOOPBACK else None,
            }
        )
    return rows


def _beside(figure: str, of: Visits | None, over: Visits) -> dict[str, Any]:
    """How many times quicker ``over`` is in each round: the median, and the quartiles."""
    ratios = _ratios(of, over)
    if ratios is None:
        return {figure: None, f"{figure}_quartiles": None}
    return {figure: median(ratios), f"{figure}_quartiles": quartiles(ratios)}


def _ratios(of: Visits | None, over: Visits) -> list[float] | None:
    if of is None or of.error:
        return None
    return [a / b for a, b in zip(of.rounds_ms, over.rounds_ms, strict=True)]


def table(speed: str, ranks: int, rows: list[dict[str, Any]]) -> str:
    """For people."""
    lines = [
        f"{speed}, {ranks} ranks",
        f"{'strategy':<40}{'median ms':>10}{'quartiles':>18}{'p10 ms':>9}{'x ddp':>7}{'quartiles':>14}{'of alone':>9}"
        f"{'MB sent':>9}{'formula':>9}",
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"{row['way']:<40}  {row['error'].splitlines()[0]}")
            continue
        ratios = f"{_times(row['times_ddp']):>7}{_range(row['times_ddp_quartiles'], 2):>14}{_times(row['of_alone']):>9}"
        sent, formula = (
            "-" if row[figure] is None else f"{row[figure] / 1e6:.3f}" for figure in ("sent_bytes", "formula_bytes")
        )
        times = f"{row['median_ms']:>10.1f}{_range(row['quartiles_ms'], 1):>18}{row['p10_ms']:>9.1f}"
        lines.append(f"{row['way']:<40}{times}{ratios}{sent:>9}{formula:>9}")
    return "\n".join(lines)


def memory(ways: list[Way], options: argparse.Namespace) -> list[dict[str, Any]]:
    """What the rank with most of it needs at its peak, for each way: one visit that gives back what is freed."""
    rows = []
    with crew("unlimited", options.ranks, options) as ready:
        for way in ways:
            steps = max(way.period, 3)
            visit = ready.visit(way, options.ranks, steps, for_memory=True)
            row = {"way": way.spec, "peak_bytes": max(seen.peak for seen in visit)}
            rows.append(row | ({"error": error_of(visit)} if error_of(visit) else {}))
    return rows


def memory_table(rows: list[dict[str, Any]], parameters_bytes: int) -> str:
    """For people."""
    lines = [f"{'peak memory of a rank':<40}{'MiB':>9}{'x model':>9}"]
    for row in rows:
        peak = row["peak_bytes"]
        cells = row["error"] if "error" in row else f"{peak / 2**20:>9.0f}{peak / parameters_bytes:>9.1f}"
        lines.append(f"{row['way']:<40}{cells}")
    return "\n".join(lines)


#: What was aimed for: at which speed (None: at each), for which way, which of its figures, and how much at least.
AIMS = (
    ("100mbit", "ddp:compress=fp16", "times_ddp", 1.8),
    ("100mbit", "ddp:compress=bf16", "times_ddp", 1.8),
    ("100mbit", "ddp:compress=powersgd,rank=1", "times_ddp", 8.0),
    ("100mbit", BLOCKING, "of_alone", 0.8),
    ("100mbit", STREAMED, "of_alone", 0.9),
    (LOOPBACK, "fsdp", "times_ddp", 0.7),
)


def verdicts(speed: str, rows: list[dict[str, Any]], seen: dict[str, Visits]) -> list[str]:
    """Each aim that this speed decides, and whether it is met."""
    found = {row["way"]: row for row in rows if "error" not in row}
    words = []
    for at, way, figure, least in AIMS:
        value = found[way][figure] if way in found else None
        if at == speed and value is not None:
            what = "times ddp's speed" if figure == "times_ddp" else "of computing alone"
            if way == BLOCKING and ALONE in found:
                compute_ms, link_ms = found[ALONE]["median_ms"], found[way]["formula_bytes"] * 8e3 / bits_per_s(speed)
                what += f" (the link leaves {compute_ms / (compute_ms + link_ms):.2f})"
            words.append(_verdict(f"{way}: {value:.2f} {what}, aim {least:g}", value >= least))
    choices = [way for way in CHOICES if way in found]
    if "auto" in found and choices:
        best = min(choices, key=lambda way: median(seen[way].rounds_ms))
        ratios = _ratios(seen[best], seen["auto"])
        if ratios is not None:
            value = median(ratios)
            words.append(_verdict(f"auto: {value:.2f} times the speed of {best}, aim 0.95", value >= 0.95))
    return words


def _verdict(words: str, met: bool) -> str:
    return f"{'met' if met else 'MISSED':<7} {words}"


def page_of(found: list[dict[str, Any]], needs: list[dict[str, Any]], words: list[str], rounds: int) -> str:
    """All speeds in one table, and what was aimed for, in Markdown."""
    by_speed = {part["speed"]: {row["way"]: row for row in part["rows"]} for part in found}
    peaks = {row["way"]: f"{row['peak_bytes'] / 2**20:.0f}" for row in needs}
    head = ["strategy", *(cell for speed in by_speed for cell in (f"{speed}, ms", "x ddp")), "MB a step"]
    head += ["peak MiB"] if peaks else []
    lines = []
    for way in found[0]["rows"]:
        cells = [f"`{way['way']}`"]
        for rows in by_speed.values():
            row = rows[way["way"]]
            if "error" in row:
                cells += ["failed", ""]
                continue
            cells.append(f"{row['median_ms']:.0f} ({_range(row['quartiles_ms'], 0)})")
            cells.append(
                "" if row["times_ddp"] is None else f"{row['times_ddp']:.2f} ({_range(row['times_ddp_quartiles'], 2)})"
            )
        sent = max(rows[way["way"]].get("sent_bytes") or 0 for rows in by_speed.values())
        lines.append([*cells, f"{sent / 1e6:.2f}", *([peaks[way["way"]]] if peaks else [])])
    made = f"{pages.circumstances()}, {found[0]['ranks']} ranks, {rounds} rounds, medians (quartiles):"
    aims = "\n".join(f"- {' '.join(line.split())}" for line in words)
    return "\n\n".join(filter(None, (made, pages.markdown(head, lines), aims)))


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def _range(ends: tuple[float, float] | None, digits: int) -> str:
    return "" if ends is None else f"{ends[0]:.{digits}f} to {ends[1]:.{digits}f}"


def picture(found: list[dict[str, Any]], path: str) -> None:
    """A panel of step times for each speed, and one of what a step sends. Blue: the same bits as one rank."""
    import matplotlib

    matplotlib.use("svg" if path.endswith(".svg") else "agg")
    matplotlib.rcParams |= {"svg.hashsalt": "strategies", "svg.fonttype": "none", "font.size": 9}
    from matplotlib import pyplot

    names = [row["way"] for row in found[0]["rows"] if row["way"] != ALONE]
    figure, panels = pyplot.subplots(
        1, len(found) + 1, sharey=True, figsize=(2.4 * (len(found) + 1) + 2.2, 0.26 * len(names) + 1.2)
    )
    places = list(range(len(names)))[::-1]
    same = {way.spec for way in WAYS if way.same_bits}
    for panel, part in zip(panels, found, strict=False):
        rows = {row["way"]: row for row in part["rows"] if "error" not in row}
        times = [rows[name]["median_ms"] if name in rows else 0 for name in names]
        panel.barh(places, times, height=0.7, color=["#4c72b0" if name in same else "#dd8452" for name in names])
        for place, ms in zip(places, times, strict=True):
            panel.text(ms, place, f" {ms:.0f}" if ms else " -", va="center", fontsize=7)
        if ALONE in rows:
            panel.axvline(rows[ALONE]["median_ms"], color="black", linewidth=0.8, linestyle="--")
        panel.set_title(part["speed"])
        panel.set_xlim(0, max(times) * 1.25)
        panel.set_xlabel("ms a step")
    last = panels[-1]
    rows = {row["way"]: row for row in found[0]["rows"] if "error" not in row}
    sent = [max((rows[name]["sent_bytes"] or 0) / 1e6, 1e-3) if name in rows else 1e-3 for name in names]
    last.barh(places, sent, height=0.7, color="#8c8c8c")
    for place, megabytes in zip(places, sent, strict=True):
        last.text(megabytes, place, f" {megabytes:.2g}", va="center", fontsize=7)
    last.set_xscale("log")
    last.set_xlim(min(sent) / 2, max(sent) * 8)
    last.set_title("on the wire")
    last.set_xlabel("MB a step")
    panels[0].set_yticks(places, names)
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(left=False)
    figure.tight_layout()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--ways", nargs="+", metavar="STRATEGY", help="only these")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True, help="the peak of each way")
    parser.add_argument("--place", default="ways", help="where in the page the table goes")
    parser.add_argument("--picture", metavar="FILE", help="draw the figures there; needs matplotlib")
    parser.add_argument("--curve", type=int, nargs="+", metavar="RANKS", help="also over these numbers of ranks")
    parser.add_argument("--curve-speed", default=LOOPBACK, metavar="SPEED", help="of the links then")
    parser.add_argument("--curve-picture", metavar="FILE", help="draw that")
    options = parser.parse_args()
    if why_not():
        sys.exit(f"there can be no hosts here: {why_not()}")
    ways = [way for way in WAYS if known(way, options.ranks)]
    if options.ways:
        ways = [way for way in ways if way.spec in (*options.ways, ALONE, PLAIN)]
        ways += [Way(spec) for spec in options.ways if spec not in {way.spec for way in WAYS}]
    found, needs, words = [], [], []
    for speed in ["100mbit", "1gbit", "10gbit", LOOPBACK] if options.speeds is None else options.speeds:
        seen = measure(ways, speed, options)
        rows = rows_of(ways, speed, seen, options.ranks, options.millions)
        met = verdicts(speed, rows, seen)
        found.append({"what": "time", "speed": speed, "ranks": options.ranks, "aims": met, "rows": rows})
        words += [f"{speed}: {line}" for line in met]
        print(table(speed, options.ranks, rows), *met, sep="\n", end="\n\n", flush=True)
    if options.memory:
        needs = memory(ways, options)
        print(memory_table(needs, size(list(build(options.millions).parameters()))))
    if options.picture and found:
        picture(found, options.picture)
    if options.page and found:
        pages.put(options.page, options.place, page_of(found, needs, words, options.rounds))
    curve = over_ranks(options) if options.curve else []
    if options.json:
        more = [{"what": "memory", "ranks": options.ranks, "rows": needs}]
        more += [{"what": "curve", "speed": options.curve_speed, "rows": curve}] if curve else []
        Path(options.json).write_text(json.dumps([*found, *more], indent=2))
    sys.exit(any("error" in row for rows in (needs, curve, *(part["rows"] for part in found)) for row in rows))


def over_ranks(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The curve over numbers of ranks: measured, printed, and put where it is wanted."""
    specs = options.ways or CURVE
    ways = [next((way for way in WAYS if way.spec == spec), Way(spec)) for spec in specs]
    rows = rank_curve.rows_of(rank_curve.measure(ways, options.curve, options.curve_speed, options), options.batch)
    print(rank_curve.table(options.curve_speed, rows), flush=True)
    if options.curve_picture:
        rank_curve.picture(options.curve_speed, rows, options.curve_picture)
    if options.page:
        pages.put(options.page, "ranks", rank_curve.page_of(options.curve_speed, rows, options.rounds))
    return rows


if __name__ == "__main__":
    main()
