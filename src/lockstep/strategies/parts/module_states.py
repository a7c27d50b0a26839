"""Equal models at the start: every rank makes its own model, and gets rank 0's values."""

from __future__ import annotations

import zlib

import torch
from torch import nn

from lockstep.collectives import Group, broadcast_from_rank0


def verify_module_states(group: Group, model: nn.Module) -> None:
    """Check that ``model`` has the same tensors on all ranks, by name, shape and type. Collective.

    Raises:
        MismatchError: if ranks made different models.
    """
    group.check_equal(
        "the model's parameters and buffers",
        [(n, tuple(t.shape), t.dtype) for n, t in model.state_dict().items() if isinstance(t, torch.Tensor)],
    )


def verify_random_state(group: Group) -> None:
    """Check that torch's random generator on the CPU has the same state on all ranks. Collective.

    Raises:
        MismatchError: if states differ.
    """
    group.check_equal(
        "the state of torch's random numbers before run.model(...), which must draw the same on all ranks",
        checksum(torch.get_rng_state()),
    )


def sync_module_states(group: Group, model: nn.Module) -> None:
    """Copy rank 0's parameters and buffers to every rank. Collective.

    Raises:
        MismatchError: if ranks made different models.
    """
    verify_module_states(group, model)
    broadcast_from_rank0(group, (*model.parameters(), *model.buffers()))


def checksum(tensor: torch.Tensor) -> int:
    """The CRC-32 of the bits of ``tensor``, copied to the CPU a MiB at a time."""
    found, flat = 0, tensor.detach().contiguous().view(-1).view(torch.uint8)
    for part in flat.split(1 << 20):
        # A copy, since torch never frees the memory of a tensor that NumPy has viewed.
        found = zlib.crc32(part.to("cpu", copy=True).numpy().data, found)
    return found
