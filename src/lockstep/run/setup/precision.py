"""The number format of forward passes, and the loss scaling that fp16 needs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final, Literal

import torch

from lockstep.torch_private import found_inf

_NO_AUTOCAST: Final = contextlib.nullcontext()
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """Parameters and optimizer stay fp32; with bf16 and fp16 autocast chooses the format of each operation.

    In fp16 the loss is scaled before the tree and the gradients are unscaled after it. Whether a step is skipped is
    decided from the summed gradient, which is equal on all ranks: all ranks skip, or none.
    """

    def __init__(self, name: Literal["fp32", "bf16", "fp16"], device: torch.device) -> None:
        self._device: Final = device.type
        self.dtype: Final = _DTYPES.get(name)  #: of forward passes; None: as the tensors are
        self._scaler: Final = torch.amp.GradScaler(device.type, enabled=name == "fp16")
        #: whether losses are scaled, and steps with gradients that are not finite skipped
        self.scales: Final = self._scaler.is_enabled()
        self._found: Final[dict[int, torch.Tensor]] = {}  # of optimizers, by id: whether they skip this step
        self._skipped = False  # whether an optimizer has skipped this step
        self.scale(torch.ones((), device=device))  # torch makes the scale for the first loss, which not all ranks see

    def forward(self) -> AbstractContextManager[object]:
        """A context for the forward pass and loss of a micro-batch; casts of parameters are dropped at its end."""
        if self.dtype is None:
            return _NO_AUTOCAST
        return torch.autocast(self._device, dtype=self.dtype)

    def forget_casts(self) -> None:
        """Drop the casts of parameters, which have changed.

        Autocast keeps casts until its outermost context ends, which for the loop's body is the body's end.
        """
        if self.dtype is not None:
            torch.clear_autocast_cache()

    def backward(self) -> AbstractContextManager[object]:
        """A context for the backward pass, which repeats the number formats of the forward pass by itself."""
        if self.dtype is None:
            return _NO_AUTOCAST
        return torch.autocast(self._device, enabled=False)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """``loss`` times the loss scale, at least in fp32."""
        if loss.dtype in (torch.float16, torch.bfloat16):
            loss = loss.float()
        return self._scaler.scale(loss) if self.scales else loss

    def unscale(self, optimizer: torch.optim.Optimizer, on_any_rank: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """In fp16, divide gradients by the loss scale, and note whether gradients are finite on all ranks. Collective.

        Args:
            optimizer: whose gradients.
            on_any_rank: whether a value of one element is not zero on some rank, as 0.0 or 1.0. Collective.
        """
        self._scaler.unscale_(optimizer)
        # Torch notes infinite values by device; a rank without gradients has noted nothing, and must step or skip with
        # the others.
        noted = found_inf(self._scaler, optimizer)
        found = sum((value.to(self._device) for value in noted.values()), torch.zeros((), device=self._device))
        agreed = on_any_rank(found)
        for device in noted or (agreed.device,):
            noted[device] = agreed.to(device)
        self._found[id(optimizer)] = agreed

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step ``optimizer`` after `unscale`, unless its gradients are not finite in fp16.

        In fp16 the host waits once for a GPU; with torch's scaler it would wait three times, twice of these in
        `update_scale`.
        """
        if self.scales and bool(self._found.pop(id(optimizer))):
            self._skipped = True
        else:
            optimizer.step()

    @property
    def loss_scale(self) -> float:
        """The factor of losses before their backward passes; reading it waits for the GPU."""
        return self._scaler.get_scale()

    def update_scale(self) -> bool:
        """Adapt the loss scale, once after all optimizers' steps; returns whether no optimizer has skipped its step."""
        if not self.scales:
            return True
        self._scaler.update()
        skipped, self._skipped = self._skipped, False
        return not skipped

    def state_dict(self) -> dict[str, object]:
        """The state of the loss scale; empty if losses are not scaled."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Load the loss scale from `state_dict`."""
        if state and self.scales:
            self._scaler.load_state_dict(state)
