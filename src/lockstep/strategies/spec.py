"""A strategy and its options as one word: ``name:option=value,option=value``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import Field, fields
from typing import Any, TypeVar

from lockstep.errors import SettingError
from lockstep.settings import reader_of

T = TypeVar("T")


def split(spec: str) -> tuple[str, dict[str, str]]:
    """The name and the options of ``spec``, as they were written; an option alone means true.

    Raises:
        SettingError: if an option is named twice, or there is none between two commas.
    """
    name, _, rest = spec.partition(":")
    options: dict[str, str] = {}
    for word in rest.split(",") if rest else ():
        option, _, value = word.partition("=")
        if not option or option in options:
            raise SettingError(f"strategy={spec!r}: write NAME:OPTION=VALUE,OPTION=VALUE, each option once")
        options[option] = value or "true"
    return name, options


def options_of(kind: type[T], name: str, options: Mapping[str, str]) -> T:
    """The options of the strategy ``name``, a frozen dataclass, read by the types of its fields.

    Raises:
        SettingError: for an option that it does not have (with the nearest one), or a value that cannot be read.
    """
    known: dict[str, Field[Any]] = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    values = {}
    for option, text in options.items():
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1)
            there = f"did you mean {near[0]}?" if near else f"it has {', '.join(known) or 'none'}"
            raise SettingError(f"strategy {name} has no option {option}; {there}")
        reader = reader_of(known[option])
        try:
            values[option] = reader.read(text)
        except (ValueError, KeyError):
            raise SettingError(f"strategy {name}: {option}={text!r}; give {reader.wants}") from None
    return kind(**values)
