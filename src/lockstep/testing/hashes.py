"""A hash of states, to compare what was trained bit by bit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import torch
from torch.nn.parallel import DistributedDataParallel


def state_hash(*objects: object) -> str:
    """A hash of every bit of ``objects``: equal states give equal hashes, on any rank and in any process.

    Tensors count by type, shape and bytes, not by device, strides or whether they need gradients. Dicts (in any
    order), lists, tuples, plain values, and whatever has a ``state_dict``: modules (without the wrapper of DDP),
    optimizers, schedulers.

    Raises:
        TypeError: for anything else.
    """
    digest = hashlib.sha256()
    for value in objects:
        _feed(digest.update, value)
    return digest.hexdigest()


def _feed(update: Callable[[bytes], None], value: object) -> None:
    # Each part begins with its kind and length, so that no two states are spelt alike.
    if isinstance(value, torch.Tensor):
        update(f"tensor {value.dtype} {tuple(value.shape)}:".encode())
        update(value.detach().cpu().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        update(f"dict {len(value)}:".encode())
        for key in sorted(value, key=repr):
            _feed(update, key)
            _feed(update, value[key])
    elif isinstance(value, list | tuple):
        update(f"list {len(value)}:".encode())
        for item in value:
            _feed(update, item)
    elif value is None or isinstance(value, bool | int | float | complex | str | bytes):
        update(f"{type(value).__name__} {len(repr(value))}:{value!r}".encode())
    elif isinstance(value, DistributedDataParallel):
        _feed(update, value.module)
    elif hasattr(value, "state_dict"):
        _feed(update, value.state_dict())
    else:
        raise TypeError(
            f"state_hash of a {type(value).__name__}: give tensors, plain values, dicts and lists of them, or what has "
            "a state_dict()"
        )
