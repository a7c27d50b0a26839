"""What a ``colwise`` layer gives a rank: a part of the last dimension, which must not be taken for the whole.

    q = self.q(x)                       this rank's heads, end to end
    q.view(batch, length, -1, size)     right: as many heads as are here
    q.view(batch, length, heads, -1)    refused: so many heads, each smaller
    q, k, v = self.qkv(x).chunk(3, -1)  refused: where a third ends on one rank, it does not on two

Only the layer's own output is watched; what is computed from it is a plain tensor.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch

from lockstep.errors import UsageError

#: They cut a dimension into parts; with the place of that dimension among their arguments, and its default.
_CUTS: Final = {"chunk": (2, 0), "split": (2, 0), "split_with_sizes": (2, 0), "tensor_split": (2, 0), "glu": (1, -1)}


class DividedOutput(torch.Tensor):
    """The output of a ``colwise`` layer; each operation on it gives plain tensors."""

    _layer: str

    @classmethod
    def of(cls, output: torch.Tensor, layer: str) -> DividedOutput:
        """``output`` of the layer of that name, with its gradient."""
        divided = output.as_subclass(cls)
        divided._layer = layer
        return divided

    @classmethod
    def __torch_function__(cls, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func``, unless it would take a part for the whole.

        Raises:
            UsageError: then.
        """
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if args and isinstance(args[0], cls):
            if name in _CUTS:
                _check_cut(args[0], name, args, kwargs)
            elif name in ("view", "reshape"):
                _check_sizes(args[0], args[1:])
            elif name == "unflatten" and len(args) > 2 and args[1] in (-1, args[0].dim() - 1):
                _check_sizes(args[0], (*args[0].shape[:-1], *args[2]))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def _check_cut(output: DividedOutput, name: str, args: Any, kwargs: Any) -> None:
    """Check that the dimension that is cut is whole.

    Raises:
        UsageError: if it is the last one.
    """
    place, default = _CUTS[name]
    dim = kwargs.get("dim", args[place] if len(args) > place else default)
    if dim in (-1, output.dim() - 1):
        raise UsageError(
            f"{name}(...) cuts the last dimension of what {output._layer} gives, of which this rank has a part, so the "
            "pieces would be others for each size of a tensor group: write a layer for each piece, as one for queries, "
            f'one for keys and one for values, or name {output._layer} as "colwise_gather_output"'
        )


def _check_sizes(output: DividedOutput, sizes: Any) -> None:
    """Check that the last dimension is not divided into a number of pieces that was meant for the whole.

    Raises:
        UsageError: if it is.
    """
    sizes = sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    if not isinstance(sizes, tuple | list) or not sizes or sizes[-1] != -1:
        return
    pieces = math.prod(sizes[:-1]) * output.shape[-1]
    if output.numel() < pieces:
        raise UsageError(
            f"view({', '.join(map(str, sizes))}) of what {output._layer} gives, of which this rank has a part: heads, "
            "or whatever the last dimension consists of, would be smaller, and not fewer. Write the size of one and -1 "
            "for their number, as in view(batch, length, -1, head_size)"
        )
