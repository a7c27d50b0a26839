"""Models of which a rank holds only a part: operations that would take the part for the whole are refused.

    torch.save(model.state_dict(), "model.pt")     UsageError: ... write run.save(model, path) on all ranks
    copy.deepcopy(model)                           UsageError: ... use ddp or zero
    model.decode(z)                                the error that follows says why, by the method's name

`state_dict()` itself is always allowed: it gives names, shapes and this rank's part.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, NoReturn

import torch
from torch import nn

from lockstep.errors import UsageError

_SAVE = (
    "write `run.save(model, path)` on all ranks, for a file with the whole model, or `run.state_dict(model)`, which "
    "gives it to the leader; after the training also: lockstep export RUN_DIR model.safetensors"
)


def refuse_copies(model: nn.Module, strategy: str) -> None:
    """Let deep copies and pickling of ``model`` raise `UsageError` from now on."""
    name = type(model).__name__

    def refuse_copy(_memo: object) -> NoReturn:
        raise UsageError(
            f"a copy of {name} under strategy {strategy}, where each rank holds a part of it: copy it before "
            "run.model(...), or use ddp or zero, under which each rank holds the whole, also for an AveragedModel"
        )

    def refuse_pickle(_protocol: object) -> NoReturn:
        raise UsageError(half_a_model(name, strategy))

    # `copy` and `pickle` look at the object's own attributes before the class.
    vars(model).update(__deepcopy__=refuse_copy, __reduce_ex__=refuse_pickle)


def mark_absent(
    module: nn.Module, names: Collection[str], strategy: str, *, shape: Sequence[int] | None = None
) -> None:
    """Refuse to write ``module``'s own tensors of these ``names``, absent on this rank, to a file from now on.

    In a ``state_dict()`` each is an `AbsentTensor`, of ``shape`` if this rank holds some rows of a larger tensor.
    """
    _mark(module, names, strategy, lambda tensor, name: AbsentTensor.like(tensor, name, strategy, shape))


def mark_partial(module: nn.Module, names: Collection[str], strategy: str) -> None:
    """Refuse to write ``module``'s own tensors of these ``names``, parts of larger ones, to a file from now on.

    In a ``state_dict()`` each is a `PartialTensor`.
    """
    _mark(module, names, strategy, lambda tensor, name: PartialTensor.of(tensor, name, strategy))


def _mark(
    module: nn.Module, names: Collection[str], strategy: str, mark: Callable[[torch.Tensor, str], torch.Tensor]
) -> None:
    for name in names:
        what = half_a_model(name, strategy)

        def refuse_pickle(_protocol: object, what: str = what) -> NoReturn:
            raise UsageError(what)

        vars(getattr(module, name)).update(__reduce_ex__=refuse_pickle)

    def replace(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: object) -> None:
        for name in names:
            value = state.get(prefix + name)
            # With keep_vars=True, the caller wants the tensors themselves.
            if isinstance(value, torch.Tensor) and value is not getattr(module, name):
                state[prefix + name] = mark(value, prefix + name)

    module.register_state_dict_post_hook(replace)


def _refuse(tensor: AbsentTensor | PartialTensor, *_args: object, **_kwargs: object) -> NoReturn:
    raise UsageError(tensor._what)


class AbsentTensor(torch.Tensor):
    """A tensor with shape and type, but no element on this rank, which can be neither read nor written to a file."""

    _what: str = f"this rank holds nothing of a tensor, or of what was computed from it: {_SAVE}"

    @classmethod
    def like(cls, tensor: torch.Tensor, name: str, strategy: str, shape: Sequence[int] | None = None) -> AbsentTensor:
        """An absent tensor in place of ``tensor``, which has no values, or some values of a tensor of ``shape``."""
        absent = torch.empty(tensor.shape if shape is None else shape, dtype=tensor.dtype, device="meta")
        absent = absent.as_subclass(cls)
        absent._what = half_a_model(name, strategy)
        return absent

    cpu = item = numpy = __bool__ = __reduce_ex__ = _refuse


class PartialTensor(torch.Tensor):
    """A part of a tensor that ranks hold together, which can be read, copied and loaded, but not written to a file.

    Results computed from a partial tensor are partial tensors, too.
    """

    _what: str = f"this rank holds only a part of a tensor, or of what was computed from it: {_SAVE}"

    @classmethod
    def of(cls, part: torch.Tensor, name: str, strategy: str) -> PartialTensor:
        """A partial tensor of ``part``, of the tensor ``name``, in the same memory."""
        partial = part.as_subclass(cls)
        partial._what = half_a_model(name, strategy)
        return partial

    # By the address, safetensors would write only this rank's part.
    data_ptr = __reduce_ex__ = _refuse

    def __deepcopy__(self, _memo: object) -> torch.Tensor:
        return self.detach().clone()


class PickleGuard:
    """Lets pickling a tensor that ranks hold together, as by `torch.save`, raise `UsageError`, while open.

    Args:
        kinds: classes of such tensors.
        is_ours: whether a tensor is divided by the strategy, not by the user.
        strategy: its name.
    """

    def __init__(self, kinds: Sequence[type[torch.Tensor]], is_ours: Callable[[Any], bool], strategy: str) -> None:
        self._is_ours: Final = is_ours
        self._strategy: Final = strategy
        self._before: Final = {kind: copyreg.dispatch_table.get(kind) for kind in kinds}
        for kind in kinds:
            copyreg.pickle(kind, self._reduce)

    def close(self) -> None:
        """Restore pickling from before."""
        for kind, before in self._before.items():
            if copyreg.dispatch_table.get(kind) == self._reduce:
                del copyreg.dispatch_table[kind]
                if before is not None:
                    copyreg.pickle(kind, before)

    def _reduce(self, tensor: torch.Tensor) -> Any:
        if self._is_ours(tensor):
            raise UsageError(half_a_model(f"a tensor of shape {tuple(tensor.shape)}", self._strategy))
        before = self._before[type(tensor)]
        return before(tensor) if before is not None else tensor.__reduce_ex__(2)


def half_a_model(what: str, strategy: str) -> str:
    """The message where a part of ``what`` is taken for the whole."""
    return (
        f"this rank holds only a part of {what}, or nothing, under strategy {strategy}: a file of it would be half a "
        f"model; {_SAVE}"
    )


def outside_forward(strategy: str, method: str) -> str:
    """The message for an error from using parameters in ``method``, outside of the model's forward pass."""
    return (
        f"{method}(...) uses parameters, and under strategy {strategy} they are together only while the model itself "
        "is called: compute it in forward(), as with an argument that says what is wanted, or use ddp or zero"
    )


def of_divided_parameters(strategy: str) -> str:
    """The message for a torch error about an operation without a rule for divided parameters."""
    return (
        f"parameters are divided among ranks under strategy {strategy}, and torch does not compute this with their "
        "rows: compute it before run.model(...), or in the forward() of the module that holds the parameter (in the "
        "model's own with wrap=whole); weight_decay= of the optimizer is a penalty on all of them; write values with "
        "parameter.copy_(value), also where parameter.add_ is refused; make what an optimizer remembers with "
        "torch.zeros_like(parameter); or use ddp or zero"
    )


def of_absent_parameters(strategy: str, error: Exception, method: str) -> str:
    """The message for ``error``, if torch's text is about a tensor on another rank; "" otherwise.

    Args:
        strategy: its name.
        error: that ended the run.
        method: of a model, which raised the error outside of the model's forward pass; "" otherwise.
    """
    if "meta" not in str(error):
        return ""
    if method:
        return outside_forward(strategy, method)
    return (
        f"under strategy {strategy} a parameter or buffer may be on another rank, and on the device meta here: what is "
        "computed with it belongs into the forward() of the module that holds it, and no hook of another module may "
        "write to it; weight_decay= of the optimizer is a penalty on all parameters; or use ddp or zero"
    )


def replaced_parameters(strategy: str) -> str:
    """The message for an error from new parameters in place of divided ones."""
    return (
        f"a parameter was replaced or tied after run.model(...), and strategy {strategy} computes with the one that it "
        "has divided: do that before run.model(...), as with parametrizations and pruning; leave assign=True out of "
        "load_state_dict(...); or use ddp or zero, as for torch.func.functional_call"
    )
