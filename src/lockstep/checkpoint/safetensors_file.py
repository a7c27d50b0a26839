"""The head of a safetensors file, which gives the bytes of each tensor after it.

    length of the JSON  8 bytes, little-endian
    JSON                {"w": {"dtype": "F32", "shape": [4, 3], "data_offsets": [0, 48]}, ...}, padded with spaces
    bytes of tensors    row-major, little-endian, one behind the other, from offset 0

Each part of a checkpoint is such a file, and so is an exported model: any tool that knows the format opens them. The
format's own library is not used, since it needs all tensors of a file in memory at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from lockstep.checkpoint.manifest import ITEM_BYTES, check_shape
from lockstep.records import from_known, object_from

_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "complex64": "C64",
    "bool": "BOOL",
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}
#: The only name that no tensor may have.
_METADATA = "__metadata__"
#: The head's length is a multiple of this number, so that tensors after it can be mapped into memory.
_ALIGNMENT = 16
#: The limit of the format's own library.
GREATEST_HEAD = 100_000_000


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor in a file."""

    name: str
    dtype: str  #: PyTorch's name without ``torch.``
    shape: tuple[int, ...]
    length: int  #: in bytes


def has_type(dtype: str) -> bool:
    """Whether the format has a word for a PyTorch type, named without ``torch.``."""
    return dtype in _DTYPES


def head_of(tensors: Iterable[FileTensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """The head of a file of ``tensors``, whose bytes follow in order without gaps.

    If several tensors have the same name, the later ones get a number after it. A type without a word in the format is
    written as bytes, with one more dimension.

    Args:
        tensors: of the file, in the order of their bytes.
        metadata: plain texts about the file.
    """
    entries: dict[str, object] = {_METADATA: dict(metadata)} if metadata else {}
    names, offset = {_METADATA}, 0
    for tensor in tensors:
        name, number = tensor.name, 1
        while name in names:
            number += 1
            name = f"{tensor.name}#{number}"
        names.add(name)
        dtype, shape = _DTYPES.get(tensor.dtype), list(tensor.shape)
        if dtype is None:
            dtype, shape = "U8", [*shape, tensor.length // max(1, math.prod(shape))]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + tensor.length]}
        offset += tensor.length
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True, slots=True)
class _Entry:
    """The entry of a tensor in the head."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_head(read: Callable[[int], bytes], size: int) -> tuple[int, list[tuple[int, FileTensor]]]:
    """The tensors in the head of a file of ``size`` bytes, each checked to be valid in torch and within the file.

    Args:
        read: reads the given number of next bytes of the file, from its beginning on.
        size: of the whole file.

    Returns:
        The length of the head in bytes; and of each tensor its offset after the head, and its description.

    Raises:
        ValueError: if the file is no safetensors file, is cut short, or holds a tensor that PyTorch cannot have.
    """
    length = int.from_bytes(read(8), "little")
    if not 2 <= length <= min(GREATEST_HEAD, size - 8):
        raise ValueError(f"a head of {length} bytes in a file of {size}: this is no safetensors file, or cut short")
    entries = object_from(read(length))
    types = {word: name for name, word in _DTYPES.items()}
    found = []
    for name, values in entries.items():
        if name == _METADATA:
            continue
        entry = from_known(_Entry, values)
        if entry.dtype not in types:
            raise ValueError(f"{name} has the type {entry.dtype!r:.80}, which is none of PyTorch's")
        first, end = entry.data_offsets
        tensor = FileTensor(name, types[entry.dtype], entry.shape, end - first)
        check_shape(name, tensor.shape, ITEM_BYTES[tensor.dtype])
        if first < 0 or tensor.length != math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]:
            raise ValueError(f"{name} has {tensor.length} bytes, which do not fit its shape and type")
        if 8 + length + end > size:
            raise ValueError(f"it is cut short: it has {size} bytes, and {name} is beyond its end")
        found.append((first, tensor))
    return 8 + length, found
