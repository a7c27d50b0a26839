"""The options of a strategy, read from the text in which they were given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, fields
from typing import Any, TypeVar

from lockstep.errors import SettingError
from lockstep.settings import reader_of

T = TypeVar("T")


def options_of(kind: type[T], name: str, options: Mapping[str, str]) -> T:
    """The options of the strategy ``name``, a frozen dataclass, read by the types of its fields.

    Raises:
        SettingError: for a value that cannot be read.
    """
    known: dict[str, Field[Any]] = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    values = {}
    for option, text in options.items():
        reader = reader_of(known[option])
        try:
            values[option] = reader.read(text)
        except (ValueError, KeyError):
            raise SettingError(f"strategy {name}: {option}={text!r}; give {reader.wants}") from None
    return kind(**values)
