"""A choice with its options as one word, ``name:option=value,option=value``: a strategy, a search algorithm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lockstep.errors import SettingError
from lockstep.formatting import did_you_mean


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
        meant = f"did you mean {alike}?" if alike else did_you_mean(plain, known, otherwise="")
        raise SettingError(f"{what}={name!r}: {meant + ' ' if meant else ''}give one of {', '.join(known)}")
    options: dict[str, str] = {}
    for word in rest.split(",") if rest else ():
        option, _, value = word.partition("=")
        if not option or option in options:
            raise SettingError(f"{what}={spec!r}: write NAME:OPTION=VALUE,OPTION=VALUE, each option once")
        if option not in known[name]:
            there = did_you_mean(option, known[name], otherwise=f"it has {', '.join(known[name]) or 'none'}")
            raise SettingError(f"{what} {name} has no option {option}; {there}")
        options[option] = value or "true"
    return name, options
