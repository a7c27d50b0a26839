"""Whether torch computes with lists of tensors, asked without the GPU on which torch does so by default."""

from collections.abc import Sequence
from unittest import mock

import torch
from torch.optim.optimizer import _default_to_fused_or_foreach
from torch.utils._foreach_utils import _has_foreach_support


def steps_in_lists(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether an optimizer steps ``tensors`` by kernels for lists, and `clip_grad_norm_` clips them so, by default."""
    devices = "_get_foreach_kernels_supported_devices"
    with (
        mock.patch(f"torch.optim.optimizer.{devices}", return_value=["cpu"]),
        mock.patch(f"torch.utils._foreach_utils.{devices}", return_value=["cpu"]),
    ):
        _, in_lists = _default_to_fused_or_foreach(list(tensors), differentiable=False)
        assert in_lists == _has_foreach_support(list(tensors), torch.device("cpu"))
    return in_lists
