"""``lockstep top``: a run as it is now, seen from another terminal; it only reads.

training   epoch 3/10  ━━━━━━━━━━━━━━━━╸━━━━━━━━━  step 1 240/2 000
4 ranks | 2 140 samples/s | loss 0.4321 | 12 m 05 s left | saved at step 1 200

rank   step      phase  waits     memory      peak      free  place
0   1 240  reduction   38 %  1.21 GiB  1.80 GiB  14.0 GiB  train.py:17
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from lockstep.errors import SettingError
from lockstep.formatting import count, duration, harmless, plural, size
from lockstep.launch_contract import LOCK_FILE, RUN_FILE
from lockstep.report.status import RanksFile, RankStatus, Status, StatusFile, lateness
from lockstep.report.views import LinesView, View, can_draw

_LOOK_EVERY_S = 0.5
_SHOWN = 32  # ranks
_LATE_S = 2.0  # a rank that was heard before that is heard
_COLUMNS = ("rank", "step", "phase", "waits", "heard")
#: What is known of the memory of some rank has a column: of the host's, and of its device's.
_MEMORY = {
    "host": "memory",
    "host_peak": "peak",
    "host_free": "free",
    "device": "GPU",
    "device_peak": "GPU peak",
    "device_free": "GPU free",
}


def top(
    run_dir: Path,
    stream: TextIO,
    env: Mapping[str, str],
    *,
    once: bool,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Show the run in ``run_dir`` until it ends, or ``once``: live on a terminal, else as lines.

    Raises:
        SettingError: if there is no run.
    """
    require_run(run_dir)
    if once:
        status, ranks = _look(run_dir)
        lines = LinesView(stream, now=now)
        if status is not None:
            lines.show(status)
        if ended(run_dir):
            lines.line("the run has ended")
            return
        for line in table(ranks):
            lines.line(line)
        return
    below: list[str] = []
    if can_draw(stream, env):
        # Late, since rich takes a tenth of a second.
        from lockstep.report.terminal_view import TerminalView, picture

        view: View = TerminalView(stream, env, lambda status: picture(status, below))
    else:
        view = LinesView(stream, now=now)
    try:
        over = False
        while not over:
            over = ended(run_dir)  # before the last look, which then sees all
            status, ranks = _look(run_dir)
            below[:] = [] if over else table(ranks)
            if status is not None:
                view.show(status)
            if not over:
                sleep(_LOOK_EVERY_S)
    finally:
        view.close()
    view.line("the run has ended")


def require_run(run_dir: Path) -> None:
    """Check that ``run_dir`` is that of a run.

    Raises:
        SettingError: if not; names the newest one.
    """
    if not (run_dir / RUN_FILE).exists():
        newest = newest_run()
        near = "" if newest is None else f"; the newest is {newest}"
        raise SettingError(f"{run_dir} is no run directory (it holds no {RUN_FILE}){near}")


def newest_run() -> Path | None:
    """The directory below ``runs`` whose record has changed last; None if there is none."""
    runs = sorted(Path("runs").glob(f"*/{RUN_FILE}"), key=lambda path: path.stat().st_mtime)
    return runs[-1].parent if runs else None


def ended(run_dir: Path) -> bool:
    """Whether no launcher works in ``run_dir`` any more, and nothing that it has started still ends there."""
    try:
        with (run_dir / LOCK_FILE).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # none, or a file system without locks
    return True


def table(ranks: Sequence[RankStatus]) -> list[str]:
    """One line for each rank, with a head; the ones that wait least, whom others wait for, if there are many."""
    if not ranks:
        return []
    shown = sorted(ranks, key=lambda one: (one.waits is None, one.waits))[:_SHOWN]
    known = [name for name in _MEMORY if any(getattr(one.memory, name) is not None for one in shown)]
    head = (*_COLUMNS, *(_MEMORY[name] for name in known), "place")
    rows = [head, *(_row(one, known) for one in sorted(shown, key=lambda one: one.rank))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head) - 1)]
    lines = [
        "  ".join([*(f"{word:>{width}}" for word, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]
    left_out = len(ranks) - len(shown)
    return [*lines, *([f"... and {plural(left_out, 'rank')} more, which wait longer"] if left_out else [])]


def _row(one: RankStatus, memory: Sequence[str]) -> tuple[str, ...]:
    held = [getattr(one.memory, name) for name in memory]
    return (
        str(one.rank),
        count(one.step) if one.step >= 0 else "-",
        harmless(one.phase),
        "-" if one.waits is None else f"{100 * one.waits:.0f} %",
        "now" if one.silent_s < _LATE_S else f"{duration(one.silent_s)} ago",
        *("-" if bytes_held is None else size(bytes_held) for bytes_held in held),
        harmless(one.place),
    )


def _look(run_dir: Path) -> tuple[Status | None, list[RankStatus]]:
    status, ranks = StatusFile.read(run_dir / "status.json"), RanksFile.read_all(run_dir)
    return status and replace(status, late=lateness(ranks)), ranks
