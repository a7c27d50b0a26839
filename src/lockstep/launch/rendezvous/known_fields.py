"""Values from another launcher, perhaps of another version: what is not known is left out, what is wrong is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

T = TypeVar("T")


def object_from(text: str) -> dict[str, Any]:
    """The JSON object in ``text``.

    Raises:
        ValueError: if it is something else, or nested too deeply.
    """
    try:
        values = json.loads(text)
    except RecursionError:
        raise ValueError("a value of the store is nested too deeply") from None
    if not isinstance(values, dict):
        raise ValueError(f"no JSON object: {text:.80}")
    return values


def from_known(cls: type[T], values: object, **converted: object) -> T:
    """An instance of the dataclass ``cls`` from those ``values`` that it has fields for.

    Args:
        cls: a dataclass.
        values: of its fields, by name, and perhaps of others.
        converted: stand for some of the ``values``, which JSON cannot hold.

    Raises:
        ValueError: if ``values`` is no mapping, or a field is missing that has no default.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"no {cls.__name__}: {values!r:.80}")
    names = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    try:
        return cls(**{name: value for name, value in {**values, **converted}.items() if name in names})
    except TypeError as error:
        raise ValueError(f"no {cls.__name__}: {error}") from error
