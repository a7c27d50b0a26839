"""BatchNorm over the micro-batches that all ranks compute at the same time.

On GPUs this is torch's own SyncBatchNorm. On CPUs, where torch has none, each rank sends the others

    forward     how many values it holds of each channel, their mean, and their squares around it
    backward    the sums of dy and of dy * (x - mean) of each channel

and normalises as if it held the batch of all ranks. These numbers are summed in the order of ranks, so a world of the
same size gives the same bits again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.collectives import Group

#: Gives each rank's row of numbers, by rank; the text names the purpose.
Gather = Callable[[torch.Tensor, str], torch.Tensor]


def synchronize_batchnorm(model: nn.Module, group: Group) -> nn.Module:
    """``model``, each BatchNorm of which normalises over all ranks of ``group`` from now on, while it trains.

    Modules, parameters and buffers stay the same objects, and keep their names. Every rank must make equally many
    forward and backward passes, with batches of any sizes.
    """

    # A function, since models are copied with all attributes, as to average their weights, and a group cannot be
    # copied.
    def gather(row: torch.Tensor, what: str) -> torch.Tensor:
        rows = torch.zeros(group.size, len(row), dtype=torch.float64, device=row.device)
        rows[group.rank] = row
        return group.sum_tensor(rows, what)

    for module in model.modules():
        if not isinstance(module, _BatchNorm):
            continue
        # In place, so hooks and other references to the module remain valid; torch's own conversion makes new modules.
        if group.device.type == "cuda":
            module.__class__ = nn.SyncBatchNorm
            object.__setattr__(module, "process_group", group.process_group)
        else:
            module.__class__ = AcrossRanks
            object.__setattr__(module, "gather", gather)
    return model


def normalises_over_ranks(model: nn.Module) -> bool:
    """Whether forward passes of ``model`` wait for other ranks' forward passes in training."""
    return any(isinstance(module, nn.SyncBatchNorm | AcrossRanks) for module in model.modules())


class AcrossRanks(_BatchNorm):
    """A BatchNorm of any number of dimensions over all ranks, on CPUs; made by `synchronize_batchnorm` only.

    The class is no SyncBatchNorm, since DDP accepts SyncBatchNorm only on GPUs.
    """

    gather: Gather

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``input``, of shape (samples, channels, ...), normalised per channel. Collective in training mode."""
        if not self.training:
            return _BatchNorm.forward(self, input)
        self._check_input_dim(input)
        normalised, mean, variance, count = _over_ranks(input, self.weight, self.bias, self.eps, self.gather)
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            self._track(mean, variance * (count / (count - 1)))
        return normalised

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input, of samples and channels, got {tuple(input.shape)}")

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        factor = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if factor is None:
                factor = 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean), factor or 0.0)
        self.running_var.lerp_(variance.to(self.running_var), factor or 0.0)


class _OverRanks(torch.autograd.Function):
    """Gives the normalised input, and each channel's mean, biased variance and number of values over all ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, gather: Gather
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        values = _wide(x)
        values_per_channel = values.numel() // values.shape[1]
        if values_per_channel:
            variance, mean = torch.var_mean(values, _all_but_channels(x), correction=0)
        else:
            variance = mean = values.new_zeros(values.shape[1])
        row = torch.cat([mean.double(), variance.double(), mean.new_tensor([values_per_channel], dtype=torch.float64)])
        rows = gather(row, "a batch normalisation over all ranks")
        means, variances, counts = rows.split([values.shape[1], values.shape[1], 1], dim=1)
        count = counts.sum()
        if count < 2:
            raise ValueError(
                f"expected more than 1 value per channel while training, got {int(count)} on all ranks together"
            )
        mean = (means * counts).sum(0) / count
        variance = ((variances + (means - mean).square()) * counts).sum(0) / count
        wide_mean, wide_variance = mean.to(values.dtype), variance.to(values.dtype)
        ctx.save_for_backward(x, weight, wide_mean, (variance + eps).rsqrt().to(values.dtype))
        ctx.count, ctx.gather = count, gather
        ctx.mark_non_differentiable(mean, variance, count)
        return F.batch_norm(x, wide_mean, wide_variance, weight, bias, eps=eps), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor, *_: object) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, inverse = ctx.saved_tensors
        wide, over, shape = _wide(dy), _all_but_channels(x), _per_channel(x)
        centred = _wide(x) - mean.view(shape)
        dbias = wide.sum(over)
        dweight = (wide * centred).sum(over) * inverse
        rows = ctx.gather(torch.cat([dbias, dweight]), "the gradient of a batch normalisation over all ranks")
        sums = (rows.sum(0) / ctx.count).to(wide.dtype)
        scale = inverse if weight is None else inverse * weight
        along, across = (scale * inverse * sums[len(mean) :]).view(shape), (scale * sums[: len(mean)]).view(shape)
        dx = (wide * scale.view(shape)).sub_(across).sub_(centred.mul_(along))
        _, to_weight, to_bias, *_ = ctx.needs_input_grad
        return dx.to(x.dtype), dweight if to_weight else None, dbias if to_bias else None, None, None


def _over_ranks(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, gather: Gather
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    found = _OverRanks.apply(x, weight, bias, eps, gather)  # type: ignore[no-untyped-call]
    return found


def _wide(x: torch.Tensor) -> torch.Tensor:
    """``x`` in at least the precision in which torch keeps statistics."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _all_but_channels(x: torch.Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _per_channel(x: torch.Tensor) -> list[int]:
    return [1, x.shape[1], *(1 for _ in x.shape[2:])]
