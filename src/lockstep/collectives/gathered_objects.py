"""The gather of small objects from all ranks to all ranks, by one collective of gloo; torch's own takes two.

rank 0   [ length | pickled ............ ]  ──┐
rank 1   [ length | pickled .... | zeros ]  ──┴─►  all of them, on each rank; what is longer follows in a second one
"""

from __future__ import annotations

import pickle
from typing import Final, TypeVar

import numpy as np
import torch
import torch.distributed as dist

T = TypeVar("T")

_AT_ONCE: Final = 1024  # bytes of one rank, with the length
_LENGTH: Final = 8
# Torch 2.13 gave it a new name, and warns of the old one.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def gathered(value: T, size: int, group: dist.ProcessGroup) -> list[T]:
    """Each rank's ``value``, in the order of the ``size`` ranks of ``group``, which is over the CPU. Collective.

    Raises:
        RuntimeError: from torch, if a rank is gone.
    """
    pickled = pickle.dumps(value)
    own = torch.zeros(_AT_ONCE, dtype=torch.uint8, device="cpu")
    _fill(own, len(pickled).to_bytes(_LENGTH, "little") + pickled[: _AT_ONCE - _LENGTH])
    parts = _gather_bytes(own, size, group)
    lengths = [int.from_bytes(part[:_LENGTH], "little") for part in parts]
    texts = [part[_LENGTH:] for part in parts]
    if (rest := max(lengths) - (_AT_ONCE - _LENGTH)) > 0:
        own = torch.zeros(rest, dtype=torch.uint8, device="cpu")
        _fill(own, pickled[_AT_ONCE - _LENGTH :])
        texts = [text + more for text, more in zip(texts, _gather_bytes(own, size, group), strict=True)]
    return [pickle.loads(text[:length]) for text, length in zip(texts, lengths, strict=True)]


def _fill(tensor: torch.Tensor, content: bytes) -> None:
    tensor.numpy()[: len(content)] = np.frombuffer(content, dtype=np.uint8)


def _gather_bytes(own: torch.Tensor, size: int, group: dist.ProcessGroup) -> list[bytes]:
    gathered = torch.empty(size * own.numel(), dtype=torch.uint8, device="cpu")
    all_gather_flat(gathered, own, group=group)
    return [part.numpy().tobytes() for part in gathered.split(own.numel())]
