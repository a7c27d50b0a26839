"""What a script does to divided parameters by itself: it has the result of one rank, or is refused in words.

    nn.init.normal_(net.head.weight)         drawn whole on every rank, which keeps its rows: the numbers of one rank
    net.load_state_dict(torch.load(path))    each rank copies its rows
    net.head.weight.norm().item()            the norm of all rows, to the bit: they are gathered
    net.head.weight[0].fill_(1.0)            UsageError: the row is a copy, gathered from all ranks
    net.head.weight.data = tensor            UsageError: the rows that ranks compute with would stay

Torch's own `DTensor` draws other numbers on every number of ranks, does not take a plain tensor to copy, gives the norm
of this rank's rows, and writes to such a copy, or to a tensor that nobody reads, in silence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils import _pytree as pytree

from lockstep.collectives import Group, translating_peer_errors
from lockstep.errors import UsageError
from lockstep.strategies.module_states import checksum

_ATEN: Final = torch.ops.aten
#: They draw random numbers: into their first argument, into a tensor like it, or with its values.
_DRAWS: Final = (
    *(_ATEN.normal_, _ATEN.uniform_, _ATEN.bernoulli_, _ATEN.exponential_, _ATEN.random_),
    *(_ATEN.geometric_, _ATEN.cauchy_, _ATEN.log_normal_),
    *(_ATEN.rand_like, _ATEN.randn_like, _ATEN.randint_like),
    *(_ATEN.bernoulli, _ATEN.native_dropout, _ATEN.normal, _ATEN.poisson, _ATEN.multinomial),
)
#: Of these, the values of the first argument do not matter.
_READ_NO_VALUES: Final = _DRAWS[:11]
#: They add up, or compare, elements of several rows: of parts and of the whole, the bits would not be the same, and
#: some of them fail for a rank without rows.
_REDUCTIONS: Final = (
    *(_ATEN.sum, _ATEN.mean, _ATEN.prod, _ATEN.var, _ATEN.std, _ATEN.var_mean, _ATEN.std_mean, _ATEN.logsumexp),
    *(_ATEN.norm, _ATEN.linalg_vector_norm, _ATEN._foreach_norm),
    *(_ATEN.max, _ATEN.min, _ATEN.amax, _ATEN.amin, _ATEN.aminmax),
    *(_ATEN.mm, _ATEN.addmm, _ATEN.mv, _ATEN.addmv, _ATEN.bmm, _ATEN.baddbmm, _ATEN.dot, _ATEN.vdot),
)
#: They give a view of a plain tensor, and of a divided one sometimes a copy, gathered from all ranks.
_VIEWS: Final = (
    *(_ATEN.select.int, _ATEN.slice.Tensor, _ATEN.split.Tensor, _ATEN.split_with_sizes.default),
    *(_ATEN.diagonal.default, _ATEN.unfold.default, _ATEN.view.default, _ATEN._unsafe_view.default),
)
_TOGETHER: Final = "reading rows of a divided parameter, as for a norm, which all ranks do or none"
_IN_PLACE_OPERATORS: Final = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")}


class DividedParameter(DTensor):
    """A parameter, or its gradient, of which this rank holds rows."""

    __slots__ = ()

    @property
    def data(self) -> torch.Tensor:
        """The same values, for which no gradient is computed; they cannot be replaced."""
        return super().data

    @data.setter
    def data(self, value: torch.Tensor) -> NoReturn:
        raise UsageError(
            f"`.data = ...` of a parameter or gradient of shape {tuple(self.shape)}, of which this rank holds rows: "
            "these would stay as they are. Write `with torch.no_grad(): parameter.copy_(value)` on all ranks (in place "
            "of vector_to_parameters(...), for each parameter), set values before run.model(...), or use ddp or zero"
        )

    def detach(self) -> torch.Tensor:
        """The same values, for which no gradient is computed; of this class, as `nn.Parameter` asks for."""
        found = super().detach()
        found.__class__ = DividedParameter
        return found

    def __deepcopy__(self, memo: dict[int, object]) -> torch.Tensor:
        values = self.detach().clone()
        copied = nn.Parameter(values, self.requires_grad) if isinstance(self, nn.Parameter) else values
        memo[id(self)] = copied
        return copied


class GatheredCopy(DTensor):
    """A part of a divided tensor that was gathered from all ranks: it can be read, and writing to it is refused."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func``; a view of such a copy is one, too.

        Raises:
            UsageError: if it would write to the copy.
        """
        name, named = getattr(func, "__name__", ""), kwargs or {}
        writes = (name.endswith("_") and not name.endswith("__")) or name in (*_IN_PLACE_OPERATORS, "__setitem__")
        changed = [named.get("out"), *((*args, *named.values())[:1] if writes or named.get("inplace") else ())]
        if any(isinstance(tensor, cls) for tensor in pytree.tree_leaves(changed)):
            _refuse_write()
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **named)
        copies = {_storage_of(arg) for arg in args if isinstance(arg, cls)}
        for tensor in pytree.tree_leaves(found):
            if isinstance(tensor, DTensor) and _storage_of(tensor) in copies:
                tensor.__class__ = cls
        return found


class DividedOperations:
    """While open, operations on what is divided over ``mesh`` have the result of one rank, or are refused.

    Drawing, copying a plain tensor, and sums over rows are collective: the first two compare what is drawn from, or
    copied, and the last gathers the rows. Tensors on other meshes, such as a script's own, are left to torch.

    Args:
        mesh: of one dimension, with a name that no script gives to its own, for torch takes meshes with the same names
            and ranks for equal.
        group: of the ranks whose parameters must stay equal: those of all copies of a model.
    """

    def __init__(self, mesh: DeviceMesh, group: Group) -> None:
        self._mesh: Final = mesh
        _groups[mesh] = group
        _handlers().update(dict.fromkeys(_operations(), _call))

    def close(self) -> None:
        """Leave them to torch again."""
        _groups.pop(self._mesh, None)
        if not _groups:
            for op in _operations():
                _handlers().pop(op, None)


_groups: Final[dict[DeviceMesh, Group]] = {}  # those of what is open; torch has one table for the whole process


def _handlers() -> dict[Any, Any]:
    found: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    return found


@functools.cache
def _operations() -> Mapping[Any, Callable[..., Any]]:
    """What is called for each operation, with the group and as torch calls handlers."""
    return {
        **dict.fromkeys(_overloads(_DRAWS), _draw),
        **dict.fromkeys(_overloads(_REDUCTIONS), _reduce),
        **dict.fromkeys(_VIEWS, _view),
        **dict.fromkeys(_overloads([_ATEN.fill_]), _fill),
        _ATEN.copy_.default: _copy,
        _ATEN.eye.m_out: _eye,
        _ATEN._local_scalar_dense.default: _item,
        _ATEN.new_empty.default: _new_empty,
        _ATEN.rrelu_with_noise.default: _not_known,
    }


def _overloads(packets: Iterable[Any]) -> list[Any]:
    found = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    return [op for op in found if not any(argument.is_out for argument in op._schema.arguments)]


def _call(op: Any, args: Any, kwargs: Any) -> Any:
    """Compute ``op`` of tensors, one of which at least is divided."""
    tensors = (value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, DTensor))
    group = next((_groups[tensor.device_mesh] for tensor in tensors if tensor.device_mesh in _groups), None)
    with torch.no_grad():  # torch has seen to gradients before it asks
        return _by_torch(op, args, kwargs) if group is None else _operations()[op](group, op, args, kwargs)


def _by_torch(op: Any, args: Any, kwargs: Any) -> Any:
    _handlers().pop(op, None)  # None: a thread beside this one is at the same operation
    try:
        return op(*args, **kwargs)
    finally:
        _handlers()[op] = _call


def _draw(group: Group, op: Any, args: Any, kwargs: Any) -> Any:
    """Draw whole tensors on every rank, which keeps its rows. Collective."""
    like = next(value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, DTensor))
    generator = kwargs.get("generator")
    by_default = torch.cuda.get_rng_state(like.device) if like.device.type == "cuda" else torch.get_rng_state()
    group.check_equal(
        "the state of the random numbers that are drawn for a divided parameter (the same ones on all ranks)",
        checksum(by_default if generator is None else generator.get_state()),
    )

    def whole(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        is_overwritten = value is args[0] and op.overloadpacket in _READ_NO_VALUES
        return value.to_local().new_empty(value.shape) if is_overwritten else value.full_tensor()

    whole_args, whole_kwargs = pytree.tree_map(whole, (args, kwargs))
    found = op(*whole_args, **whole_kwargs)
    if op._schema.is_mutable:
        return _write(args[0], whole_args[0])
    return pytree.tree_map(lambda one: _divided(one, like), found)


def _reduce(_group: Group, op: Any, args: Any, kwargs: Any) -> Any:
    """Compute with whole tensors, on every rank; torch refuses plain ones beside divided ones. Collective."""
    tensors = pytree.tree_leaves((args, kwargs))
    if any(isinstance(value, torch.Tensor) and not isinstance(value, DTensor) for value in tensors):
        return _by_torch(op, args, kwargs)
    mesh = next(value.device_mesh for value in tensors if isinstance(value, DTensor))
    with translating_peer_errors(_TOGETHER):
        whole_args, whole_kwargs = pytree.tree_map_only(DTensor, DTensor.full_tensor, (args, kwargs))
    found = op(*whole_args, **whole_kwargs)
    return pytree.tree_map(lambda one: DTensor.from_local(one, mesh, [Replicate()], run_check=False), found)


def _copy(group: Group, op: Any, args: Any, kwargs: Any) -> Any:
    """Copy this rank's rows of a plain tensor. Collective."""
    target, source = args[:2]
    if isinstance(target, GatheredCopy):
        _refuse_write()
    if isinstance(source, DTensor) or not isinstance(target, DTensor):
        return _by_torch(op, args, kwargs)
    group.check_equal("a tensor that is copied into a divided parameter", checksum(source))
    return _write(target, source.expand(target.shape))


def _fill(_group: Group, op: Any, args: Any, kwargs: Any) -> Any:
    target, value = args
    if isinstance(target, GatheredCopy):
        _refuse_write()
    if isinstance(value, DTensor) or not isinstance(target, DTensor):
        return _by_torch(op, args, kwargs)
    target.to_local().fill_(value)
    return target


def _eye(_group: Group, op: Any, args: Any, kwargs: Any) -> Any:
    out = kwargs["out"]
    return _write(out, op(*args, out=out.to_local().new_empty(out.shape)))


def _item(_group: Group, op: Any, args: Any, kwargs: Any) -> Any:
    """The number that all ranks together hold, where torch gives each its own part of a sum. Collective."""
    with translating_peer_errors(_TOGETHER):
        return op(args[0].full_tensor(), **kwargs)


def _new_empty(_group: Group, op: Any, args: Any, kwargs: Any) -> Any:
    """A whole, plain tensor, as functions of `torch.nn.init` fill it and copy it into the parameter."""
    return op(args[0].to_local(), *args[1:], **kwargs)


def _not_known(_group: Group, op: Any, args: Any, kwargs: Any) -> NoReturn:
    """Torch would draw other numbers on every number of ranks."""
    raise NotImplementedError(f"Operator {op} does not have a sharding strategy for random numbers")


def _view(_group: Group, op: Any, args: Any, kwargs: Any) -> Any:
    viewed, found = args[0], _by_torch(op, args, kwargs)
    for tensor in pytree.tree_leaves(found):
        if isinstance(viewed, GatheredCopy) or _storage_of(tensor) != _storage_of(viewed):
            tensor.__class__ = GatheredCopy
    return found


def _write(target: DTensor, whole: torch.Tensor) -> DTensor:
    """Copy this rank's part of ``whole`` into ``target``."""
    if isinstance(target, GatheredCopy):
        _refuse_write()
    target.to_local().copy_(_divided(whole, target).to_local())
    return target


def _divided(whole: torch.Tensor, like: DTensor) -> DTensor:
    """``whole``, which every rank has, divided as ``like`` if it has its shape; else as it is. Not collective."""
    replicated = DTensor.from_local(whole, like.device_mesh, [Replicate()], run_check=False)
    return replicated.redistribute(placements=like.placements) if whole.shape == like.shape else replicated


def _storage_of(tensor: DTensor) -> int:
    key: int = tensor.to_local().untyped_storage()._cdata
    return key


def _refuse_write() -> NoReturn:
    raise UsageError(
        "this would write to a part of a divided parameter, such as `parameter[0]`, that was gathered from all ranks: "
        "the parameter would stay as it is. Change all of it at once, as with parameter.copy_(value), "
        "parameter.mul_(mask) or torch.where; or set values before run.model(...); or use ddp or zero"
    )
