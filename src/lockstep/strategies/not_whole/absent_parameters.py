"""Parameters that other ranks hold, for operations of a script on all parameters of a model on every rank.

the rank that holds it    net.apply(init_weights) draws its values
every other rank          draws as many random numbers and drops them, so that later draws are equal

Otherwise each rank would draw only for its own parameters, which would get other numbers than on one rank.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.errors import UsageError
from lockstep.torch_private import aten, pytree, schema_of

_ATEN: Final = torch.ops.aten
#: Operations whose number of random draws depends on the values of their arguments.
_BY_VALUES: Final = (_ATEN.poisson, _ATEN.multinomial, _ATEN.binomial, aten("_standard_gamma"))
_IS_META: Final = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]


class AbsentParameter(torch.Tensor):
    """A parameter that other ranks hold, on ``meta`` on this rank; results computed from it have this class, too."""

    _draws: TorchDispatchMode

    @classmethod
    def __torch_function__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> object:
        """Call ``func``, and draw its random numbers.

        Raises:
            UsageError: if the result depends on the values, or if the ranks that hold them do not run the call.
        """
        # For a tensor on `meta`, functions of `torch.nn.init` would draw no random numbers.
        if func == _IS_META and sys._getframe(1).f_globals.get("__name__") == nn.init.__name__:
            return False
        with cls._draws:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def draw_alike(parameter: nn.Parameter, device: torch.device) -> None:
    """Draw random numbers for ``parameter``, which is on ``meta``, on ``device`` and drop them, from now on."""
    _become(parameter, _drawing(device))


def refuse_changes(parameter: torch.Tensor, name: str, in_loop: Callable[[], bool]) -> None:
    """Refuse random draws for ``parameter``, and changes in a loop that servers do not run.

    Args:
        parameter: that servers hold; on ``meta`` on this rank.
        name: of the parameter in the model.
        in_loop: whether this rank is in such a loop.
    """
    _become(parameter, type("ServedParameter", (AbsentParameter,), {"_draws": _Refusal(name, in_loop)}))


def _become(parameter: torch.Tensor, kind: type[torch.Tensor]) -> None:
    parameter.__class__ = kind  # the same object, as modules and optimizers hold it
    vars(parameter)["_is_param"] = True  # for `isinstance(parameter, nn.Parameter)`


@functools.cache
def _drawing(device: torch.device) -> type[AbsentParameter]:
    return type("AbsentParameter", (AbsentParameter,), {"_draws": _DrawsAlike(device)})


class _DrawsAlike(TorchDispatchMode):
    """A mode in which random numbers for tensors on ``meta`` are drawn on ``device``, and dropped."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device: Final = device

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        is_read = func is aten("_local_scalar_dense").default
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if not (is_read or draws) or not _on_meta((args, kwargs)):
            return func(*args, **kwargs)
        if is_read or func.overloadpacket in _BY_VALUES:
            raise UsageError(
                "this depends on the values of a parameter that lies on another rank, as do parameter.norm().item() "
                "and torch.nn.init.trunc_normal_, which draws again what is too large: compute it before "
                "run.model(...), or in the function that makes the model, as in run.model(lambda: Net()); or use ddp "
                "or zero"
            )
        with torch.no_grad():
            func(*pytree.tree_map(self._in_memory, args), **pytree.tree_map(self._in_memory, kwargs))
        return func(*args, **kwargs)

    def _in_memory(self, value: Any) -> object:
        if not isinstance(value, torch.Tensor) or not value.is_meta:
            return value
        return torch.zeros(value.shape, dtype=value.dtype, device=self._device)


class _Refusal(TorchDispatchMode):
    def __init__(self, name: str, in_loop: Callable[[], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name: Final = name
        self._in_loop: Final = in_loop

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        draws = torch.Tag.nondeterministic_seeded in func.tags
        changes = schema_of(func).is_mutable and self._in_loop()
        if (draws or changes) and _on_meta((args, kwargs)):
            raise UsageError(
                f"random numbers are drawn for {self._name}, of which servers hold rows: give it values before "
                "run.model(...), or in the function that makes the model, as in run.model(lambda: Net())"
                if draws
                else f"{self._name} was changed in the loop of run.train(...), which servers that hold it do not run: "
                "change it between passes, on all ranks, or use ddp or zero"
            )
        return func(*args, **(kwargs or {}))


def _on_meta(arguments: Any) -> bool:
    return any(isinstance(value, torch.Tensor) and value.is_meta for value in pytree.tree_leaves(arguments))
