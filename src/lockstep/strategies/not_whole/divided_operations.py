"""Operations of a script on divided parameters, which have the results of one rank, or are refused.

    nn.init.normal_(net.head.weight)         every rank draws the whole tensor and keeps its rows: as on one rank
    net.load_state_dict(torch.load(path))    each rank copies its rows
    net.head.weight.mul_(0.9)                by rows: the result of an element does not depend on its place
    net.head.weight.norm().item()            all rows are gathered, and every rank computes with the whole tensor
    net.head.weight[mask] = 0.0              the same, and each rank keeps its rows of the result
    net.head.weight[0].fill_(1.0)            UsageError: the row is a copy, gathered from all ranks

Torch's own `DTensor` draws different numbers for each number of ranks, cannot copy a plain tensor, adds up parts and
then sums of parts, and multiplies matrices of other shapes and strides than one rank does, with other bits. So only
listed operations are computed by rows; all others with rules in torch are computed with whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NoReturn

import torch
from torch._decomp import decomposition_table
from torch._ops import OpOverload, OpOverloadPacket
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from lockstep.collectives import Group, translating_peer_errors
from lockstep.errors import UsageError
from lockstep.strategies.not_whole.divided_parameters import GatheredCopy, refuse_write, storage_of
from lockstep.strategies.parts.module_states import checksum
from lockstep.torch_private import (
    aten,
    custom_handlers,
    is_made_of_others,
    op_dispatcher,
    pytree,
    schema_of,
    set_custom_handlers,
)

_ATEN: Final = torch.ops.aten
#: Operations that draw random numbers: into their first argument, into a tensor like it, or with its values.
_DRAWS: Final = (
    *(_ATEN.normal_, _ATEN.uniform_, _ATEN.bernoulli_, _ATEN.exponential_, _ATEN.random_),
    *(_ATEN.geometric_, _ATEN.cauchy_, _ATEN.log_normal_),
    *(_ATEN.rand_like, _ATEN.randn_like, _ATEN.randint_like),
    *(_ATEN.bernoulli, _ATEN.native_dropout, _ATEN.normal, _ATEN.poisson, _ATEN.multinomial),
)
#: Draws for which the values of the first argument do not matter.
_READ_NO_VALUES: Final = _DRAWS[:11]
#: Names of operations whose elements depend on one element of each argument, with rounding defined by IEEE 754. For
#: others, such as `sigmoid` and `pow`, torch's CPU kernels compute the last few elements of a tensor in another way.
_BY_ROWS: Final = frozenset(
    (
        *("abs", "neg", "sign", "sgn", "sqrt", "reciprocal", "ceil", "floor", "round", "trunc", "frac"),
        *("add", "sub", "mul", "div", "addcmul", "addcdiv", "lerp", "maximum", "minimum", "fmax", "fmin"),
        *("clamp", "clamp_min", "clamp_max", "where", "masked_fill", "copysign", "nan_to_num"),
        *("relu", "threshold", "threshold_backward"),
        *("eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isposinf", "isneginf", "signbit"),
        *("logical_and", "logical_or", "logical_xor", "logical_not"),
        *("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"),
        # They make tensors, or give them other values or another type.
        *("clone", "_to_copy", "empty_like", "zeros_like", "ones_like", "full_like", "zero"),
        *("new_zeros", "new_ones", "new_full", "new_empty_strided"),
        # Of torch's optimizers; `division_checks` refuses them on CPUs.
        *("_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad"),
    )
)
#: Exceptions: with a value in a tensor, and with a factor before an addition.
_NOT_BY_ROWS: Final = frozenset(
    (_ATEN.masked_fill.Tensor, _ATEN.masked_fill_.Tensor, _ATEN.add.Scalar, _ATEN.sub.Scalar, _ATEN.add_.Scalar)
)
#: Exponents for which powers are by rows, too.
_EXACT_EXPONENTS: Final = (0, 0.5, 1, 2, 3, -1, -2)
#: Operations that torch's CPU kernels round once or twice, in types of two bytes, if ``alpha`` is not 1.
_SCALED_SUMS: Final = (_ATEN.add, _ATEN.add_, _ATEN.sub, _ATEN.sub_, aten("_foreach_add"), aten("_foreach_add_"))
#: Operations without a rule in torch.
_UNKNOWN_TO_TORCH: Final = (
    *(_ATEN.renorm, _ATEN.renorm_, _ATEN.tril_, _ATEN.triu_, _ATEN.put_, _ATEN.take, _ATEN.masked_scatter_),
    *(
        aten("_foreach_copy_"),
        _ATEN.searchsorted,
        _ATEN.bincount,
        _ATEN.nonzero,
        aten("_unique2"),
        aten("_cdist_forward"),
    ),
    *(_ATEN.index_copy_, _ATEN.index_add_, _ATEN.scatter_add_, _ATEN.scatter_reduce_, _ATEN.random_, _ATEN.eye),
    *(_ATEN.trace, _ATEN.dot, _ATEN.vdot, _ATEN.mv, _ATEN.addmv, _ATEN.equal, _ATEN.allclose, _ATEN.unfold),
    *(_ATEN.argmax, _ATEN.argmin),
)
#: Operations whose rules in torch are right: they read no values, or, for `GradScaler`, ask all ranks.
_LEFT_TO_TORCH: Final = frozenset(
    (
        *(_ATEN.is_same_size.default, _ATEN.is_pinned.default, _ATEN.as_strided.default),
        aten("_amp_foreach_non_finite_check_and_unscale_").default,
    )
)
_GATHERING: Final = "reading rows of a divided parameter, as for a norm, which all ranks do or none"


class DividedOperations:
    """Lets operations on tensors divided over ``mesh`` have the results of one rank, or refuses them, while open.

    All operations but those by rows are collective: random draws compare the generators' states, copies of a plain
    tensor compare that tensor, and other operations gather the rows. Tensors on other meshes, such as a script's own,
    are left to torch.

    Args:
        mesh: of one dimension, with a name that no script uses, since torch takes meshes with equal names and ranks for
            equal.
        group: of the ranks whose parameters must stay equal, over all copies of a model.
    """

    def __init__(self, mesh: DeviceMesh, group: Group) -> None:
        self._mesh: Final = mesh
        if not _groups:
            _of_torch.update(custom_handlers(op_dispatcher(DTensor)))
            _handlers.update((op, handler) for op, handler in _of_torch.items() if op not in _OPERATIONS)
            set_custom_handlers(op_dispatcher(DTensor), _handlers)
        _groups[mesh] = group

    def handle_scaled_sums(self) -> None:
        """From now on, sums with ``alpha=`` of types of two bytes are computed with whole tensors, too, on CPUs."""
        _handlers.update(dict.fromkeys(_overloads(_SCALED_SUMS), _call))

    def close(self) -> None:
        """Leave all operations to torch again."""
        _groups.pop(self._mesh, None)
        if not _groups:
            set_custom_handlers(op_dispatcher(DTensor), dict(_of_torch))
            for op in {*_of_torch, *_overloads(_SCALED_SUMS)} - _OPERATIONS.keys():
                _handlers.pop(op, None)
            _of_torch.clear()


_groups: Final[dict[DeviceMesh, Group]] = {}  # those of what is open; torch has one table for the whole process
_of_torch: Final[dict[Any, Any]] = {}  # that table as it was before


def _operations() -> Mapping[OpOverload, Callable[..., Any]]:
    """The handler of each operation, called with the group and torch's arguments of handlers."""
    return {
        **{op: _computed(op) for op in _known_to_torch() if not _is_by_rows(op)},
        **dict.fromkeys(_overloads([_ATEN.pow, _ATEN.pow_]), _power),
        **dict.fromkeys(_overloads(_DRAWS), _draw),
        **dict.fromkeys(_overloads([_ATEN.fill_]), _fill),
        _ATEN.copy_.default: _copy,
        aten("_local_scalar_dense").default: _item,
        _ATEN.new_empty.default: _new_empty,
        _ATEN.rrelu_with_noise.default: _not_known,
        aten("_linalg_svd").default: _by_another_routine,
        aten("_linalg_eigh").default: _by_another_routine,
    }


def _known_to_torch() -> set[OpOverload]:
    """The operations that torch computes with `DTensor`s in any way, and operations without a rule in torch."""
    tables = (table for table in vars(op_dispatcher(DTensor).sharding_propagator).values() if isinstance(table, dict))
    known = {op for table in tables for op in table if isinstance(op, OpOverload)}
    known.update(op for op in decomposition_table if isinstance(op, OpOverload))
    known.update(_overloads(_UNKNOWN_TO_TORCH))
    return {op for op in known - _LEFT_TO_TORCH if op.namespace in ("aten", "prims")}


def _is_by_rows(op: OpOverload) -> bool:
    """Whether torch computes ``op`` rightly: by rows; in operations that are by rows; or as a view in place."""
    name = op.overloadpacket.__name__.removeprefix("_foreach_").rstrip("_")
    in_parts = is_made_of_others(op)
    return in_parts or (name in _BY_ROWS and op not in _NOT_BY_ROWS) or torch.Tag.inplace_view in op.tags


def _computed(op: OpOverload) -> Callable[..., Any]:
    aliases = [result.alias_info for result in schema_of(op).returns]
    if any(alias is not None and not alias.is_write for alias in aliases) or op is aten("_unsafe_view").default:
        return _view
    gives_tensors = all(isinstance(result.type, torch.TensorType) for result in schema_of(op).returns)
    return _element_by_element if torch.Tag.pointwise in op.tags and gives_tensors else _whole


def _overloads(packets: Iterable[OpOverloadPacket]) -> list[OpOverload]:
    return [getattr(packet, name) for packet in packets for name in packet.overloads()]


def _call(op: Any, args: object, kwargs: object) -> Any:
    """Compute ``op`` of tensors, at least one of which is divided."""
    tensors = (value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, DTensor))
    group = next((_groups[tensor.device_mesh] for tensor in tensors if tensor.device_mesh in _groups), None)
    with torch.no_grad():  # torch has handled gradients before this call
        if group is None:
            return _by_torch(op, args, kwargs)
        handler: Callable[..., Any] = _OPERATIONS.get(op, _scaled_sum)
        return handler(group, op, args, kwargs)


def _by_torch(op: Any, args: Any, kwargs: Any) -> object:
    handler = _of_torch.get(op)
    if handler is not None:
        return handler(op, args, kwargs)
    handlers = custom_handlers(op_dispatcher(DTensor))
    handlers.pop(op, None)  # None: another thread is at the same operation
    try:
        return op(*args, **kwargs)
    finally:
        handlers[op] = _call


def _whole(group: Group, op: Any, args: Any, kwargs: Any) -> Any:
    """Compute with whole tensors on every rank, which keeps its rows of results with a divided shape. Collective.

    Plain tensors beside divided ones must be equal on all ranks if a divided tensor is changed; in other operations
    plain tensors may be of a rank's own data, and torch refuses them.
    """
    leaves = pytree.tree_leaves((args, kwargs))
    divided = [value for value in leaves if isinstance(value, DTensor)]
    plain = [value for value in leaves if isinstance(value, torch.Tensor) and not isinstance(value, DTensor)]
    written = _written(op, args, kwargs)
    if any(isinstance(tensor, GatheredCopy) for tensor in written):
        refuse_write()
    changed = [tensor for tensor in written if isinstance(tensor, DTensor)]
    if any(tensor.dim() for tensor in plain):
        if not changed or len(changed) < len(written):
            return _by_torch(op, args, kwargs)
        group.check_equal("a tensor by which a divided parameter is changed", [checksum(tensor) for tensor in plain])
    originals: dict[int, DTensor] = {}  # the changed tensors, by the whole tensors in their place
    gathered: dict[int, torch.Tensor] = {}

    def whole(tensor: DTensor) -> torch.Tensor:
        if id(tensor) not in gathered:
            gathered[id(tensor)] = found = _gathered(tensor)
            if any(tensor is one for one in changed):
                gathered[id(tensor)] = found = found.clone() if found is tensor.to_local() else found
                originals[id(found)] = tensor
        return gathered[id(tensor)]

    whole_args, whole_kwargs = pytree.tree_map_only(DTensor, whole, (args, kwargs))
    found = op(*whole_args, **whole_kwargs)
    for tensor in changed:
        _write(tensor, whole(tensor))

    def placed(one: torch.Tensor) -> DTensor:
        like = next((tensor for tensor in divided if tensor.shape == one.shape), divided[0])
        return originals[id(one)] if id(one) in originals else _divided(one, like)

    return pytree.tree_map_only(torch.Tensor, placed, found)


def _element_by_element(group: Group, op: object, args: object, kwargs: object) -> Any:
    """Compute an element-wise operation: by rows on GPUs, with whole tensors on CPUs, see `_BY_ROWS`."""
    on_cpu = any(value.device.type == "cpu" for value in pytree.tree_leaves(args) if isinstance(value, DTensor))
    return _whole(group, op, args, kwargs) if on_cpu else _by_torch(op, args, kwargs)


def _power(group: Group, op: object, args: Any, kwargs: object) -> Any:
    is_exact = isinstance(args[1], int | float) and args[1] in _EXACT_EXPONENTS
    return _by_torch(op, args, kwargs) if is_exact else _element_by_element(group, op, args, kwargs)


def _scaled_sum(group: Group, op: object, args: object, kwargs: Any) -> object:
    types = {value.dtype.itemsize for value in pytree.tree_leaves(args) if isinstance(value, DTensor)}
    is_exact = kwargs.get("alpha", 1) == 1 or min(types) > 2
    return _by_torch(op, args, kwargs) if is_exact else _element_by_element(group, op, args, kwargs)


def _view(group: Group, op: Any, args: Any, kwargs: Any) -> Any:
    """A view of this rank's rows; or of all gathered rows, which cannot be written to. Collective then."""
    viewed = args[0]
    try:
        found = _by_torch(op, args, kwargs)
    except RuntimeError:  # as for a view in one dimension, if ranks have different numbers of rows
        if isinstance(viewed, DTensor):
            found = _whole(group, op, (_replicated(viewed), *args[1:]), kwargs)
        else:
            raise
    for tensor in pytree.tree_leaves(found):
        if isinstance(viewed, GatheredCopy) or storage_of(tensor) != storage_of(viewed):
            tensor.__class__ = GatheredCopy
    return found


def _draw(group: Group, op: Any, args: Any, kwargs: Any) -> Any:
    """Draw whole tensors, equal on every rank, which keeps its rows. Collective."""
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
        return value.to_local().new_empty(value.shape) if is_overwritten else _gathered(value)

    whole_args, whole_kwargs = pytree.tree_map(whole, (args, kwargs))
    found = op(*whole_args, **whole_kwargs)
    if schema_of(op).is_mutable:
        return _write(args[0], whole_args[0])
    return pytree.tree_map(lambda one: _divided(one, like), found)


def _copy(group: Group, op: Any, args: Any, kwargs: Any) -> Any:
    """Copy this rank's rows of a plain tensor. Collective."""
    target, source = args[:2]
    if isinstance(target, GatheredCopy):
        refuse_write()
    if not isinstance(target, DTensor):
        return _by_torch(op, args, kwargs)
    if isinstance(source, DTensor):
        is_alike = source.shape == target.shape and source.placements == target.placements
        return _by_torch(op, args, kwargs) if is_alike else _whole(group, op, args, kwargs)
    group.check_equal("a tensor that is copied into a divided parameter", checksum(source))
    return _write(target, source.expand(target.shape))


def _fill(_group: Group, op: Any, args: Any, kwargs: Any) -> Any:
    target, value = args
    if isinstance(target, GatheredCopy):
        refuse_write()
    if isinstance(value, DTensor) or not isinstance(target, DTensor):
        return _by_torch(op, args, kwargs)
    target.to_local().fill_(value)
    return target


def _item(_group: Group, op: Any, args: Any, kwargs: Any) -> Any:
    """The number that all ranks together hold, where torch gives each its own part of a sum. Collective."""
    return op(_gathered(args[0]), **kwargs)


def _new_empty(_group: Group, op: Any, args: Any, kwargs: Any) -> Any:
    """A whole, plain tensor, since functions of `torch.nn.init` fill such a tensor and copy it into the parameter."""
    return op(args[0].to_local(), *args[1:], **kwargs)


def _not_known(_group: Group, op: Any, args: Any, kwargs: Any) -> NoReturn:
    """Torch would draw other numbers on every number of ranks."""
    raise NotImplementedError(f"Operator {op} does not have a sharding strategy for random numbers")


def _by_another_routine(group: Group, op: Any, args: Any, kwargs: Any) -> Any:
    """Singular values and eigenvalues: of tensors of a subclass, torch asks for vectors where nobody else does."""
    if op is aten("_linalg_svd").default and (args[1:2] == (True,) or kwargs.get("full_matrices")):
        return _whole(group, op, args, kwargs)  # only torch.linalg.svd uses this
    raise UsageError(
        "singular values or eigenvalues of a divided parameter, as by torch.linalg.svd(..., full_matrices=False), "
        "svdvals, matrix_norm(..., 2), cond or eigh: torch would compute them by another routine than of whole "
        "parameters, with other last digits than on one rank. Use torch.linalg.svd(parameter), compute it before "
        "run.model(...) or from run.state_dict(model), or use ddp or zero"
    )


def _written(op: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that ``op`` changes."""
    found = []
    for place, argument in enumerate(schema_of(op).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += pytree.tree_leaves(args[place] if place < len(args) else kwargs.get(argument.name))
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]


def _write(target: DTensor, whole: torch.Tensor) -> DTensor:
    """Copy this rank's part of ``whole`` into ``target``."""
    if isinstance(target, GatheredCopy):
        refuse_write()
    target.to_local().copy_(_divided(whole, target).to_local())
    return target


def _replicated(tensor: DTensor) -> DTensor:
    return DTensor.from_local(_gathered(tensor), tensor.device_mesh, [Replicate()], run_check=False)


def _divided(whole: torch.Tensor, like: DTensor) -> DTensor:
    """``whole``, equal on every rank, divided as ``like`` if shapes are equal, else replicated. Not collective."""
    replicated = DTensor.from_local(whole, like.device_mesh, [Replicate()], run_check=False)
    return replicated.redistribute(placements=like.placements) if whole.shape == like.shape else replicated


def _gathered(tensor: DTensor) -> torch.Tensor:
    """The whole ``tensor``, with its strides on one rank, on which bits of sums depend. Collective."""
    with translating_peer_errors(_GATHERING):
        whole = tensor.full_tensor()
    if whole.stride() == tensor.stride():
        return whole
    is_repeated = [size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    sizes = [1 if again else size for size, again in zip(tensor.shape, is_repeated, strict=True)]
    once = whole[tuple(slice(size) for size in sizes)]
    placed = torch.empty_strided(sizes, tensor.stride(), dtype=whole.dtype, device=whole.device)
    return placed.copy_(once).expand_as(whole)


# Made when this module is imported, which the launcher does once for all ranks: reading all of torch's operations, or
# putting them into another table, takes 8 MB per process, which forked ranks share otherwise.
_OPERATIONS: Final = _operations()
_handlers: Final[dict[Any, Any]] = dict.fromkeys(_OPERATIONS, _call)
