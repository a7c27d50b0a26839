"""The comparison of ranks, which finds and names ranks with different values.

Replicas are equal bit for bit after each step, and so are checksums of their tensors. The content of a checkpoint is
compared, since a checkpoint takes each tensor from one rank: after the first step of a pass, every ``check_every``
steps, and before each save, which is not made if ranks differ. Models are compared before each evaluation, too.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import Final

import numpy as np
import torch
from torch import nn

from lockstep.checkpoint import SavedTree
from lockstep.collectives import Group
from lockstep.errors import MismatchError, UsageError
from lockstep.formatting import format_ranks
from lockstep.nested import leaves

_KEEP_WHOLE: Final = "Keep what is whole on each rank: an average of the weights needs ddp or zero"
_NOTHING: Final[Mapping[str, object]] = {}
# Numbers of words of a GPU's tensors that are added up as one row, and weighed at once.
_ROW: Final = 1 << 12
_AT_ONCE: Final = 1 << 22
_ODD: Final = -7046029254386353131  # any odd number without a pattern would do
_PAD: Final = 0x5BD1E995  # any number that is rare


class DivergenceCheck:
    """Compares the values of ranks.

    Args:
        group: all ranks.
    """

    def __init__(self, group: Group) -> None:
        self._group: Final = group
        self._apart: Final[set[str]] = set()  # inputs of the training that differ between ranks
        self._equal_at = 0  # the last step after which ranks were equal

    def compare(
        self,
        state: SavedTree,
        step: int,
        *,
        modules: Mapping[str, object] = _NOTHING,
        inputs: Mapping[str, tuple[object, object]] | None = None,
        in_step: bool = False,
    ) -> None:
        """Check that all tensors of ``state`` are equal on all ranks after ``step`` steps. Collective.

        With ``in_step``, the check is before the update of the next step.

        Plain values under ``kept_values``, those of kept schedulers, and the settings of ``modules``, by name, must be
        equal, too; and the second value of each of ``inputs`` if the first values were equal. Takes one pass over the
        tensors, and about 1 ms; tensors of which a rank holds a part are left out. Waits for the GPU.

        Raises:
            MismatchError: naming the tensors and ranks that differ.
            UsageError: for a tensor of which a rank keeps a part.
        """
        if self._group.size == 1:
            return
        tensors = dict(tensors_in(state))
        own = dict(zip(tensors, checksums(list(tensors.values())), strict=True))
        plain = dict(state.get("kept_values", {})) | schedulers_in(state.get("kept", {}))
        own |= {name: zlib.crc32(repr(value).encode()) for name, value in (*plain_in(plain), *modules.items())}
        given = {n: tuple(zlib.crc32(repr(one).encode()) for one in two) for n, two in (inputs or {}).items()}
        given = {name: sums for name, sums in given.items() if name not in self._apart}
        every = sorted(own.items()), sorted((name, now) for name, (_, now) in given.items())
        found = zlib.crc32(repr(every).encode())  # objects may give their parts in any order
        if len(set(self._group.gather_objects(found, "a checksum of all state"))) > 1:
            self._name_differences(own | self._differing(given), step, in_step, set(modules))
        self._equal_at = step

    def _differing(self, given: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """Inputs that were equal on all ranks and now differ; others are ignored from now on. Collective."""
        by_rank = self._group.gather_objects(given, "what the training is computed from")
        names = [name for name in by_rank[0] if all(name in one for one in by_rank)]  # a cache may lack an item
        differ = [name for name in names if len({one[name][1] for one in by_rank}) > 1]
        were_equal = {name for name in differ if len({one[name][0] for one in by_rank}) == 1}
        self._apart.update(set(differ) - were_equal)
        return {name: given[name][1] for name in differ if name in were_equal}

    def _name_differences(self, own: dict[str, int], step: int, in_step: bool, of_modules: set[str]) -> None:
        by_rank = self._group.gather_objects(own, "checksums of all state")
        of_modules = of_modules.union(*self._group.gather_objects(of_modules, "what modules are set to"))
        differ = {}
        for name in dict.fromkeys(name for sums in by_rank for name in sums):
            values = [sums.get(name) for sums in by_rank]
            common = max(values, key=values.count)
            if any(value != common for value in values):
                differ[name] = [rank for rank, value in enumerate(values) if value != common]
        alone = next((n for n in differ if n not in of_modules and any(n not in sums for sums in by_rank)), None)
        if alone and not in_step:
            having = [rank for rank, sums in enumerate(by_rank) if alone in sums]
            raise MismatchError(
                f"after step {step} only {format_ranks(having)} {'has' if len(having) == 1 else 'have'} {alone}: a "
                "state_dict() names its parts by what differs between processes, such as id(...), or a rank holds "
                "more than others. Such a state cannot be restored in another process; nothing of it was saved"
            )
        if not differ:
            return
        first, ranks = next(iter(differ.items()))
        others = len(differ) - 1
        more = f", and {others} more tensor{'s differ' if others > 1 else ' differs'}" if others else ""
        when = f"before the update of step {step + 1}" if in_step else f"after step {step}"
        were_equal = f"; they were equal after step {self._equal_at}" if in_step or self._equal_at < step else ""
        raise MismatchError(
            f"ranks hold different values {when}: {first} on {format_ranks(ranks)}{more}{were_equal}. "
            "Something changes them differently on each rank, such as random numbers, "
            "the clock, run.rank, loading a file on one rank, a value made from the samples that this rank has seen "
            "(bring those of all ranks together by run.sum or run.gather), or an optimizer of your own (under zero one "
            "that writes parameters outside of its step); nothing of it was saved"
            + (f". {_KEEP_WHOLE}" if first.startswith("kept") else "")
        )


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """A whole number, of no dimension, on the tensor's device: equal for equal bits; one pass, without a wait.

    The number differs if one bit differs, or two elements are exchanged.

    Raises:
        UsageError: for a tensor of which this rank holds a part.
    """
    flat = _bytes_of(tensor)
    return torch.tensor(_of_cpu(flat), device="cpu") if flat.is_cpu else weighed([flat])[0]


def checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The `checksum` of each; waits once for each device, for which all are computed together."""
    flats = [_bytes_of(tensor) for tensor in tensors]
    found = [_of_cpu(flat) if flat.is_cpu else 0 for flat in flats]
    for device in {flat.device for flat in flats if not flat.is_cpu}:
        places = [place for place, flat in enumerate(flats) if flat.device == device]
        for place, number in zip(places, weighed([flats[place] for place in places]).tolist(), strict=True):
            found[place] = number
    return found


def _of_cpu(flat: torch.Tensor) -> int:
    # Not by NumPy: a storage that NumPy has viewed cannot be resized, and FSDP resizes storages of gathered parameters.
    return zlib.crc32((ctypes.c_char * flat.numel()).from_address(flat.data_ptr()) if flat.numel() else b"")


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of ``tensor``, one after another.

    Raises:
        UsageError: for a tensor of which this rank holds a part.
    """
    if hasattr(tensor, "to_local"):  # as torch's DTensor has
        raise UsageError(
            f"run.keep(...) of a tensor of shape {tuple(tensor.shape)} of which this rank holds a part, as of the "
            f"parameter that it was made from. {_KEEP_WHOLE}"
        )
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def numbers(tensors: Sequence[torch.Tensor]) -> list[float]:
    """The values of ``tensors`` of no dimension; waits once for each device and type."""
    found = dict.fromkeys(range(len(tensors)), 0.0)
    for kind in {(one.device, one.dtype) for one in tensors}:
        indices = [i for i, one in enumerate(tensors) if (one.device, one.dtype) == kind]
        found.update(zip(indices, torch.stack([tensors[i] for i in indices]).tolist(), strict=True))
    return list(found.values())


def weighed(flats: Sequence[torch.Tensor]) -> torch.Tensor:
    """The checksums of ``flats``, bytes on one device that is not a CPU.

    All checksums are computed together, in few launches::

        words of a tensor, in rows, padded       each times the weight of its place in the row, added up by rows,
        a b c d                                  each sum times the weight of its row, added up by tensors
        e f . .
    """
    device = flats[0].device
    words = [_words_of(flat) for flat in flats]
    rows = [max(1, -(-len(each) // _ROW)) for each in words]
    weights, padding = _weights(device, 1 << (max(_ROW, *rows) - 1).bit_length()), _padding(device, _ROW)
    # In sums of 64 bits: a word's highest bit must count however even the difference of two weights is.
    sums = torch.cat([(table * weights[:_ROW]).sum(1) for table in _tables(words, rows, padding)])
    sums = sums * (weights[: rows[0]] if len(rows) == 1 else torch.cat([weights[:number] for number in rows]))
    if len(rows) == 1:
        return sums.sum(0, keepdim=True)
    so_far = sums.cumsum(0)
    ends = torch.stack([so_far[end - 1] for end in accumulate(rows)])
    return torch.cat([ends[:1], ends[1:] - ends[:-1]])


def _words_of(flat: torch.Tensor) -> torch.Tensor:
    """Bytes as numbers of 32 bits."""
    if len(flat) % 4:
        flat = nn.functional.pad(flat, (0, -len(flat) % 4), value=_PAD & 0xFF)
    return (flat.clone() if flat.storage_offset() % 4 else flat).view(torch.int32)


def _tables(words: Sequence[torch.Tensor], rows: Sequence[int], padding: torch.Tensor) -> Iterator[torch.Tensor]:
    """The ``rows`` rows of all ``words``, in tables of up to `_AT_ONCE` words; the last row of each is padded."""
    parts: list[torch.Tensor] = []
    room = _AT_ONCE
    for each, number in zip(words, rows, strict=True):
        whole = len(each) // _AT_ONCE * _AT_ONCE
        rest = number * _ROW - whole
        if parts and (whole or rest > room):
            yield torch.cat(parts).view(-1, _ROW)
            parts, room = [], _AT_ONCE
        for part in each[:whole].split(_AT_ONCE) if whole else ():
            yield part.view(-1, _ROW)
        if rest:
            parts += [each[whole:], padding[: number * _ROW - len(each)]]
            room -= rest
    if parts:
        yield torch.cat(parts).view(-1, _ROW)


def tensors_in(value: object) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors within mappings and sequences, each with its path, such as ``models.0.weight``."""
    return ((path, leaf) for path, leaf in leaves(value) if isinstance(leaf, torch.Tensor))


def schedulers_in(kept: Mapping[str, object]) -> dict[str, object]:
    """The states of schedulers among kept objects, whose decisions must be equal on all ranks."""
    return {name: state for name, state in kept.items() if isinstance(state, Mapping) and "last_epoch" in state}


def plain_in(value: object, path: str = "run.kept") -> Iterator[tuple[str, object]]:
    """The plain values within mappings and sequences, each with its path."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from plain_in(inner, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        yield f"{path} (its length)", len(value)
        for number, inner in enumerate(value):
            yield from plain_in(inner, f"{path}.{number}")
    elif value is None or isinstance(value, bool | int | float | str | bytes | np.generic):
        yield path, value


@cache
def _weights(device: torch.device, length: int) -> torch.Tensor:
    """Odd numbers without a pattern, else blocks that have changed places would cancel out; each by its place alone."""
    numbers = torch.arange(1, length + 1, device=device) * _ODD
    for _ in range(2):
        numbers = (numbers ^ (numbers >> 32)) * _ODD
    return numbers | 1


@cache
def _padding(device: torch.device, length: int) -> torch.Tensor:
    """Padding words, not zeros, so that lengths change the checksum."""
    return torch.full((length,), _PAD, dtype=torch.int32, device=device)
