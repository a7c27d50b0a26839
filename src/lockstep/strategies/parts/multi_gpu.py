"""Models whose layers the user has put on several GPUs of one rank."""

from __future__ import annotations

from itertools import chain

import torch
from torch import nn

from lockstep.errors import UsageError


def spans_gpus(model: nn.Module) -> bool:
    """Whether ``model`` lies on more than one GPU, to stay there: its ``forward`` moves tensors between GPUs."""
    return len(_gpus(model)) > 1


def check_reached(model: nn.Module, device: torch.device) -> None:
    """Check that a part of ``model`` is on the rank's ``device``, to which its inputs are moved.

    Raises:
        UsageError: if no part is.
    """
    gpus = _gpus(model)
    if gpus and device not in gpus:
        raise UsageError(
            f"{type(model).__name__} lies on {', '.join(sorted(map(str, gpus)))}, and this rank computes on {device}; "
            "put its first layers on run.device"
        )


def _gpus(model: nn.Module) -> set[torch.device]:
    return {t.device for t in chain(model.parameters(), model.buffers()) if t.device.type == "cuda"}
