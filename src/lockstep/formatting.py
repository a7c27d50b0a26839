"""Numbers, ranks, names, paths and command lines as people read them: nothing in them acts, and no secret shows."""

from __future__ import annotations

import contextlib
import difflib
import math
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
#: Control characters, separators of lines, changes of the direction of writing, and halves of a pair of UTF-16, which
#: no file can hold: what a terminal, a shell or a scheduler acts on, or a program that reads a picture fails on.
_ACTS = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
#: Names of secrets; neither a tokenizer, nor an author.
_SECRET = re.compile(
    r"token(?!i[sz]|s)|tokens|secret|passw|passphrase|\bpwd?\b|credential|(api|access|private)[-_]?key|"
    r"auth(?!or(?!i[sz]))",
    re.IGNORECASE,
)
#: A name with its value in one word, such as ``--token=x``, ``--set=token=x`` or ``{"token": "x"}``.
_NAMED = re.compile(rf"(.*?(?P<name>{_SECRET.pattern})[^=:]*[=:]\s*)(?P<value>.+)", re.IGNORECASE | re.DOTALL)
#: A user and a password in an address.
_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s]+(?=@)")


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


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """The second ones of ``pairs`` by the first, as what is said of many at once: in the order in which they come."""
    found: dict[K, list[V]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def some_of(names: Sequence[str], most: int) -> str:
    """The first ``most`` of the ``names``, and how many there are besides: ``a, b and 4 more``."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


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


def acts(text: str) -> bool:
    """Whether ``text`` holds a character that a terminal, a shell or a scheduler may act on, such as a line break."""
    return _ACTS.search(text) is not None


def harmless(text: str, keep: str = "") -> str:
    r"""``text`` with an escape such as ``\x1b`` in place of each character that may act, but for those to ``keep``."""
    return _ACTS.sub(lambda found: found[0] if found[0] in keep else ascii(found[0])[1:-1], text)


def command_line(words: Sequence[str]) -> str:
    """``words`` as one types them in a shell, `without_secrets`."""
    return shlex.join(without_secrets(words))


def without_secrets(words: Sequence[str]) -> list[str]:
    """The words of a command line with ``***`` in place of secrets: what may be printed and written down.

    A secret is what follows an option, or the name of a setting, in whose name there is a word such as token, secret,
    password, credential or API key; and who an address such as ``https://user:password@host`` speaks for.
    """
    shown, hides = [], ""
    for word in words:
        is_option = word.startswith("-")
        if hides and not is_option:
            shown.append(word if _counts(hides, word) else "***")
            continue
        hides = ""
        if (named := _NAMED.fullmatch(word)) is not None and not _counts(named["name"], named["value"]):
            shown.append(f"{named[1]}***")
            continue
        if named is None and is_option and (found := _SECRET.search(word)) is not None:
            hides = found[0]
        shown.append(_IN_ADDRESS.sub("***", word))
    return shown


def _counts(name: str, value: str) -> bool:
    """Whether ``--max-tokens 512`` is meant."""
    return name.lower() == "tokens" and value.isdigit()
