"""The comparison of ranks: those that hold different values are found and named.

Replicas are equal bit for bit after each step, and so is a checksum of each tensor. What a checkpoint would hold is
compared, for it takes each tensor from one of the ranks: after the first step of a pass, every so many steps, and
before each save, which is not made if they differ. Models are compared before each evaluation, too.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final

import numpy as np
import torch

from lockstep.checkpoint import SavedTree
from lockstep.collectives import Group
from lockstep.errors import MismatchError, UsageError
from lockstep.formatting import format_ranks

_KEEP_WHOLE: Final = "Keep what is whole on each rank: an average of the weights needs ddp or zero"
_NOTHING: Final[Mapping[str, object]] = {}
_PIECE: Final = 1 << 20  # words of a GPU's tensor that are weighed at once
_ODD: Final = -7046029254386353131  # any odd number without a pattern would do


class DivergenceCheck:
    """Compares ranks.

    Args:
        group: all ranks.
    """

    def __init__(self, group: Group) -> None:
        self._group: Final = group
        self._equal_at = 0  # the last step after which ranks were equal

    def compare(
        self, state: SavedTree, step: int, *, modules: Mapping[str, object] = _NOTHING, in_step: bool = False
    ) -> None:
        """Check that all tensors of ``state`` are the same on all ranks after ``step`` steps. Collective.

        With ``in_step``, before the update of the one that follows.

        So must be the plain values of what the script keeps, under ``kept_values``, and of kept schedulers, and to what
        ``modules`` are set, by name. One pass over the tensors, and about 1 ms; tensors that a rank holds a part of are
        left out. Waits for the GPU.

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
        found = zlib.crc32(repr(sorted(own.items())).encode())  # objects may tell of their parts in any order
        if len(set(self._group.gather_objects(found, "a checksum of all state"))) == 1:
            self._equal_at = step
            return
        self._name_differences(own, step, in_step, set(modules))

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
        first, ranks = next(iter(differ.items()))
        others = len(differ) - 1
        more = f", and {others} more tensor{'s differ' if others > 1 else ' differs'}" if others else ""
        when = f"before the update of step {step + 1}" if in_step else f"after step {step}"
        raise MismatchError(
            f"ranks hold different values {when}: {first} on {format_ranks(ranks)}{more}; they were equal "
            f"after step {self._equal_at}. Something changes them differently on each rank, such as random numbers, "
            "the clock, run.rank, loading a file on one rank, or an optimizer of your own (under zero one that writes "
            "parameters outside of its step); nothing of it was saved"
            + (f". {_KEEP_WHOLE}" if first.startswith("kept") else "")
        )


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """A whole number, of no dimension, on the tensor's device: equal for equal bits; one pass over it.

    Another one where one bit differs, or where two places are exchanged.

    Raises:
        UsageError: for a tensor of which this rank holds a part.
    """
    if hasattr(tensor, "to_local"):  # as a divided one of torch has
        raise UsageError(
            f"run.keep(...) of a tensor of shape {tuple(tensor.shape)} of which this rank holds a part, as of the "
            f"parameter that it was made from. {_KEEP_WHOLE}"
        )
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    return torch.tensor(zlib.crc32(flat.numpy().data), device="cpu") if flat.device.type == "cpu" else weighed(flat)


def checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The `checksum` of each; waits once for each device."""
    return [int(number) for number in numbers([checksum(tensor) for tensor in tensors])]


def numbers(tensors: Sequence[torch.Tensor]) -> list[float]:
    """What ``tensors`` of no dimension hold; waits once for each device and type."""
    found = dict.fromkeys(range(len(tensors)), 0.0)
    for kind in {(one.device, one.dtype) for one in tensors}:
        indices = [i for i, one in enumerate(tensors) if (one.device, one.dtype) == kind]
        found.update(zip(indices, torch.stack([tensors[i] for i in indices]).tolist(), strict=True))
    return list(found.values())


def weighed(flat: torch.Tensor) -> torch.Tensor:
    """The checksum of bytes where a CPU does not compute it."""
    if flat.storage_offset() % 4:
        flat = flat.clone()
    # Words of 32 bits in sums of 64: a word's highest bit must count however even the difference of two weights is.
    words = flat[: flat.numel() // 4 * 4].view(torch.int32)
    weights = _weights(flat.device)
    total = torch.full((), flat.numel(), device=flat.device)
    for piece in (*words.split(_PIECE), flat[words.numel() * 4 :]):
        total = total * _ODD + (piece.long() * weights[: piece.numel()]).sum()
    return total


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The whole tensors within mappings and sequences, each with the way to it, such as ``models.0.weight``."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from tensors_in(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from tensors_in(inner, f"{path}.{number}" if path else str(number))


def schedulers_in(kept: Mapping[str, Any]) -> dict[str, Any]:
    """The states of schedulers among what is kept: what they decide counts for all ranks."""
    return {name: state for name, state in kept.items() if isinstance(state, Mapping) and "last_epoch" in state}


def plain_in(value: Any, path: str = "run.kept") -> Iterator[tuple[str, object]]:
    """The plain values within mappings and sequences, each with the way to it."""
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
def _weights(device: torch.device) -> torch.Tensor:
    """Odd numbers without a pattern, else blocks that have changed places would cancel out."""
    numbers = torch.arange(1, _PIECE + 1, device=device) * _ODD
    for _ in range(2):
        numbers = (numbers ^ (numbers >> 32)) * _ODD
    return numbers | 1
