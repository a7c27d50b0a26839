"""The manifest of a checkpoint: which bytes of which file hold which part of which tensor.

The file is one line of JSON whose sum covers its own bytes:

    {"crc32":"89abcdef","manifest":{ ... }}
              --------             -------
              of exactly these bytes: ^

`docs/format.md` describes each field.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from lockstep.checkpoint.json_state import decode, encode
from lockstep.errors import CheckpointError, DamagedCheckpoint

#: Its name in a checkpoint's directory.
MANIFEST = "manifest.json"
#: The newest format that this version reads, and the one that it writes.
FORMAT = 1
#: After so many bytes of a piece its sum is noted.
BLOCK_BYTES = 4 << 20


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

    @classmethod
    def parse(cls, content: bytes, where: str) -> Self:
        """Read what `dump` wrote; ``where`` is named in errors.

        Raises:
            DamagedCheckpoint: if any byte is not what was written.
            CheckpointError: if a newer version of Lockstep wrote it in a format that this one does not know.
        """
        head, tail = len(_HEAD) + 8 + len(_MIDDLE), len(_TAIL)
        body = content[head : len(content) - tail]
        if content != _envelope(body):
            raise DamagedCheckpoint(f"{where}: the manifest's bytes do not match their own sum")
        try:
            values = json.loads(body)
            if values["format"] > FORMAT:
                raise CheckpointError(
                    f"{where} has format {values['format']}, written by lockstep {values.get('lockstep') or '?'}; "
                    f"this version reads formats up to {FORMAT}: install a newer torch-lockstep"
                )
            manifest = cls(
                **values
                | {
                    "about": decode(values["about"], ()),
                    "tensors": tuple(_stored(entry) for entry in values["tensors"]),
                    "heads": {
                        name: Head(head["length"], int(head["crc32"], 16)) for name, head in values["heads"].items()
                    },
                }
            )
            manifest._check()
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise DamagedCheckpoint(f"{where}: the manifest is not understood: {error}") from error
        return manifest

    def _check(self) -> None:
        """Each byte of each file belongs to its head or to exactly one piece, so that the sums cover everything."""
        if strange := [name for name in self.files if not _PART.fullmatch(name)]:
            raise ValueError(f"{strange[0]!r} is no name of a part")
        sizes = [*self.files.values(), *(head.length for head in self.heads.values())]
        sizes += [size for t in self.tensors for p in t.pieces for size in (p.offset, p.length, *p.start, *p.shape)]
        sizes += [self.step, *(size for tensor in self.tensors for size in tensor.shape)]
        if not all(type(size) is int and size >= 0 for size in sizes):
            raise ValueError("a size or a place in it is no number, or negative")
        # The tree is read again once its tensors are: it must speak of those that there are.
        decode(self.tree, range(len(self.tensors)))
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


def _content(manifest: Manifest) -> list[Any]:
    return [(t.dtype, t.shape, sorted((p.start, p.shape, p.crc32) for p in t.pieces)) for t in manifest.tensors]


def _stored(entry: Mapping[str, Any]) -> TensorRecord:
    return TensorRecord(
        path=entry["path"],
        dtype=entry["dtype"],
        shape=tuple(entry["shape"]),
        pieces=tuple(
            Piece(
                file=piece["file"],
                offset=piece["offset"],
                length=piece["length"],
                crc32=int(piece["crc32"], 16),
                start=tuple(piece["start"]),
                shape=tuple(piece["shape"]),
                sums=tuple(int(one, 16) for one in piece.get("sums", ())),
            )
            for piece in entry["pieces"]
        ),
    )


_PART = re.compile(r"part-\d{1,9}\.(safetensors|bin)")
_HEAD, _MIDDLE, _TAIL = b'{"crc32":"', b'","manifest":', b"}\n"


def _envelope(body: bytes) -> bytes:
    return _HEAD + b"%08x" % zlib.crc32(body) + _MIDDLE + body + _TAIL
