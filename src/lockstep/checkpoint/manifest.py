"""The manifest of a checkpoint: the file and bytes of each part of each tensor.

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

#: The manifest's name in a checkpoint's directory.
MANIFEST = "manifest.json"
#: The newest format that this version reads, and the format that it writes.
FORMAT = 1
#: Number of bytes of a piece after which its checksum is noted.
BLOCK_BYTES = 4 << 20
#: More bytes than the manifest of a checkpoint with some million pieces has.
MOST_BYTES: Final = 1 << 30
#: Limits of a tensor in torch.
_MOST_DIMENSIONS = 64
_MOST_TENSOR_BYTES = 1 << 62
#: Key in ``about`` of the steps whose checkpoints retention keeps.
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
    """A box of a tensor, as consecutive bytes of a file: row-major, little-endian."""

    file: str
    offset: int  #: in bytes
    length: int  #: in bytes
    crc32: int
    start: tuple[int, ...]  #: the box's first element in the tensor
    shape: tuple[int, ...]  #: of the box
    #: the checksum up to each multiple of `BLOCK_BYTES` before the end, so that a reader can check a part alone
    sums: tuple[int, ...] = ()

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks that can be checked separately, in the order of their bytes; one, if saved without sums."""
        inner = [BLOCK_BYTES * (number + 1) for number in range(len(self.sums))]
        sums = (*self.sums, self.crc32)
        return tuple(map(Block, (0, *inner), (*inner, self.length), (0, *self.sums), sums))


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive bytes of a piece."""

    first: int  #: in bytes, from the beginning of the piece
    end: int
    sum_before: int  #: of all bytes of the piece before the block
    sum_behind: int  #: of all bytes of the piece up to the end of the block


def checksums(content: memoryview) -> tuple[int, tuple[int, ...]]:
    """The CRC-32 of ``content``, and of its beginning up to each multiple of `BLOCK_BYTES` before the end."""
    found, total = [], 0
    for first in range(0, len(content), BLOCK_BYTES):
        total = zlib.crc32(content[first : first + BLOCK_BYTES], total)
        found.append(total)
    return total, tuple(found[:-1])


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A tensor, which its pieces cover once. A tensor without elements has no pieces."""

    path: str  #: in the tree, for people
    dtype: str  #: PyTorch's name without ``torch.``
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def check(self) -> None:
        """Check that torch can have such a tensor, and that each piece has the number of bytes of its box.

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
    """Check that torch can have the tensor ``name``, of ``shape`` with elements of ``item`` bytes.

    Raises:
        ValueError: if not.
    """
    fits = len(shape) <= _MOST_DIMENSIONS and all(0 <= one <= _MOST_TENSOR_BYTES for one in shape)
    # A tensor without elements has strides, too, which are products of the other sizes.
    if not fits or math.prod(max(1, one) for one in shape) * item > _MOST_TENSOR_BYTES:
        raise ValueError(f"{name} has a shape that no tensor has: {shape!r:.80}")


@dataclass(frozen=True, slots=True)
class Head:
    """The bytes of a file before its first piece, which describe the pieces to other tools."""

    length: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The table of contents of a checkpoint."""

    step: int
    tree: Any  #: of states, encoded by `json_state.encode`; its tensors are numbers into ``tensors``
    tensors: tuple[TensorRecord, ...]
    files: Mapping[str, int]  #: bytes in each file but the manifest's
    about: Mapping[str, Any]  #: plain values for people and for later checks
    lockstep: str = ""  #: version that wrote the checkpoint
    torch: str = ""  #: version that wrote it
    heads: Mapping[str, Head] = field(default_factory=dict)  #: of files with a head
    ranks: int = 0  #: number of ranks that wrote the checkpoint; 0: not known
    format: int = field(default=FORMAT)

    @property
    def total_bytes(self) -> int:
        """The bytes of all files but the manifest's."""
        return sum(self.files.values())

    def same_state(self, other: Manifest) -> bool:
        """Whether both manifests hold the same state, by plain values and checksums, in whatever files.

        A tensor that is divided into other boxes counts as different.
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
        """The steps whose checkpoints retention keeps."""
        return frozenset(self.about.get(PROTECTED, ()))

    @classmethod
    def read(cls, file: io.BufferedIOBase, length: int, where: str) -> Self:
        """The manifest in a ``file`` of ``length`` bytes, taken into memory only if its own checksum is right.

        Raises:
            DamagedCheckpoint: if any byte differs from the written one.
            CheckpointError: if a newer version of Lockstep wrote it in a format that this version does not know.
        """
        if length > MOST_BYTES:
            raise DamagedCheckpoint(f"{where} has {size(length)}, and a manifest at most {size(MOST_BYTES)}")
        # Before the file is taken into memory, since a damaged file may have any length.
        head, found, left = file.read(_HEAD_BYTES), 0, length - _HEAD_BYTES - len(_TAIL)
        while left > 0 and _is_head(head) and (chunk := file.read(min(left, BLOCK_BYTES))):
            found, left = zlib.crc32(chunk, found), left - len(chunk)
        if left != 0 or head != _head(found):
            raise DamagedCheckpoint(f"{where}: the manifest's bytes do not match their own sum")
        file.seek(0)
        return cls.parse(file.read(length + 1), where)

    @classmethod
    def parse(cls, content: bytes, where: str) -> Self:
        """The manifest in the bytes of `dump`; ``where`` is named in errors.

        The result is consistent: a reader of tensors finds no contradiction in it afterwards.

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
        """Check that each byte of each file belongs to its head or to exactly one piece, and so to a checksum.

        And that each tensor has a type of torch's, and as many bytes as its shape needs.
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
        # The tree is decoded again with its tensors: it must refer only to existing tensors.
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
