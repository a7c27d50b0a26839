"""The manifest of a checkpoint: which bytes of which file hold which part of which tensor.

The file is one line of JSON whose sum covers its own bytes:

    {"crc32":"89abcdef","manifest":{ ... }}
              --------             -------
              of exactly these bytes: ^

`docs/format.md` describes each field.
"""

from __future__ import annotations

import io
import json
import math
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Self

from lockstep.checkpoint.json_state import decode, encode
from lockstep.errors import CheckpointError, DamagedCheckpoint
from lockstep.formatting import size
from lockstep.records import from_known, object_from

#: Its name in a checkpoint's directory.
MANIFEST = "manifest.json"
#: The newest format that this version reads, and the one that it writes.
FORMAT = 1
#: After so many bytes of a piece its sum is noted.
BLOCK_BYTES = 4 << 20
#: More than the manifest of a checkpoint of some million pieces has.
MOST_BYTES: Final = 1 << 30
#: Of a tensor, as torch computes with them.
_MOST_DIMENSIONS = 64
_MOST_TENSOR_BYTES = 1 << 62
#: In ``about``: the steps whose checkpoints retention leaves alone.
PROTECTED: Final = "protected_steps"
#: Bytes of one element, by PyTorch's name of the type without ``torch.``
ITEM_BYTES: Final[Mapping[str, int]] = {
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32", "complex32", "bcomplex32", "qint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16", "bits16"), 2),
    "complex128": 16,
    **dict.fromkeys(("bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 9))), 1),
    **dict.fromkeys(("qint8", "quint8", "quint4x2", "quint2x4", "bits8", "bits1x8", "bits2x4", "bits4x2"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    "float4_e2m1fn_x2": 1,
}


@dataclass(frozen=True, slots=True)
class Piece:
    """One box of a tensor, as consecutive bytes of a file: row-major, little-endian."""

    file: str
    offset: int  #: in bytes
    length: int  #: in bytes
    crc32: int
    start: tuple[int, ...]  #: the box's first element in the tensor
    shape: tuple[int, ...]  #: of the box
    #: the sum as far as each multiple of `BLOCK_BYTES` before the end, so that a reader can check a part by itself
    sums: tuple[int, ...] = ()

    @property
    def blocks(self) -> tuple[Block, ...]:
        """What can be checked by itself: blocks in the order of their bytes; one, if it was saved without sums."""
        inner = [BLOCK_BYTES * (number + 1) for number in range(len(self.sums))]
        sums = (*self.sums, self.crc32)
        return tuple(map(Block, (0, *inner), (*inner, self.length), (0, *self.sums), sums))


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive bytes of a piece."""

    first: int  #: in bytes, from the beginning of the piece
    end: int
    sum_before: int  #: of all bytes of the piece before it
    sum_behind: int  #: the same with its own


def checksums(content: memoryview) -> tuple[int, tuple[int, ...]]:
    """The CRC-32 of ``content``, and what it is at each multiple of `BLOCK_BYTES` before the end."""
    found, total = [], 0
    for first in range(0, len(content), BLOCK_BYTES):
        total = zlib.crc32(content[first : first + BLOCK_BYTES], total)
        found.append(total)
    return total, tuple(found[:-1])


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor; its pieces cover it once. A tensor without elements has no pieces."""

    path: str  #: in the tree, for people
    dtype: str  #: PyTorch's name without ``torch.``
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def check(self) -> None:
        """Whether torch can have such a tensor, and each piece has as many bytes as its box needs.

        Raises:
            ValueError: if not.
        """
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"{self.path} has the type {self.dtype!r}, which is none of PyTorch's")
        item = ITEM_BYTES[self.dtype]
        for shape in (self.shape, *(piece.shape for piece in self.pieces)):
            check_shape(self.path, shape, item)
        for piece in self.pieces:
            if math.prod(piece.shape) * item != piece.length:
                raise ValueError(f"{self.path}: a piece of {piece.length} bytes, and of shape {piece.shape!r:.80}")


def check_shape(name: str, shape: tuple[int, ...], item: int) -> None:
    """Whether torch can have a tensor of ``shape`` whose elements have ``item`` bytes; it is called ``name`` in errors.

    Raises:
        ValueError: if not.
    """
    fits = len(shape) <= _MOST_DIMENSIONS and all(0 <= one <= _MOST_TENSOR_BYTES for one in shape)
    # Also one without elements has strides, which are products of the others.
    if not fits or math.prod(max(1, one) for one in shape) * item > _MOST_TENSOR_BYTES:
        raise ValueError(f"{name} has a shape that no tensor has: {shape!r:.80}")


@dataclass(frozen=True, slots=True)
class Head:
    """The bytes of a file before its first piece, which say to other tools what the others are."""

    length: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """One checkpoint's table of contents."""

    step: int
    tree: Any  #: of states, encoded by `json_state.encode`; its tensors are numbers into ``tensors``
    tensors: tuple[TensorRecord, ...]
    files: Mapping[str, int]  #: bytes in each file but this one
    about: Mapping[str, Any]  #: plain values for people and for later checks
    lockstep: str = ""  #: version that wrote it
    torch: str = ""  #: version that wrote it
    heads: Mapping[str, Head] = field(default_factory=dict)  #: of the files that have one
    ranks: int = 0  #: how many wrote it together; 0: not known
    format: int = field(default=FORMAT)

    @property
    def total_bytes(self) -> int:
        """Bytes of all files but this one."""
        return sum(self.files.values())

    def same_state(self, other: Manifest) -> bool:
        """Whether both hold the same state, judged by plain values and sums, wherever their bytes lie.

        A tensor that is divided into other boxes counts as another one.
        """
        return (self.step, self.tree, _content(self)) == (other.step, other.tree, _content(other))

    def dump(self) -> bytes:
        """The bytes of the manifest's file."""
        values = asdict(self)
        values["about"] = encode(dict(self.about), lambda _value, _path: None)
        values["files"] = dict(self.files)
        for tensor in values["tensors"]:
            for piece in tensor["pieces"]:
                piece["crc32"] = f"{piece['crc32']:08x}"
                if sums := piece.pop("sums"):
                    piece["sums"] = [f"{one:08x}" for one in sums]
        for head in values["heads"].values():
            head["crc32"] = f"{head['crc32']:08x}"
        body = json.dumps(values, separators=(",", ":"), allow_nan=False).encode()
        return _envelope(body)

    @property
    def protected_steps(self) -> frozenset[int]:
        """The steps whose checkpoints retention leaves alone."""
        return frozenset(self.about.get(PROTECTED, ()))

    @classmethod
    def read(cls, file: io.BufferedIOBase, length: int, where: str) -> Self:
        """The manifest in a ``file`` of ``length`` bytes, of which no more is held than what its own sum covers.

        Raises:
            DamagedCheckpoint: if any byte is not what was written.
            CheckpointError: if a newer version of Lockstep wrote it in a format that this one does not know.
        """
        if length > MOST_BYTES:
            raise DamagedCheckpoint(f"{where} has {size(length)}, and a manifest at most {size(MOST_BYTES)}")
        # Before it is taken into memory, for what a file says of its own length costs nothing.
        head, found, left = file.read(_HEAD_BYTES), 0, length - _HEAD_BYTES - len(_TAIL)
        while left > 0 and _is_head(head) and (chunk := file.read(min(left, BLOCK_BYTES))):
            found, left = zlib.crc32(chunk, found), left - len(chunk)
        if left != 0 or head != _head(found):
            raise DamagedCheckpoint(f"{where}: the manifest's bytes do not match their own sum")
        file.seek(0)
        return cls.parse(file.read(length + 1), where)

    @classmethod
    def parse(cls, content: bytes, where: str) -> Self:
        """Read what `dump` wrote; ``where`` is named in errors.

        What comes back makes sense as a whole: a reader of tensors finds no contradiction in it afterwards.

        Raises:
            DamagedCheckpoint: if any byte is not what was written.
            CheckpointError: if a newer version of Lockstep wrote it in a format that this one does not know.
        """
        body = content[_HEAD_BYTES : len(content) - len(_TAIL)]
        if content != _envelope(body):
            raise DamagedCheckpoint(f"{where}: the manifest's bytes do not match their own sum")
        try:
            values = object_from(body)
            if type(values["format"]) is int and values["format"] > FORMAT:
                raise CheckpointError(
                    f"{where} has format {values['format']}, written by lockstep {values.get('lockstep') or '?'}; "
                    f"this version reads formats up to {FORMAT}: install a newer torch-lockstep"
                )
            for summed in (*_pieces_in(values["tensors"]), *values["heads"].values()):
                summed["crc32"] = int(summed["crc32"], 16)
                if "sums" in summed:
                    summed["sums"] = [int(one, 16) for one in summed["sums"]]
            manifest = from_known(cls, values | {"about": decode(values["about"], ())})
            manifest._check()
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise DamagedCheckpoint(f"{where}: the manifest is not understood: {error}") from error
        return manifest

    def _check(self) -> None:
        """Each byte of each file belongs to its head or to exactly one piece, so that the sums cover everything.

        And each tensor is one of torch's: of a type that there is, of as many bytes as its shape needs.
        """
        if strange := [name for name in self.files if not _PART.fullmatch(name)]:
            raise ValueError(f"{strange[0]!r} is no name of a part")
        sizes = [*self.files.values(), *(head.length for head in self.heads.values())]
        sizes += [one for t in self.tensors for p in t.pieces for one in (p.offset, p.length, *p.start)]
        sizes += [self.format, self.step, self.ranks]
        if min(sizes) < 0:
            raise ValueError("a size or a place in it is negative")
        for tensor in self.tensors:
            tensor.check()
        # The tree is read again once its tensors are: it must speak of those that there are.
        decode(self.tree, range(len(self.tensors)))
        if not all(type(step) is int for step in self.about.get(PROTECTED, ())):
            raise ValueError(f"{PROTECTED} are no steps: {self.about[PROTECTED]!r:.80}")
        if not self.heads.keys() <= self.files.keys():
            raise ValueError("a head of a file that does not exist")
        ends = {name: self.heads[name].length if name in self.heads else 0 for name in self.files}
        pieces = [piece for tensor in self.tensors for piece in tensor.pieces]
        if any(piece.sums and len(piece.sums) != (piece.length - 1) // BLOCK_BYTES for piece in pieces):
            raise ValueError("a piece has another number of sums than of blocks")
        for piece in sorted(pieces, key=lambda p: (p.file, p.offset, p.length)):
            if ends.get(piece.file) != piece.offset:
                raise ValueError(f"a gap or an overlap at byte {piece.offset} of {piece.file}")
            ends[piece.file] += piece.length
        if ends != dict(self.files):
            raise ValueError("the tensors do not fill the files")


def _content(manifest: Manifest) -> list[object]:
    return [(t.dtype, t.shape, sorted((p.start, p.shape, p.crc32) for p in t.pieces)) for t in manifest.tensors]


def _pieces_in(tensors: list[dict[str, Any]]) -> list[dict[str, object]]:
    return [piece for tensor in tensors for piece in tensor["pieces"]]


_PART = re.compile(r"part-\d{1,9}\.(safetensors|bin)")
_HEAD, _MIDDLE, _TAIL = b'{"crc32":"', b'","manifest":', b"}\n"
_HEAD_BYTES = len(_HEAD) + 8 + len(_MIDDLE)


def _head(crc32: int) -> bytes:
    return _HEAD + b"%08x" % crc32 + _MIDDLE


def _is_head(content: bytes) -> bool:
    return content.startswith(_HEAD) and content.endswith(_MIDDLE) and len(content) == _HEAD_BYTES


def _envelope(body: bytes) -> bytes:
    return _head(zlib.crc32(body)) + body + _TAIL
