"""What a script reads of the world around it: noted by line, and shifted in a run that is to show whether it matters.

    time.time(), os.listdir(), socket.gethostname() ...   called by a line of the script's own
        noted       the kind and the line, once
        shifted     later and a thousand times as fast, in the other order, of another host

Calls by installed packages, by Lockstep and by Python's own library get what they always get.
"""

from __future__ import annotations

import datetime
import functools
import glob
import os
import pathlib
import platform
import random
import secrets
import socket
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from typing import Any, Final

from lockstep.heartbeat import is_users

CLOCK, HOST, LISTING, DIRECTORY, PROCESS, CHANCE = "clock", "host", "listing", "directory", "process", "chance"

_OFFSET_S: Final = 100 * 86400.0
_RATE: Final = 1000
_BEGAN: Final = time.time()


class Surroundings:
    """Watches calls of this process, and of those that it forks.

    Args:
        file: gets a line for each place of the script that reads something, ``kind``, file and line between tabs.
        shifted: kinds of which the script gets other values.
    """

    def __init__(self, file: str, shifted: Collection[str]) -> None:
        self._file: Final = file
        self._shifted: Final = frozenset(shifted)
        self._noted: Final[set[tuple[str, str, int]]] = set()
        self._is_users: Final = functools.cache(is_users)

    def watch(self) -> None:
        """From now on, until the process ends."""
        import numpy as np
        import torch

        for name in ("time", "monotonic", "perf_counter", "time_ns", "monotonic_ns", "perf_counter_ns"):
            now = getattr(time, name)()
            self._put(time, name, CLOCK, functools.partial(_later, now, 1e9 if name.endswith("_ns") else 1.0))
        for name in ("localtime", "gmtime", "ctime", "strftime"):
            self._put(time, name, CLOCK)
        datetime.datetime = self._shifted_datetime()  # type: ignore[misc] - the type has no other place for a clock
        for owner, name in ((socket, "gethostname"), (platform, "node")):
            self._put(owner, name, HOST, lambda _: "another-host")
        for owner, name in ((os, "listdir"), (glob, "glob"), *((pathlib.Path, n) for n in ("iterdir", "glob", "rglob"))):
            self._put(owner, name, LISTING, lambda found: list(found)[::-1])
        self._put(os, "getcwd", DIRECTORY)
        self._put(os, "getpid", PROCESS)
        for owner, name in ((os, "urandom"), (uuid, "uuid1"), (uuid, "uuid4"), (torch, "seed"), (torch.random, "seed")):
            self._put(owner, name, CHANCE)
        for name in ("randbits", "randbelow", "token_hex", "token_bytes", "choice"):
            self._put(secrets, name, CHANCE)
        for owner, name in ((random, "seed"), (np.random, "seed"), (np.random, "default_rng")):
            self._put(owner, name, CHANCE, unless_given=True)

    def _put(
        self,
        owner: Any,
        name: str,
        kind: str,
        shift: Callable[[Any], Any] | None = None,
        *,
        unless_given: bool = False,
    ) -> None:
        plain = getattr(owner, name)

        @functools.wraps(plain)
        def watched(*args: Any, **options: Any) -> Any:
            value = plain(*args, **options)
            if unless_given and (args or options):
                return value
            is_noted = self._note(kind, 2)
            return shift(value) if is_noted and shift is not None and kind in self._shifted else value

        setattr(owner, name, watched)

    def _note(self, kind: str, depth: int) -> bool:
        """Whether a line of the script's own is the caller, which is then noted."""
        frame = sys._getframe(depth)
        file, line = frame.f_code.co_filename, frame.f_lineno
        if not self._is_users(file):
            return False
        if (kind, file, line) not in self._noted:
            self._noted.add((kind, file, line))
            with open(self._file, "a", encoding="utf-8") as notes:
                notes.write(f"{kind}\t{file}\t{line}\n")
        return True

    def _shifted_datetime(self) -> type:
        plain, note, shifts = datetime.datetime, self._note, CLOCK in self._shifted

        class OfAnyKind(type):
            def __instancecheck__(cls, value: object) -> bool:
                return isinstance(value, plain)

        class Datetime(plain, metaclass=OfAnyKind):
            @classmethod
            def now(cls, tz: datetime.tzinfo | None = None) -> Any:
                found = plain.now(tz)
                return found + _ahead() if note(CLOCK, 2) and shifts else found

            @classmethod
            def utcnow(cls) -> Any:
                found = plain.now(datetime.UTC).replace(tzinfo=None)
                return found + _ahead() if note(CLOCK, 2) and shifts else found

            @classmethod
            def today(cls) -> Any:
                found = plain.now()
                return found + _ahead() if note(CLOCK, 2) and shifts else found

        return Datetime


def reads_in(text: str) -> Iterator[tuple[str, str, int]]:
    """The kinds, files and lines that processes have noted in a file with this text."""
    for line in dict.fromkeys(text.splitlines()):
        kind, file, number = line.split("\t")
        yield kind, file, int(number)


def _later(began: float, unit: float, now: float) -> float:
    return type(began)(began + _OFFSET_S * unit + (now - began) * _RATE)


def _ahead() -> datetime.timedelta:
    return datetime.timedelta(seconds=_OFFSET_S + (time.time() - _BEGAN) * _RATE)
