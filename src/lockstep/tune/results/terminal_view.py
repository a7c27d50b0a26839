"""The view of a search for a terminal.

searching  37/200 trials  ━━━━━━━━━━╸━━━━━━━━━━━━━━━━━━━━  2 m 05 s, 9 m 11 s left
30 done | 3 stopped early | 4 running | best 0.0123 (trial 31)
last improvement: trial 31, from 0.0145 to 0.0123, 12 s and 5 trials ago

island   trials   done   stopped   failed      best   by trial
     0       19     15         3        1    0.0123         31

worker   island   trial   reports     loss       for   parameters
     0        0      35         4    0.231   1 m 02 s   lr=0.01 layers=3
"""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lockstep.formatting import duration, plural
from lockstep.tune.record.journal import SearchRecord
from lockstep.tune.record.trial import Trial
from lockstep.tune.results.result import SearchResult
from lockstep.tune.results.summary import elapsed_s, improvement_lines, last_s, parameters, time_left_s

_ISLANDS, _WORKERS = 12, 16


def picture(record: SearchRecord, now_s: float) -> RenderableType:
    """What the terminal shows of a search, at ``now_s`` seconds since 1970."""
    result = SearchResult(record)
    counts = result.counts
    ended = len(record.trials) - counts["running"]
    planned = record.settings.get("trials")
    total = planned if isinstance(planned, int) else None
    first = Table.grid(expand=True, padding=(0, 2))
    for ratio in (None, None, 1, None):
        first.add_column(ratio=ratio, no_wrap=True)
    words = f"{ended}/{total} trials" if total else plural(ended, "trial")
    bar = ProgressBar(total=total, completed=ended, pulse=total is None)
    elapsed = max(elapsed_s(record), now_s - min((one.began_at_s for one in record.trials), default=now_s))
    is_running = any(one.state == "running" for one in record.evaluations)
    lasted = elapsed if is_running else elapsed_s(record)
    left_s = time_left_s(record, now_s)
    times = duration(lasted) + (f", {duration(left_s)} left" if left_s is not None else "")
    first.add_row(Text("searching" if is_running else "search", style="bold"), words, bar, times)
    told = [f"{counts['done']} done", f"{counts['stopped']} stopped early", f"{counts['running']} running"]
    told += [f"{counts['failed']} failed"] if counts["failed"] else []
    told += [f"best {best.loss:.6g} (trial {best.number})" for best in result.top(1)]
    second = Text(" | ".join(told), style="dim", no_wrap=True, overflow="ellipsis")
    gains = [
        Text(line, style="dim", no_wrap=True, overflow="ellipsis")
        for line in improvement_lines(record, now_s if is_running else last_s(record))
    ]
    return Group(first, second, *gains, Text(""), _islands(result), Text(""), _workers(record, now_s))


def _islands(result: SearchResult) -> Table:
    table = _table(False, "island", "trials", "done", "stopped", "failed", "best", "by trial")
    tops = result.top_by_island(1)
    for island, best in list(tops.items())[:_ISLANDS]:
        bred = [trial for trial in result.trials if trial.island == island]
        states = [str(sum(trial.state == state for trial in bred)) for state in ("done", "stopped", "failed")]
        loss = (f"{best[0].loss:.6g}", str(best[0].number)) if best else ("-", "-")
        table.add_row(str(island), str(len(bred)), *states, *loss)
    if len(tops) > _ISLANDS:
        table.caption = f"... and {plural(len(tops) - _ISLANDS, 'island')} more"
    return table


def _workers(record: SearchRecord, now_s: float) -> Table:
    table = _table(True, "worker", "island", "ranks", "trial", "reports", "loss", "for")
    table.add_column("parameters", ratio=1, no_wrap=True, overflow="ellipsis")
    newest: dict[int, Trial] = {}
    for trial in record.evaluations:
        known = newest.get(trial.worker)
        if known is None or (trial.state == "running", trial.number) > (known.state == "running", known.number):
            newest[trial.worker] = trial
    for worker, trial in sorted(newest.items())[:_WORKERS]:
        place = (str(worker), str(trial.island), str(trial.ranks))
        if trial.state == "running":
            loss = f"{trial.reports[-1].loss:.6g}" if trial.reports else "-"
            lasts = duration(now_s - trial.began_at_s)
            table.add_row(*place, str(trial.number), str(len(trial.reports)), loss, lasts, Text(parameters(trial)))
        else:
            table.add_row(*place, "-", "-", "-", "-", "", style="dim")
    if len(newest) > _WORKERS:
        table.caption = f"... and {plural(len(newest) - _WORKERS, 'worker')} more"
    return table


def _table(expand: bool, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, expand=expand)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table
