"""Parameters of which a rank holds rows, with errors for operations that such parameters do not allow.

    net.head.weight.data = tensor               UsageError: the rows that ranks compute with would stay
    net.head.weight.register_hook(hook)         UsageError: fully_shard computes gradients of other tensors
    net.head.weight[0].fill_(1.0)               UsageError: the row is a copy, gathered from all ranks

Torch's own `DTensor` accepts all of these without an error and without an effect. For computations with such
parameters, see `divided_operations`.
"""

from __future__ import annotations

from typing import Any, Final, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lockstep.errors import UsageError
from lockstep.torch_private import compute_in_lists, pytree, storage_key, without_torch_function

_IN_PLACE_OPERATORS: Final = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")}


class DividedParameter(DTensor):
    """A parameter, or its gradient, of which this rank holds rows."""

    __slots__ = ()

    @property
    def data(self) -> torch.Tensor:
        """The parameter's values without a gradient, which cannot be replaced."""
        return super().data

    @data.setter
    def data(self, value: torch.Tensor) -> NoReturn:
        raise UsageError(
            f"`.data = ...` of a parameter or gradient of shape {tuple(self.shape)}, of which this rank holds rows: "
            "these would stay as they are. Write `with torch.no_grad(): parameter.copy_(value)` on all ranks (in place "
            "of vector_to_parameters(...), for each parameter), set values before run.model(...), or use ddp or zero"
        )

    def detach(self) -> torch.Tensor:
        """The parameter's values without a gradient, of this class, as `nn.Parameter` requires."""
        found = super().detach()
        found.__class__ = DividedParameter
        return found

    def register_hook(self, hook: object) -> NoReturn:
        """Not possible: the gradient is that of other tensors, which `fully_shard` gathers."""
        refuse_gradient_hook(f"a parameter of shape {tuple(self.shape)}")

    def register_post_accumulate_grad_hook(self, hook: object) -> NoReturn:
        """Not possible, as `register_hook`."""
        refuse_gradient_hook(f"a parameter of shape {tuple(self.shape)}")

    def __deepcopy__(self, memo: dict[int, object]) -> torch.Tensor:
        values = self.detach().clone()
        copied = nn.Parameter(values, self.requires_grad) if isinstance(self, nn.Parameter) else values
        memo[id(self)] = copied
        return copied


compute_in_lists(DividedParameter)  # else a world's optimizer would round differently from one rank's, on GPUs


class GatheredCopy(DTensor):
    """A gathered part of a divided tensor, which can be read, but not written to."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        """Call ``func``; a view of a `GatheredCopy` is a `GatheredCopy`, too.

        Raises:
            UsageError: if ``func`` would write to the copy.
        """
        name, named = getattr(func, "__name__", ""), kwargs or {}
        writes = (name.endswith("_") and not name.endswith("__")) or name in (*_IN_PLACE_OPERATORS, "__setitem__")
        changed = [named.get("out"), *((*args, *named.values())[:1] if writes or named.get("inplace") else ())]
        if any(isinstance(tensor, cls) for tensor in pytree.tree_leaves(changed)):
            refuse_write()
        with without_torch_function():
            found = func(*args, **named)
        copies = {storage_of(arg) for arg in args if isinstance(arg, cls)}
        for tensor in pytree.tree_leaves(found):
            if isinstance(tensor, DTensor) and storage_of(tensor) in copies:
                tensor.__class__ = cls
        return found


def storage_of(tensor: DTensor) -> int:
    """A number that two tensors share if their parts on this rank are in the same memory."""
    return storage_key(tensor.to_local())


def refuse_write() -> NoReturn:
    """Refuse an operation that would change a `GatheredCopy`."""
    raise UsageError(
        "this would write to a part of a divided parameter, such as `parameter[0]`, that was gathered from all ranks: "
        "the parameter would stay as it is. Change all of it at once, as with parameter.copy_(value), "
        "parameter.mul_(mask) or torch.where; or set values before run.model(...); or use ddp or zero"
    )


def refuse_gradient_hook(what: str) -> NoReturn:
    """Refuse a hook for the gradient of ``what``, which is divided by rows."""
    raise UsageError(
        f"a hook for the gradient of {what}, of which each rank holds rows: it would not be called, or with a part of "
        "the gradient. Change gradients between run.backward(loss) and run.update(), name the parameter's module in "
        "ignored_modules=..., or use ddp or zero"
    )


def refuse_gradient(parameter: DividedParameter, name: str) -> None:
    """Refuse losses that depend on the rows of ``parameter`` instead of the parameter gathered by `fully_shard`."""

    def refuse(_gradient: torch.Tensor) -> NoReturn:
        raise UsageError(
            f"the loss depends on the parameter {name} as it is outside of the forward pass of its module, where this "
            "rank holds rows of it; as of a penalty such as parameter.norm(). Compute that in the forward() of the "
            "module that holds the parameter, and return it; with wrap=whole the model's own forward() has all of "
            "them. Or use weight_decay=... of the optimizer, or ddp or zero"
        )

    if parameter.requires_grad:
        torch.Tensor.register_hook(parameter, refuse)  # type: ignore[no-untyped-call]
