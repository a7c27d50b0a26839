"""Batches on their way to the device that computes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lockstep.data import Data


def to_device(data: Data, device: torch.device) -> Data:
    """``data`` with its tensors on ``device``; from page-locked memory without waiting."""
    if device.type == "cpu":
        return data
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=True)
    if hasattr(data, "to"):  # also mappings that are more than a dict, such as a tokenizer's
        return data.to(device)
    if isinstance(data, Mapping):
        return {key: to_device(value, device) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(to_device(value, device) for value in data))
    if isinstance(data, list | tuple):
        return type(data)(to_device(value, device) for value in data)
    return data
