"""The gather of small objects from all ranks to all ranks, by one collective of gloo; torch's own takes two.

rank 0   [ length | pickled ............ ]  ──┐
rank 1   [ length | pickled .... | zeros ]  ──┴─►  all of them, on each rank; what is longer follows in a second one

Tensors of other ranks' GPUs arrive on the device of the rank that reads them.
"""

from __future__ import annotations

import io
import pickle
from typing import Any, Final, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from typing_extensions import override

from lockstep.torch_private import load_from_bytes

T = TypeVar("T")

_AT_ONCE: Final = 1024  # bytes of one rank, with the length
_LENGTH: Final = 8
# Torch 2.13 gave it a new name, and warns of the old one.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def gathered(value: T, size: int, group: dist.ProcessGroup, device: torch.device) -> list[T]:
    """Each rank's ``value``, in the order of the ``size`` ranks of ``group``, which is over the CPU. Collective.

    Tensors that lie on no CPU arrive on ``device``, those of this rank, too.

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
    return [_Unpickler(text[:length], device).load() for text, length in zip(texts, lengths, strict=True)]


class _Unpickler(pickle.Unpickler):
    """A reader of pickled objects, whose tensors come to ``device``, other than those of the CPU.

    Torch would put each on the GPU that it came from: that of another rank, or one that this machine does not have.
    """

    def __init__(self, text: bytes, device: torch.device) -> None:
        super().__init__(io.BytesIO(text))
        self._device: Final = device

    @override
    def find_class(self, module_name: str, global_name: str) -> Any:
        found = super().find_class(module_name, global_name)
        return self._read_storage if found is load_from_bytes else found

    def _read_storage(self, content: bytes) -> object:
        def on_device(storage: Any, location: str) -> Any:
            return storage if location == "cpu" else storage.to(device=self._device)

        return torch.load(io.BytesIO(content), map_location=on_device, weights_only=False)


def _fill(tensor: torch.Tensor, content: bytes) -> None:
    tensor.numpy()[: len(content)] = np.frombuffer(content, dtype=np.uint8)


def _gather_bytes(own: torch.Tensor, size: int, group: dist.ProcessGroup) -> list[bytes]:
    gathered = torch.empty(size * own.numel(), dtype=torch.uint8, device="cpu")
    all_gather_flat(gathered, own, group=group)
    return [part.numpy().tobytes() for part in gathered.split(own.numel())]
