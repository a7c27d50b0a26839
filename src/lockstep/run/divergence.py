"""Ranks that have come to hold different values, found and named.

Replicas are equal bit for bit after each step, and so is a checksum of each tensor. What a checkpoint would hold is
compared, for it takes each tensor from one of the ranks: after the first step of a pass, every so many steps, and
before each save, which is not made if they differ.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from lockstep.collectives import Group
from lockstep.errors import MismatchError

_WORDS = 1024  # in a row of a tensor's checksum


class DivergenceCheck:
    """Compares ranks.

    Args:
        group: all ranks.
    """

    def __init__(self, group: Group) -> None:
        self._group: Final = group
        self._sound_at = 0  # the last step after which ranks were equal

    def compare(self, state: Mapping[str, Any], step: int) -> None:
        """Nothing, if all tensors of ``state`` are the same on all ranks after ``step`` steps. All ranks.

        One pass over the tensors, and about 1 ms; tensors that a rank holds a part of are left out. Waits for the GPU.

        Raises:
            MismatchError: naming the tensors and ranks that differ.
        """
        if self._group.size == 1:
            return
        sums = {name: checksum(tensor) for name, tensor in tensors_in(state)}
        names, values = list(sums), torch.stack(list(sums.values())).tolist() if sums else []
        found = zlib.crc32(repr((names, values)).encode())
        if len(set(self._group.gather_objects(found, "a checksum of all state"))) == 1:
            self._sound_at = step
            return
        self._name_differences(dict(zip(names, values, strict=True)), step)

    def _name_differences(self, mine: dict[str, int], step: int) -> None:
        told = self._group.gather_objects(mine, "checksums of all state")
        differ = {}
        for name in dict.fromkeys(name for one in told for name in one):
            values = [one.get(name) for one in told]
            common = max(values, key=values.count)
            if any(value != common for value in values):
                differ[name] = [rank for rank, value in enumerate(values) if value != common]
        first, ranks = next(iter(differ.items()), ("the names of what is saved", []))
        more = f", and {len(differ) - 1} more tensors differ" if len(differ) > 1 else ""
        raise MismatchError(
            f"ranks hold different values after step {step}: {first} on {_ranks(ranks)}{more}; they were equal after "
            f"step {self._sound_at}. Something changes them on each rank by itself, such as random numbers, the clock, "
            "run.rank, a load on one rank or an optimizer of your own; nothing of it was saved"
        )


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """A whole number, of no dimension, on the tensor's device: equal for equal bits; one pass over it."""
    flat = tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    words = flat[: flat.numel() // 8 * 8].view(torch.int64)
    whole = words[: words.numel() // _WORDS * _WORDS].view(-1, _WORDS).sum(1)
    rest = torch.cat([words[words.numel() // _WORDS * _WORDS :], flat[flat.numel() // 8 * 8 :].long()])
    # Odd weights that grow, so that what changes places is found; sums wrap around.
    total = (whole * _weights(whole)).sum() * 31 + (rest * _weights(rest)).sum()
    return total + flat.numel()


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


def _weights(words: torch.Tensor) -> torch.Tensor:
    return torch.arange(1, 2 * words.numel() + 1, 2, device=words.device)


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks))}"
