"""Numbers, ranks, names and paths as people read them, in ASCII."""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Iterable
from pathlib import Path

_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def count(number: int | float) -> str:
    """Groups of three digits: ``2 140``; a measured number below 100 keeps a decimal: ``8.5``, ``64.0``."""
    if not math.isfinite(number):
        return str(number)
    if isinstance(number, float) and abs(number) < 99.95:
        return f"{number:.1f}"
    return f"{number:,.0f}".replace(",", " ")


def plural(number: int, noun: str) -> str:
    """Such as ``1 rank``, ``3 ranks``, ``2 micro-batches``."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith(('ch', 'sh', 's', 'x')) else 's'}"


def did_you_mean(word: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """``did you mean NAME?``, for the nearest name in ``known``; ``otherwise``, or all names, if none is near."""
    names = list(known)
    if near := difflib.get_close_matches(word, names, n=1):
        return f"did you mean {near[0]}?"
    return f"there are {', '.join(names)}" if otherwise is None else otherwise


def relative_path(path: Path) -> str:
    """``path``, relative to the current directory where that is possible, and where that directory still exists."""
    with contextlib.suppress(ValueError, FileNotFoundError):
        return str(path.relative_to(Path.cwd()))
    return str(path)


def duration(seconds: float) -> str:
    """The two units that matter: ``0.8 s``, ``45 s``, ``12 m 05 s``, ``1 h 12 m``, ``3 d 04 h``."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f} s"
    whole = round(seconds)
    if whole < _MINUTE:
        return f"{whole} s"
    if whole < _HOUR:
        return f"{whole // _MINUTE} m {whole % _MINUTE:02d} s"
    if whole < _DAY:
        return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE:02d} m"
    return f"{whole // _DAY} d {whole % _DAY // _HOUR:02d} h"


def size(num_bytes: float) -> str:
    """Three digits and a binary unit: ``640 bytes``, ``1.21 MiB``, ``98.1 GiB``."""
    exponent, value = 0, float(num_bytes)
    # 999.5 and not 1024: four digits would say more than anyone reads.
    while abs(value) >= 999.5 and exponent < len(_UNITS) - 1:
        value /= 1024
        exponent += 1
    if exponent == 0:
        return plural(round(value), "byte")
    return f"{value:.{2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0}f} {_UNITS[exponent]}"


def format_ranks(ranks: Iterable[int]) -> str:
    """Such as ``ranks 0-2, 5``."""
    numbers = sorted(ranks)
    runs: list[list[int]] = []
    for rank in numbers:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(words)}"
