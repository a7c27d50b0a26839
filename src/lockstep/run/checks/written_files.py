"""Files that the script opens for writing on several ranks at once, each of which writes all of it.

    with open("log.csv", "a") as file:      on 3 ranks each line stands there three times
    with open("predictions.txt", "w") ...   what one rank has written, another one overwrites

A script for one GPU does so by itself. The ranks compare the names where they meet next. Only what the script's own
lines open counts, themselves or by a package such as NumPy: torch and Lockstep see to their own files, and what an
import writes is a cache.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

from lockstep.formatting import format_ranks, grouped, some_of
from lockstep.heartbeat import is_users

#: A file, wherever ranks run: its path, and its number in the file system. Where it was opened.
Written = dict[tuple[str, int], str]

_NOT_THE_SCRIPTS: Final = {"lockstep", "torch", "importlib"}
_MOST_NAMED: Final = 3


class WrittenFiles:
    """Notes which files the script opens for writing on this rank, from now until `close`."""

    def __init__(self) -> None:
        self._found: Written = {}
        self.told: Final[set[str]] = set()  #: lines of the script of which the user was told
        self._open: Final = builtins.open
        builtins.open = io.open = self._noting = self._noting_open()

    def close(self) -> None:
        """``open`` is Python's own again."""
        if builtins.open is self._noting:
            builtins.open = io.open = self._open

    def take(self) -> Written:
        """The files that were opened since the last call."""
        found, self._found = self._found, {}
        return found

    def _noting_open(self) -> Any:
        own = self._open

        @functools.wraps(own)
        def noting_open(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            opened = own(file, mode, *args, **options)
            if not isinstance(file, int) and not {*mode}.isdisjoint("wax+"):
                self._note(opened, sys._getframe(1))
            return opened

        noting_open.__module__ = io.__name__  # where pickle finds it, as it finds Python's own
        return noting_open

    def _note(self, opened: Any, frame: FrameType | None) -> None:
        while frame is not None and not is_users(frame.f_code.co_filename):
            if str(frame.f_globals.get("__name__")).partition(".")[0] in _NOT_THE_SCRIPTS:
                return
            frame = frame.f_back
        about = os.fstat(opened.fileno())
        if frame is not None and stat.S_ISREG(about.st_mode):
            place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            self._found.setdefault((os.path.realpath(opened.name), about.st_ino), place)


def written_by_several(by_rank: Sequence[Mapping[tuple[str, int], str]], told: set[str]) -> str:
    """A line about the files that several ranks have opened for writing, in lines of the script that are not ``told``.

    "" for none. The lines are added to ``told``.
    """
    ranks = grouped((file, rank) for rank, written in enumerate(by_rank) for file in written)
    found = {by_rank[some[0]][file]: (file[0], some) for file, some in ranks.items() if len(some) > 1}
    new = {place: each for place, each in found.items() if place not in told}
    if not new:
        return ""
    told.update(new)
    named = [f"{path} ({place})" for place, (path, _) in new.items()]
    writers = format_ranks({rank for _, some in new.values() for rank in some})
    return (
        f"{writers} have opened {some_of(named, _MOST_NAMED)} for writing: each writes all of it, so lines "
        "stand there several times, or a rank overwrites what another one has written. Write `if run.leads:` around "
        "it, for what is the same on all ranks; or a file of each rank, with run.rank in its name"
    )
