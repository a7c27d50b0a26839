"""What a script reads of the world around it: noted by line, and shifted in a run that is to show whether it matters.

    time.time(), os.listdir(), socket.gethostname() ...   called by a line of the script's own
        noted       the kind and the line, once
        shifted     later and a thousand times as fast, in the other order, of another host

Calls by installed packages, by Lockstep and by Python's own library get what they always get.
"""

from __future__ import annotations

import ctypes
import datetime
import functools
import gc
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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from lockstep.heartbeat import is_users

CLOCK, HOST, LISTING, DIRECTORY, PROCESS, CHANCE = "clock", "host", "listing", "directory", "process", "chance"

_OFFSET_S: Final = 100 * 86400.0
_RATE: Final = 1000
_BEGAN_S: Final = time.time()


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
        for kind, name in ((datetime.datetime, "now"), (datetime.datetime, "utcnow"), (datetime.date, "today")):
            self._watch_date(kind, name)
        self._put_all(HOST, {socket: ["gethostname"], platform: ["node"]}, lambda _: "another-host")
        listings = {os: ["listdir"], glob: ["glob"], pathlib.Path: ["iterdir", "glob", "rglob"]}
        self._put_all(LISTING, listings, lambda found: list(found)[::-1])
        self._put_all(DIRECTORY, {os: ["getcwd"]})
        self._put_all(PROCESS, {os: ["getpid"]})
        drawing = {os: ["urandom"], uuid: ["uuid1", "uuid4"], torch: ["seed"], torch.random: ["seed"]}
        self._put_all(CHANCE, {**drawing, secrets: ["randbits", "randbelow", "token_hex", "token_bytes", "choice"]})
        for owner, name in ((random, "seed"), (np.random, "seed"), (np.random, "default_rng")):
            self._put(owner, name, CHANCE, unless_given=True)

    def _put_all(
        self, kind: str, functions: Mapping[Any, Sequence[str]], shift: Callable[[Any], Any] | None = None
    ) -> None:
        for owner, names in functions.items():
            for name in names:
                self._put(owner, name, kind, shift)

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
        def watched(*args: Any, **options: Any) -> object:
            value = plain(*args, **options)
            if unless_given and (args or options):
                return value
            is_noted = self._note(kind, 2)
            return shift(value) if is_noted and shift is not None and kind in self._shifted else value

        setattr(owner, name, watched)

    def _watch_date(self, kind: type[datetime.date], name: str) -> None:
        plain = vars(kind)[name]

        def watched(cls: type, *args: Any, **options: Any) -> object:
            now = plain.__get__(None, cls)(*args, **options)
            if not (self._note(CLOCK, 2) and CLOCK in self._shifted):
                return now
            return now + datetime.timedelta(seconds=_OFFSET_S + (time.time() - _BEGAN_S) * _RATE)

        _set_on_compiled(kind, name, classmethod(watched))

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


def _set_on_compiled(kind: type, name: str, value: object) -> None:
    """Give a compiled class another method; libraries that were compiled for it would not bear another class."""
    (held,) = (each for each in gc.get_referents(vars(kind)) if isinstance(each, dict))
    held[name] = value
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(kind))


def reads_in(text: str) -> Iterator[tuple[str, str, int]]:
    """The kinds, files and lines that processes have noted in a file with this text."""
    for line in dict.fromkeys(text.splitlines()):
        kind, file, number = line.split("\t")
        yield kind, file, int(number)


def _later(began: float, unit: float, now: float) -> float:
    return type(began)(began + _OFFSET_S * unit + (now - began) * _RATE)
