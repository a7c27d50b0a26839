"""The output of a ``colwise`` layer on a rank: a part of the last dimension, which must not be taken for the whole.

    q = self.q(x)                       this rank's heads, end to end
    q.view(batch, length, -1, size)     right: as many heads as are here
    q.view(batch, length, heads, -1)    refused: so many heads, each smaller
    q.view(batch, -1, heads, size)      refused: so many heads, of half as many places
    q, k, v = self.qkv(x).chunk(3, -1)  refused: where a third ends on one rank, it does not on two
    q.softmax(-1)                       refused: the sum is that of a part

Only the layer's own output is checked, and only sizes with a -1; results computed from it are plain tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Any, Final, NoReturn

import torch

from lockstep.errors import UsageError
from lockstep.torch_private import without_torch_function

#: Functions that cut a dimension into parts; with the place of this dimension among the arguments, and its default.
_CUTS: Final = {"chunk": (2, 0), "split": (2, 0), "split_with_sizes": (2, 0), "tensor_split": (2, 0), "glu": (1, -1)}
#: Functions that need all elements along a dimension, or several; None: along all.
_REDUCTIONS: Final = {
    **dict.fromkeys(("softmax", "log_softmax", "logsumexp"), (1, -1)),
    **dict.fromkeys(("sum", "mean", "var", "std", "amax", "argmax", "max", "min"), (1, None)),
    "norm": (2, None),
    "normalize": (2, 1),
    "cross_entropy": (99, 1),  # always that of the classes
}


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
    def __torch_function__(cls, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        """Call ``func``, unless it would take a part for the whole.

        Raises:
            UsageError: for such a call.
        """
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if args and isinstance(args[0], cls):
            if name in _CUTS and _is_along_last(args[0], _CUTS[name], args, kwargs):
                _refuse_cut(args[0], name)
            elif name in _REDUCTIONS and _is_along_last(args[0], _REDUCTIONS[name], args, kwargs):
                _refuse_reduction(args[0], name)
            elif name in ("view", "reshape"):
                _check_sizes(args[0], args[1:])
            elif name == "unflatten" and len(args) > 2 and args[1] in (-1, args[0].dim() - 1):
                _check_sizes(args[0], (*args[0].shape[:-1], *args[2]))
        with without_torch_function():
            return func(*args, **kwargs)


def _is_along_last(output: DividedOutput, place: tuple[int, int | None], args: Any, kwargs: Any) -> bool:
    """Whether a dimension at this ``place`` of the arguments is the last dimension."""
    index, default = place
    dim = kwargs.get("dim", args[index] if len(args) > index else default)
    dims = dim if isinstance(dim, tuple | list) else (dim,)
    return any(one is None or (isinstance(one, int) and one in (-1, output.dim() - 1)) for one in dims)


def _refuse_cut(output: DividedOutput, name: str) -> NoReturn:
    raise UsageError(
        f"{name}(...) cuts the last dimension of what {output._layer} gives, of which this rank has a part, so the "
        "pieces would be others for each size of a tensor group: write a layer for each piece, as one for queries, "
        f'one for keys and one for values, or name {output._layer} as "colwise_gather_output"'
    )


def _refuse_reduction(output: DividedOutput, name: str) -> NoReturn:
    raise UsageError(
        f"{name}(...) along the last dimension of what {output._layer} gives, of which this rank has a part: the "
        f'result would be that of the part. Name {output._layer} as "colwise_gather_output"'
    )


def _check_sizes(output: DividedOutput, sizes: Any) -> None:
    """Check that a -1 among ``sizes`` is neither for the size of pieces of the whole, nor for the places.

    Raises:
        UsageError: if it is.
    """
    sizes = sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    if not isinstance(sizes, tuple | list) or -1 not in sizes or not output.numel():
        return
    inferred = sizes.index(-1)
    places = output.numel() // output.shape[-1]
    if math.prod(sizes[:inferred]) > places or _exceeds(sizes[inferred + 1 :], output.shape[-1]):
        raise UsageError(
            f"view({', '.join(map(str, sizes))}) of what {output._layer} gives, of which this rank has a part: heads, "
            "or whatever the last dimension consists of, would be other ones than on one rank. Write the size of one "
            "and -1 for their number, as in view(batch, length, -1, head_size), and a layer for each of queries, keys "
            "and values"
        )


def _exceeds(sizes: Sequence[int], part: int) -> bool:
    """Whether the last dimensions, of these ``sizes``, would be pieces of more than one ``part``."""
    ends = list(accumulate(reversed(sizes), mul))
    return bool(ends) and ends[0] < part < ends[-1] and part not in ends
