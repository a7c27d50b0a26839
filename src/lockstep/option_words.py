"""A choice with its options as one word, ``name:option=value,option=value``: a strategy, a search algorithm."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence

from lockstep.errors import SettingError


def split_options(
    what: str, spec: str, known: Mapping[str, Sequence[str]], *, elsewhere: Mapping[str, str] | None = None
) -> tuple[str, dict[str, str]]:
    """The name and the options of ``spec``, as they were written; an option alone means true.

    Args:
        what: is chosen, such as ``strategy``; for messages.
        spec: the word.
        known: the names, each with the names of its options.
        elsewhere: names that other libraries use, in small letters and with hyphens, and what they are here.

    Raises:
        SettingError: if there is no such name or option (with the nearest one), an option is named twice, or there is
            none between two commas.
    """
    name, _, rest = spec.partition(":")
    if name not in known:
        plain = name.lower().replace("_", "-")
        alike = (elsewhere or {}).get(plain)
        meant = f"did you mean {alike}? " if alike else _nearest(plain, known)
        raise SettingError(f"{what}={name!r}: {meant}give one of {', '.join(known)}")
    options: dict[str, str] = {}
    for word in rest.split(",") if rest else ():
        option, _, value = word.partition("=")
        if not option or option in options:
            raise SettingError(f"{what}={spec!r}: write NAME:OPTION=VALUE,OPTION=VALUE, each option once")
        if option not in known[name]:
            there = _nearest(option, known[name]) or f"it has {', '.join(known[name]) or 'none'}"
            raise SettingError(f"{what} {name} has no option {option}; {there.rstrip()}")
        options[option] = value or "true"
    return name, options


def _nearest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {near[0]}? " if near else ""
