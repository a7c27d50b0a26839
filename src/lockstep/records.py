"""Records that others have written: files and messages in JSON or TOML, of which nothing is believed.

    file ─► `read_bytes`: a regular one, of a size that is allowed
              │
    message ──┴─► `value_in`: JSON, not nested too deeply ─► `from_known`: a dataclass, each field of its own type

Whatever the bytes are, these functions return or raise `OSError` or `ValueError`, and take no more memory than a few
times what was allowed.
"""

from __future__ import annotations

import enum
import errno
import functools
import io
import json
import os
import stat
import tomllib
import types
from collections.abc import Mapping
from dataclasses import Field, asdict, fields, is_dataclass
from typing import Any, ClassVar, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

#: More than any record of Lockstep's own has, but for a journal and a manifest.
MOST_BYTES = 16 << 20
#: ... and more than those two have, which grow with a run.
MOST_GROWN: int = 1 << 32
#: Beyond it a number is none of a step, a byte, a rank or a second.
_MOST = 1 << 63


def open_regular(path: str | os.PathLike[str], *, follow: bool = True) -> io.BufferedReader:
    """The file at ``path``, opened for reading; the caller closes it.

    Args:
        path: of the file.
        follow: also where a link leads.

    Raises:
        OSError: if it cannot be opened, or is no regular file: nobody may wait for who writes into a pipe.
    """
    link = 0 if follow else os.O_NOFOLLOW
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | link), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "no regular file", os.fspath(path))
    return file


def read_bytes(path: str | os.PathLike[str], most: int = MOST_BYTES) -> bytes:
    """What is in the regular file at ``path``, without what is added to it meanwhile. Takes as much memory.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is longer than ``most`` bytes.
    """
    with open_regular(path) as file:
        length = os.fstat(file.fileno()).st_size
        if length > most:
            raise ValueError(f"{os.fspath(path)} has {length} bytes; such a file has at most {most}")
        return file.read(length)


def value_in(text: str | bytes) -> Any:
    """The value that ``text`` is the JSON of.

    Raises:
        ValueError: if it is something else, or nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply for a record of Lockstep's") from None


def toml_in(text: str) -> dict[str, Any]:
    """The tables that ``text`` is the TOML of.

    Raises:
        ValueError: if it is something else, or nested too deeply.
    """
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply for a file of settings") from None


def object_from(text: str | bytes) -> dict[str, Any]:
    """The JSON object in ``text``.

    Raises:
        ValueError: if it is something else, or nested too deeply.
    """
    values = value_in(text)
    if not isinstance(values, dict):
        raise ValueError(f"no JSON object: {text!r:.80}")
    return values


def read_object(path: str | os.PathLike[str], most: int = MOST_BYTES) -> dict[str, Any]:
    """The JSON object in the file at ``path``.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is something else.
    """
    return object_from(read_bytes(path, most))


def from_known(cls: type[T], values: object, **converted: object) -> T:
    """An instance of the dataclass ``cls`` from those ``values`` that it has fields for, perhaps of another version.

    Args:
        cls: a dataclass, whose fields are plain values, tuples and mappings of them, and such dataclasses.
        values: of its fields, by name, and perhaps of others, which are left out.
        converted: stand for some of the ``values``, which JSON cannot hold; they are not looked at.

    Raises:
        ValueError: if ``values`` is no mapping, a field has a value of another type, or one is missing that has no
            default.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"no {cls.__name__}: {values!r:.80}")
    kinds: Mapping[str, Any] = _kinds(cls)  # type: ignore[arg-type] # mypy takes no type[T] for hashable
    given = {
        name: of_kind(kinds[name], value, f"{cls.__name__}.{name}")
        for name, value in values.items()
        if name in kinds and name not in converted
    }
    try:
        return cls(**given, **{name: value for name, value in converted.items() if name in kinds})
    except TypeError as error:
        raise ValueError(f"no {cls.__name__}: {error}") from error


class JsonRecord:
    """A frozen dataclass of what `from_known` reads, which goes to another process as one line of JSON."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def to_text(self) -> str:
        """One line, which `from_text` reads, perhaps in another version."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str | bytes) -> Self:
        """What `to_text` gave.

        Raises:
            ValueError: if ``text`` is something else.
        """
        return from_known(cls, object_from(text))


def of_kind(kind: object, value: object, name: str = "a value") -> Any:
    """``value``, as JSON has it, as the type ``kind``: lists become tuples where that is a tuple.

    Raises:
        ValueError: if it is none of that type; ``name`` is named.
    """
    if kind is float:
        fits = type(value) is float or (type(value) is int and abs(value) < _MOST)
    elif kind is int:
        fits = type(value) is int and abs(value) < _MOST
    elif kind is bool or kind is type(None):
        fits = type(value) is kind
    elif kind is str:
        fits = isinstance(value, str)
    elif kind is Any or kind is object:
        fits = True
    else:
        return _of_parts(kind, value, name)
    if not fits:
        raise ValueError(f"{name}: {value!r:.80} is not what belongs there")
    return value


def _of_parts(kind: Any, value: Any, name: str) -> object:
    """`of_kind` for types that have parts, and for the dataclasses and enumerations of a record."""
    origin, inside = _parts(kind)
    if origin in (Union, types.UnionType):
        for one in inside:
            try:
                return of_kind(one, value, name)
            except ValueError:
                continue
    elif origin is Literal:
        if any(value == one and type(value) is type(one) for one in inside):
            return value
    elif origin is tuple:
        each = inside
        if inside[-1:] == (...,) and isinstance(value, list | tuple):
            each = inside[:1] * len(value)
        if isinstance(value, list | tuple) and len(value) == len(each):
            return tuple(of_kind(one, item, name) for one, item in zip(each, value, strict=True))
    elif origin is list:
        if isinstance(value, list):
            return [of_kind(inside[0], item, name) for item in value]
    elif origin in (dict, Mapping):
        if isinstance(value, dict):
            return {of_kind(inside[0], key, name): of_kind(inside[1], item, name) for key, item in value.items()}
    elif isinstance(kind, type) and is_dataclass(kind):
        return from_known(kind, value)
    elif issubclass(kind, enum.Enum):
        return kind(value)
    raise ValueError(f"{name}: {value!r:.80} is not what belongs there")


@functools.cache
def _parts(kind: object) -> tuple[object, tuple[object, ...]]:
    """What ``kind`` is made of; typing takes as long to say so as a whole record to be read."""
    return get_origin(kind), get_args(kind)


@functools.cache
def _kinds(cls: type) -> Mapping[str, object]:
    """The types of what one can give to ``cls``, by name."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls) if field.init}
