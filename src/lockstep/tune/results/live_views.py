"""How a search is shown while it runs: a live table on a terminal, plain lines in a log, or not at all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, TypeAlias

from lockstep.report import ViewOf, line_interval_s, view_on
from lockstep.tune.record.journal import FollowedSearch, SearchRecord, read_search
from lockstep.tune.results.result import SearchResult
from lockstep.tune.results.summary import counts_of

if TYPE_CHECKING:
    from rich.console import RenderableType

SearchView: TypeAlias = ViewOf[SearchRecord]

_LOOK_EVERY_S = 1.0


def choose_search_view(
    stream: TextIO,
    env: Mapping[str, str],
    *,
    now: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
) -> SearchView:
    """The view for ``stream``: live on a terminal, else lines, unless ``LOCKSTEP_VIEW`` names another.

    Args:
        stream: where the search is shown.
        env: the environment, for the terminal's capabilities.
        now: the clock that spaces lines, in seconds.
        wall_clock: seconds since 1970, by which running trials have begun.

    Raises:
        SettingError: if ``LOCKSTEP_VIEW`` names no view.
    """

    def drawing() -> Callable[[SearchRecord], RenderableType]:
        from lockstep.tune.results.terminal_view import picture

        return lambda record: picture(record, wall_clock())

    return view_on(stream, env, SearchLines(stream, now=now), drawing)


class SearchLines:
    """Plain lines for a log.

        37 of 200 trials: 4 running, 30 done, 3 stopped early | 2 m 05 s | 8 m 12 s of ranks | best 0.0123 (trial 31)

    A line is written every second for ten seconds, every ten seconds for two minutes, then every minute; also for each
    new best loss and each new reason of failures, at most ten times as often; and at the end.

    Args:
        stream: where the lines are written.
        now: the clock, in seconds.
    """

    def __init__(self, stream: TextIO, *, now: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._now = stream, now
        self._began_s = now()
        self._written_s = float("-inf")
        self._written: tuple[object, str] = (None, "")
        self._newest: SearchRecord | None = None

    def show(self, record: SearchRecord) -> None:
        """Write a line if one is due."""
        self._newest = record
        now_s = self._now()
        interval_s = line_interval_s(now_s - self._began_s)
        if now_s - self._written_s < interval_s / 10:
            return  # before anything is computed from the record, which may be long
        if _mark(record) != self._written[0] or now_s - self._written_s >= interval_s:
            self._write(record)

    def line(self, text: str) -> None:
        """Write ``text`` now."""
        self._stream.write(text.rstrip("\r\n") + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Write the final line, unless it is equal to the last one."""
        if self._newest is not None:
            self._write(self._newest)

    def _write(self, record: SearchRecord) -> None:
        text = line_of(record)
        if text != self._written[1]:
            self.line(text)
        self._written, self._written_s = (_mark(record), text), self._now()


def line_of(record: SearchRecord) -> str:
    """The state of a search in one line."""
    best = SearchResult(record).top(1)
    return counts_of(record) + (f" | best {best[0].loss:.6g} (trial {best[0].number})" if best else "")


def _mark(record: SearchRecord) -> object:
    """The part of a search whose changes are shown at once."""
    result = SearchResult(record)
    return [trial.number for trial in result.top(1)], [failure.reason for failure in result.failures]


def watch_search(
    run_dir: Path,
    stream: TextIO,
    env: Mapping[str, str],
    *,
    once: bool,
    is_over: Callable[[], bool],
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Show the search in ``run_dir`` until ``is_over``, or ``once``. Writes nothing to the directory.

    Raises:
        SettingError: if ``run_dir`` holds no search.
    """
    if once:
        stream.write(line_of(read_search(run_dir)) + "\n")
        return
    view = choose_search_view(stream, env)
    with FollowedSearch(run_dir) as followed:
        try:
            over = False
            while not over:
                over = is_over()  # before the last read, so that it reads all records
                began_s = time.monotonic()
                view.show(followed.record() or read_search(run_dir))
                if not over:
                    sleep(max(_LOOK_EVERY_S, 20 * (time.monotonic() - began_s)))
        finally:
            view.close()
    view.line(f"the search has ended; lockstep tune --show {run_dir} says more")
