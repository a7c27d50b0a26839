"""Construction of models that no rank holds whole, with the values that one rank would have drawn.

    self.a = nn.Linear(...)     a.weight is allocated and drawn                      whole
    self.b = nn.Linear(...)     b.weight likewise; of a.weight ...                   ... this rank's rows are kept
    self.a.weight.mul_(2)       a.weight is gathered from all ranks, and changed     whole again
    the end                     each rank holds its rows of every parameter

Each operation of the constructor runs on every rank as on a single rank, in the same order and on whole tensors: so all
values, and later random numbers, are those of one rank. Between two operations the least recently used tensors give up
their memory (their storage has no bytes, like that of `fully_shard` between two gathers) and get it back when an
operation is about to read them. An operation that overwrites a tensor, such as an initialisation, gets the tensor
without its earlier values; reading values needs all ranks.

Costs: the time of making the whole model, on every rank; in memory this rank's rows, the tensors that one operation
uses, and `_WHOLE_BYTES`. Tables of embeddings that are larger than that are made by
`parameter_server.table_construction`.
"""

from __future__ import annotations

import gc
import zlib
from collections.abc import Callable, Container, Iterable
from typing import Any, Final

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.collectives import Group, StoredTensor, broadcast_from_rank0, in_memory
from lockstep.errors import UsageError
from lockstep.strategies.parts.module_states import checksum, verify_module_states, verify_random_state
from lockstep.torch_private import (
    key_of_storage,
    pytree,
    schema_of,
    storage_behind,
    storage_key,
    without_torch_function,
)

#: Tensors of fewer bytes stay whole.
_LEAST_BYTES: Final = 1 << 10
#: Largest size of the most recently used tensors together, which stay whole.
_WHOLE_BYTES: Final = 16 << 20

_ATEN = torch.ops.aten
#: Operations that make tensors without values.
_ALLOCATES: Final = {
    _ATEN.empty.memory_format,
    _ATEN.empty_strided.default,
    _ATEN.empty_like.default,
    _ATEN.new_empty.default,
    _ATEN.new_empty_strided.default,
}
#: Operations that give every element of their first argument a value independent of the earlier value.
_OVERWRITES: Final = {
    _ATEN.copy_,
    _ATEN.exponential_,
    _ATEN.fill_,
    _ATEN.normal_,
    _ATEN.random_,
    _ATEN.uniform_,
    _ATEN.zero_,
}
#: Operations that return the same memory, and read neither values nor the size of a storage.
SHARE_MEMORY: Final = {_ATEN.detach.default, _ATEN.alias.default}
#: Calls that hand out a tensor's memory, which must stay in place from then on.
_HANDS_OUT_MEMORY: Final = {
    "__array__",
    "__deepcopy__",
    "__dlpack__",
    "__reduce_ex__",
    "_typed_storage",
    "data_ptr",
    "numpy",
    "pin_memory",
    "share_memory_",
    "storage",
    "tolist",
    "untyped_storage",
}


class DividedConstruction:
    """Makes models of which each rank of a group keeps rows. The constructor is collective, like each method.

    The rows of W ranks are those of `fully_shard`: equally many neighbouring rows of dimension 0, fewer on the last
    rank.

    Args:
        group: the ranks that hold a model together.
        everybody: all ranks, whose models must be equal.
        least_bytes: size below which tensors stay whole.
        whole_bytes: largest size of the most recently used tensors, which stay whole.
    """

    def __init__(
        self, group: Group, everybody: Group, *, least_bytes: int = _LEAST_BYTES, whole_bytes: int = _WHOLE_BYTES
    ) -> None:
        self._group: Final = group
        self._everybody: Final = everybody
        self._least_bytes: Final = least_bytes
        self._whole_bytes: Final = whole_bytes
        self._known: Final[dict[int, _Divided]] = {}  # by the storage
        self._handed_out: Final[dict[int, StorageWeakRef]] = {}  # while it is there, no other storage has its place
        # The whole tensors, in the order of their last use: by operations alone, never by which tensors are still
        # alive, since garbage is collected at different times on different ranks, and all ranks must gather the same
        # tensors.
        self._whole: Final[dict[int, _Divided]] = {}
        self._total = 0  # bytes of the whole tensors
        self._noted = 0  # so many tensors, the same ones in the same order on all ranks
        self._purge_at = 1024

    def construct(self, make: Callable[[], nn.Module]) -> nn.Module:
        """The model of ``make``; of its parameters only this rank's rows have memory, until `restore_rows`. Collective.

        Its buffers are whole, with rank 0's values.

        Raises:
            MismatchError: if ranks made different models, or would draw different random numbers.
            UsageError: for a parameter without values.
        """
        verify_random_state(self._everybody)
        with _Operations(self), _Escapes(self):
            model = make()
        self._finish(model)
        verify_module_states(self._everybody, model)
        broadcast_from_rank0(self._everybody, model.buffers())
        return model

    def restore_rows(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give ``parameters`` their memory again, with this rank's rows; other rows are undefined. Not collective."""
        for parameter in parameters:
            divided = self._known.pop(storage_key(parameter), None)
            if divided is not None:
                divided.restore_rows()

    def restore(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give ``parameters`` their memory again, and all values. Collective."""
        for parameter in parameters:
            divided = self._known.pop(storage_key(parameter), None)
            if divided is not None:
                divided.restore()

    # ---- while it is made ----------------------------------------------------------------------------------------

    def before(self, tensors: Iterable[torch.Tensor], overwritten: torch.Tensor | None) -> None:
        """Restore ``tensors``, which an operation is about to use; ``overwritten`` without its values."""
        for tensor in tensors:
            divided = self._known.get(key := storage_key(tensor))
            if divided is not None:
                divided.restore(with_values=tensor is not overwritten)
                self._forget_use(key)
                self._use(key, divided)

    def after(self, used: Iterable[torch.Tensor], made: Iterable[torch.Tensor], *, allocated: bool) -> None:
        """Note tensors ``made`` by an operation, without values if ``allocated``, and free tensors not ``used``."""
        in_use = {storage_key(tensor) for tensor in used}
        for tensor in made:
            in_use.add(key := storage_key(tensor))
            if key not in self._known and key not in self._handed_out and self._can_divide(tensor):
                self._noted += 1
                self._known[key] = _Divided(tensor, self._group, has_values=not allocated, number=self._noted)
                self._use(key, self._known[key])
        if self._total > self._whole_bytes:
            self._keep_rows(in_use)

    def _keep_rows(self, in_use: Container[int]) -> None:
        """Free the least recently used tensors, except this rank's rows, until the rest is small enough."""
        for key in [key for key in self._whole if key not in in_use]:
            if self._total <= self._whole_bytes:
                break
            divided = self._forget_use(key)
            if divided is not None and not divided.keep_rows():
                del self._known[key]
        if len(self._known) > self._purge_at:
            for key in [key for key, divided in self._known.items() if key not in self._whole and divided.is_gone]:
                del self._known[key]
            self._purge_at = 1024 + 2 * len(self._known)

    def _use(self, key: int, divided: _Divided) -> None:
        self._whole[key] = divided
        self._total += divided.bytes

    def _forget_use(self, key: int) -> _Divided | None:
        divided = self._whole.pop(key, None)
        self._total -= 0 if divided is None else divided.bytes
        return divided

    def written(self, tensor: torch.Tensor) -> None:
        """An operation has changed ``tensor``."""
        divided = self._known.get(storage_key(tensor))
        if divided is not None:
            divided.has_values = True

    def covers(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is divided, and covers its whole storage."""
        divided = self._known.get(storage_key(tensor))
        return divided is not None and divided.is_all(tensor)

    def read_rows(self, tensor: torch.Tensor, stored: StoredTensor) -> bool:
        """Copy this rank's rows of ``stored`` into ``tensor``; false if it must be copied whole."""
        divided = self._known.get(key := storage_key(tensor))
        if divided is None or not divided.is_all(tensor) or tensor.shape != stored.shape or not tensor.dim():
            return False
        self._forget_use(key)
        divided.read_rows(tensor, stored)
        return True

    def stays_whole(self, tensors: Iterable[torch.Tensor]) -> None:
        """Something may look at the memory of ``tensors`` without an operation from now on. Collective."""
        for tensor in tensors:
            divided = self._known.pop(key := storage_key(tensor), None)
            self._handed_out.setdefault(key, StorageWeakRef(tensor.untyped_storage()))
            if divided is not None:
                self._forget_use(key)
                divided.restore()

    def _can_divide(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        return storage.nbytes() >= self._least_bytes and storage.resizable() and not tensor.is_meta

    def _finish(self, model: nn.Module) -> None:
        """Keep only this rank's rows of every parameter, and the whole of all other living tensors."""
        gc.collect()
        parameters = {storage_key(p): (name, p) for name, p in model.named_parameters() if is_plain(p)}
        others = [
            key
            for key, divided in self._known.items()
            if key not in parameters or not divided.is_all(parameters[key][1])
        ]
        self._restore_all([self._known.pop(key) for key in others])
        self._whole.clear()
        self._total = 0
        checksums = []
        for key, (name, parameter) in parameters.items():
            found = self._known.get(key) or self._taken_over(parameter)
            if found is None:
                continue
            if not found.has_values:
                raise UsageError(without_values(name, model))
            if not found.divide_as(parameter):
                continue  # other code refers to its memory
            self._known[storage_key(parameter)] = found
            checksums.append(found.checksum)
        whole = [p.detach() for p in model.parameters() if not p.is_meta and storage_key(p) not in self._known]
        checksums += [checksum(p) for p in whole]
        self._everybody.check_equal(
            "the values that run.model(...) gave its parameters (the function must make the same model on every rank)",
            zlib.crc32(repr(checksums).encode()),
        )

    def _restore_all(self, divided: Iterable[_Divided]) -> None:
        """Restore those of ``divided`` whose storage there is on every rank. Collective.

        A storage that is gone on one rank is of no use to the same constructor on another rank, where a thread of the
        exchange may hold the storage a moment longer. Should something else hold it there, it gets values with which
        nothing is computed unnoticed (NaN).
        """
        found = {one.number: (one, storage) for one in divided if (storage := one.storage()) is not None}
        there = self._group.gather_objects(set(found), "which tensors the constructor of the model has left")
        everywhere = set.intersection(*there)
        for number, (one, _) in sorted(found.items()):
            if number in everywhere:
                one.restore()
            else:
                one.spoil()

    def _taken_over(self, parameter: nn.Parameter) -> _Divided | None:
        """The divided storage of a parameter from elsewhere, such as a mapped file; None if it stays whole."""
        storage = parameter.untyped_storage()
        size = parameter.numel() * parameter.element_size()
        if parameter.is_meta or size < self._least_bytes or not parameter.is_contiguous() or not parameter.dim():
            return None
        if not storage.resizable() or storage.nbytes() != size or key_of_storage(storage) in self._handed_out:
            parameter.data = parameter.data.clone()
        return _Divided(parameter, self._group, has_values=True, number=0)


class _Divided:
    """The storage of a tensor: either whole, or empty, with this rank's rows kept beside it."""

    def __init__(self, tensor: torch.Tensor, group: Group, *, has_values: bool, number: int) -> None:
        storage = tensor.untyped_storage()
        self._group: Final = group
        self.number: Final = number  #: the same on all ranks
        self._reference: Final = StorageWeakRef(storage)
        self.bytes: Final = storage.nbytes()
        self.has_values = has_values
        self.checksum = 0  #: of all values, when the tensor was whole last
        self._rows = self.bytes
        self._is_whole = True
        self._own: torch.Tensor | None = None  # the bytes of this rank's rows
        if self.is_all(tensor) and tensor.dim():
            self._rows = tensor.shape[0]

    @property
    def is_gone(self) -> bool:
        """Whether no tensor has this storage any more."""
        return bool(self._reference.expired())

    def is_all(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` has all elements of this storage, row by row."""
        size = tensor.numel() * tensor.element_size()
        return size == self.bytes and tensor.is_contiguous() and not tensor.storage_offset()

    def keep_rows(self) -> bool:
        """Keep this rank's rows, and free the rest; false if the storage does not exist any more."""
        storage = self.storage()
        if storage is None or (self._is_whole and (storage.nbytes() != self.bytes or not storage.resizable())):
            return False
        if self._is_whole:
            if self.has_values:
                flat = _bytes_of(storage)
                self.checksum = checksum(flat)
                self._own = flat[self._range(self._group.rank)].clone()
            storage.resize_(0)
            self._is_whole = False
        return True

    def restore(self, *, with_values: bool = True) -> None:
        """Allocate all bytes of the storage again, if asked with their values. Collective with values."""
        flat = self._allocated()
        if flat is None:
            return
        if self.has_values and with_values:
            on_cpu = flat.cpu()
            if self._own is not None:
                on_cpu[self._range(self._group.rank)] = self._own.cpu()
            for rank in range(self._group.size):
                part = on_cpu[self._range(rank)]
                if part.numel():
                    self._group.broadcast_bytes(part, rank, "what the constructor of the model reads of a parameter")
            if flat.is_cuda:
                flat.copy_(on_cpu)
        self._own = None

    def restore_rows(self) -> None:
        """Allocate all bytes of the storage again, with the values of this rank's rows."""
        flat = self._allocated()
        if flat is not None and self._own is not None:
            flat[self._range(self._group.rank)] = self._own
        self._own = None

    def spoil(self) -> None:
        """Allocate all bytes of the storage again, with bits that are NaN in each type of floating-point numbers."""
        flat = self._allocated()
        if flat is not None:
            flat.fill_(0xFF)
        self._own = None

    def divide_as(self, parameter: nn.Parameter) -> bool:
        """Keep this rank's rows of ``parameter``, which covers the storage; false if it must stay whole."""
        rows = parameter.shape[0] if parameter.dim() else self.bytes
        if rows != self._rows:
            self.restore()
            self._rows = rows
        return self.keep_rows()

    def read_rows(self, tensor: torch.Tensor, stored: StoredTensor) -> None:
        """Keep this rank's rows of ``stored`` as the rows of ``tensor``, which covers the storage."""
        storage = self.storage()
        assert storage is not None
        storage.resize_(0)
        self._rows, self._is_whole, self.has_values, self.checksum = tensor.shape[0], False, True, 0
        row = self.bytes // max(1, self._rows)
        own = self._range(self._group.rank)
        rows = stored.rows(own.start // max(1, row), own.stop // max(1, row))
        self._own = rows.to(device=tensor.device, dtype=tensor.dtype).reshape(-1).view(torch.uint8)

    def storage(self) -> torch.UntypedStorage | None:
        """The storage; None if no tensor has it any more."""
        return storage_behind(self._reference.cdata)

    def _allocated(self) -> torch.Tensor | None:
        """All bytes of the storage, newly allocated; None if the storage has its bytes, or is gone."""
        storage = self.storage()
        if storage is None or self._is_whole:
            return None
        storage.resize_(self.bytes)
        self._is_whole = True
        return _bytes_of(storage)

    def _range(self, rank: int) -> slice:
        row, high = self.bytes // max(1, self._rows), -(-self._rows // self._group.size)
        return slice(min(rank * high, self._rows) * row, min((rank + 1) * high, self._rows) * row)


class _Operations(TorchDispatchMode):
    """A mode that sees every operation on tensors, also inside of other operations."""

    def __init__(self, construction: DividedConstruction) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._construction: Final = construction

    def __torch_dispatch__(self, func: object, types: object, args: object = (), kwargs: object = None) -> object:
        kwargs = kwargs or {}
        with without_torch_function(of_modes=True):
            return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        construction = self._construction
        if func in SHARE_MEMORY:
            return func(*args, **kwargs)
        from_file = func is _ATEN.copy_.default and isinstance(args[1], StoredTensor) and is_plain(args[0])
        if from_file and construction.read_rows(args[0], args[1]):
            return args[0]
        args, kwargs = in_memory((args, kwargs))
        used = [value for value in pytree.tree_leaves((args, kwargs)) if is_plain(value)]
        overwritten = None
        if func.overloadpacket in _OVERWRITES and is_plain(args[0]) and construction.covers(args[0]):
            storage = storage_key(args[0])  # which a view of the tensor, such as the source of a copy, would read
            overwritten = args[0] if [storage_key(tensor) for tensor in used].count(storage) == 1 else None
        construction.before(used, overwritten)
        out = func(*args, **kwargs)
        for tensor in written_by(func, args, kwargs):
            construction.written(tensor)
        made = [value for value in pytree.tree_leaves(out) if is_plain(value)]
        construction.after(used, made, allocated=allocates(func))
        return out


class _Escapes(TorchFunctionMode):
    """A mode that sees calls that hand out a tensor's memory, such as ``data_ptr``, which are no operations."""

    def __init__(self, construction: DividedConstruction) -> None:
        super().__init__()
        self._construction: Final = construction

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        if getattr(func, "__name__", "") in _HANDS_OUT_MEMORY:
            with without_torch_function(of_modes=True):
                self._construction.stays_whole(value for value in pytree.tree_leaves(args) if is_plain(value))
        return func(*args, **(kwargs or {}))


def allocates(func: Any) -> bool:
    """Whether the operation ``func`` makes a tensor without values."""
    return func in _ALLOCATES


def written_by(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that the operation ``func`` changes in place, or writes to."""
    found = []
    for place, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += [tensor for tensor in pytree.tree_leaves(value) if is_plain(tensor)]
    return found


def without_values(name: str, model: nn.Module) -> str:
    """The message about a tensor of ``model`` without values."""
    return (
        f"{name} of {type(model).__name__} has no values: nothing initialises it. Give its module a method "
        "reset_parameters() that does, or hand over the function that makes the model with its values, as in "
        "run.model(lambda: Net()), without torch.device('meta')"
    )


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def is_plain(value: object) -> bool:
    """Whether ``value`` is a tensor of torch's own classes, and of no subclass."""
    return type(value) in (torch.Tensor, nn.Parameter, nn.Buffer)
