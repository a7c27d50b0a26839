"""The state of torch's random generators, as a tensor that can be sent and kept."""

from __future__ import annotations

import torch


def random_state(device: torch.device) -> torch.Tensor:
    """The state of torch's generators for ``device`` and for the CPU, as bytes on the CPU."""
    state = torch.get_rng_state()
    return torch.cat([state, torch.cuda.get_rng_state(device)]) if device.type == "cuda" else state


def set_random_state(state: torch.Tensor, device: torch.device) -> None:
    """Set the generators to ``state``, of `random_state`."""
    length = len(torch.get_rng_state())
    torch.set_rng_state(state[:length])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[length:], device)
