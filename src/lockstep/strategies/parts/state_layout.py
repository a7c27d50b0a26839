"""Layouts of models' and optimizers' tensors: on every rank, or each on its owner.

                      parameters, buffers     gradients       states of optimizers
replicated            every rank              every rank      every rank
sharded optimizer     every rank              every rank      the owner of the parameter
owner                 some ranks              some ranks      the same ranks; or some rows of it on each of them
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn

from lockstep.collectives import Group, StoredTensor, TensorShard, as_absent_shards, as_owned_shards, in_memory
from lockstep.errors import UsageError
from lockstep.nested import map_leaves
from lockstep.strategies.parts.grad_norm import norm_of_rows, squared_norms, squared_row_norms
from lockstep.strategies.parts.gradient_accumulation import parameters_of
from lockstep.strategies.parts.row_shard import RowShard
from lockstep.strategies.strategy import StateDict, StateLayout


class ReplicatedLayout(StateLayout):
    """The layout in which every rank holds all tensors."""

    def norm(self, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """The 2-norm of the gradients, all of which this rank holds."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        return norm_of_rows(squared_norms(gradients), parameters[0].device)

    def any(self, found: torch.Tensor) -> torch.Tensor:
        """``found`` itself, which is equal on all ranks."""
        return found

    def model_state(self, model: nn.Module) -> StateDict:
        """``model.state_dict()``: every tensor is whole on this rank."""
        return model.state_dict()

    def load_model(self, model: nn.Module, state: StateDict) -> None:
        """Load the whole state."""
        model.load_state_dict(state)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> StateDict:
        """``optimizer.state_dict()``: every tensor is whole on this rank."""
        return optimizer.state_dict()

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: StateDict) -> None:
        """Load the whole state."""
        load_states(optimizer, state)


class ShardedOptimizerLayout(StateLayout):
    """The layout in which every rank holds models and gradients, and the optimizer states of its own parameters.

    Args:
        group: all ranks.
        owner_of: the rank that steps a parameter.
        alone: whether `optimizer_state` gives only the states on this rank, and asks no other rank.
    """

    def __init__(self, group: Group, owner_of: Callable[[nn.Parameter], int], *, alone: bool = False) -> None:
        self._whole: Final = ReplicatedLayout()
        self._alone: Final = alone
        self._states: Final = States(group, lambda parameter: (owner_of(parameter),))

    def norm(self, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """The 2-norm of the gradients, all of which this rank holds."""
        return self._whole.norm(parameters)

    def any(self, found: torch.Tensor) -> torch.Tensor:
        """``found`` itself: it is the same on all ranks."""
        return self._whole.any(found)

    def model_state(self, model: nn.Module) -> StateDict:
        """``model.state_dict()``: every tensor is whole here."""
        return self._whole.model_state(model)

    def load_model(self, model: nn.Module, state: StateDict) -> None:
        """Load the whole state."""
        self._whole.load_model(model, state)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> StateDict:
        """The states of this rank's parameters as whole `TensorShard`, other states as absent ones. Collective."""
        return self._states.own(optimizer) if self._alone else self._states.gather(optimizer)

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: StateDict) -> None:
        """Load the states of this rank's parameters."""
        self._states.load(optimizer, state)


class OwnerLayout(StateLayout):
    """The layout in which each parameter and buffer, and its optimizer state, lies on some ranks, such as a stage's.

    The first rank that holds a tensor writes it to checkpoints. Ranks that do not hold a tensor may free its memory.
    """

    def __init__(self, group: Group) -> None:
        self._group: Final = group
        self._models: Final[dict[nn.Module, dict[str, _TensorRanks]]] = {}  # of each model's tensors, by their names
        self._locations: Final[dict[int, _TensorRanks]] = {}  # of parameters, by their ids
        self._states: Final = States(group, self._ranks_of, self._rows_of)

    def setup_model(
        self,
        model: nn.Module,
        ranks_of: Callable[[str], Sequence[int]],
        divided: Mapping[str, RowShard] | None = None,
    ) -> None:
        """Remember ``model``, whose tensors have their shapes on this rank. Collective, with equal arguments.

        Args:
            model: its parameters remain the same objects, even if their memory is freed.
            ranks_of: the ranks that will hold the tensor of this name in ``model.state_dict()``, at least one.
            divided: this rank's rows of each parameter that is divided among its ranks, by name.
        """
        locations: dict[str, _TensorRanks] = {}
        rows_of = divided or {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            if isinstance(tensor, torch.Tensor):
                rows = rows_of.get(name)
                shape = tuple(tensor.shape) if rows is None else rows.shape
                location = locations[name] = _TensorRanks(shape, tensor.dtype, tuple(ranks_of(name)), rows)
                before = self._locations.get(id(tensor), location)  # has several names, if modules share it
                self._locations[id(tensor)] = replace(
                    location, ranks=tuple(dict.fromkeys(before.ranks + location.ranks))
                )
        self._models[model] = locations

    def norm(self, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """The 2-norm of all gradients, from the squares that the owners add up. Collective."""
        locations = [self._locations[id(p)] for p in parameters]
        kind = torch.float64 if any(location.squares == torch.float64 for location in locations) else torch.float32
        written = [location.rows_written_by(self._group.rank) for location in locations]
        own = [p.grad if len(rows) else None for p, rows in zip(parameters, written, strict=True)]
        # Over the CPU, where the host knows it: it would have to wait for what a GPU has added up.
        have = self._group.begin_sum([gradient is not None for gradient in own], "which parameters have gradients")
        # Where others write, zeros: they change no bit.
        lengths = [location.rows for location in locations]
        flat = torch.zeros(sum(lengths), dtype=kind, device=self._group.device)
        for gradient, rows, slot in zip(own, written, flat.split(lengths), strict=True):
            if gradient is not None:
                slot[rows.start : rows.stop].copy_(squared_row_norms(gradient))
        slots = self._group.sum_tensor(flat, "the norm of the gradients").split(lengths)
        found = zip(slots, locations, have(), strict=True)
        return norm_of_rows([slot.to(location.squares) for slot, location, has in found if has], self._group.device)

    def any(self, found: torch.Tensor) -> torch.Tensor:
        """1.0 if ``found`` is not zero on some rank, else 0.0. Collective."""
        return (self._group.sum_tensor(found, "whether all gradients are finite") != 0).to(found)

    def model_state(self, model: nn.Module) -> StateDict:
        """The tensors that this rank writes, and absent `TensorShard` for those that others write."""
        local = model.state_dict()
        divided = {n: model.get_parameter(n) for n, location in self._models[model].items() if location.divided}
        state = OrderedDict(
            (n, location.part_of(divided.get(n, local.get(n)), self._group))
            for n, location in self._models[model].items()
        )
        return state | {name: value for name, value in local.items() if name not in state}

    def load_model(self, model: nn.Module, state: StateDict) -> None:
        """Load the tensors that lie on this rank.

        Raises:
            ValueError: if it is the state of another model.
        """
        local = {name: location.shape for name, location in self._models[model].items()}
        flags = {name: tuple(value.shape) for name, value in state.items() if isinstance(value, torch.Tensor)}
        odd = sorted(name for name in local.keys() | flags.keys() if local.get(name) != flags.get(name))
        if odd:
            more = f", and {len(odd) - 1} more do not fit" if len(odd) > 1 else ""
            raise ValueError(f"{odd[0]} has the shape {flags.get(odd[0])} there and {local.get(odd[0])} here{more}")
        away = set()
        for name, location in self._models[model].items():
            if location.divided is not None and self._group.rank in location.ranks:
                with torch.no_grad():
                    model.get_parameter(name).copy_(location.divided.own(state[name]))
            if location.divided is not None or self._group.rank not in location.ranks:
                away.add(name)
        model.load_state_dict({name: value for name, value in state.items() if name not in away}, strict=False)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> StateDict:
        """The states that this rank writes as whole `TensorShard`, other states as absent ones. Collective."""
        return self._states.gather(optimizer)

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: StateDict) -> None:
        """Load the states of the parameters that lie on this rank."""
        self._states.load(optimizer, state)

    def _ranks_of(self, parameter: nn.Parameter) -> Sequence[int]:
        return self._locations[id(parameter)].ranks

    def _rows_of(self, parameter: nn.Parameter) -> RowShard | None:
        return self._locations[id(parameter)].divided


@dataclass(frozen=True, slots=True)
class _TensorRanks:
    """The ranks that hold a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    ranks: tuple[int, ...]  #: that hold the tensor; the first rank writes it
    divided: RowShard | None = None  #: the rows on this rank, if each of `ranks` holds and writes some rows

    def rows_written_by(self, rank: int) -> range:
        """The rows of `squared_row_norms` that ``rank``, this rank, knows and no other rank writes."""
        if self.divided is not None:
            return self.divided.rows
        return range(self.rows if self.ranks[0] == rank else 0)

    @property
    def rows(self) -> int:
        """The number of `squared_row_norms` of the tensor."""
        return self.shape[0] if self.shape else 1

    @property
    def squares(self) -> torch.dtype:
        """The type of `squared_row_norms`."""
        return torch.promote_types(self.dtype.to_real(), torch.float32)

    def part_of(self, tensor: torch.Tensor | None, group: Group) -> torch.Tensor | TensorShard:
        """The part of the tensor that this rank saves; ``tensor``: the tensor or rows held by this rank, or None."""
        if self.divided is not None:
            here = tensor is not None and len(self.divided.rows)
            return self.divided.shards(tensor) if here else TensorShard.absent(self.shape, self.dtype)
        if tensor is not None and len(self.ranks) == group.size:
            return tensor
        if tensor is not None and self.ranks[0] == group.rank:
            return TensorShard.whole(tensor)
        return TensorShard.absent(self.shape, self.dtype)


class States:
    """The states of optimizers, where each rank holds the states of the parameters that it steps.

    Args:
        group: all ranks.
        ranks_of: the ranks that step a parameter, the same answer on all ranks; the first rank writes its state.
        rows_of: this rank's rows of a parameter if each of its ranks steps some rows; None: each steps the whole
            parameter.
    """

    def __init__(
        self,
        group: Group,
        ranks_of: Callable[[nn.Parameter], Sequence[int]],
        rows_of: Callable[[nn.Parameter], RowShard | None] = lambda _parameter: None,
    ) -> None:
        self._group: Final = group
        self._ranks_of: Final = ranks_of
        self._rows_of: Final = rows_of
        self._last_description: Final[dict[torch.optim.Optimizer, str]] = {}  # of this rank's states, as last gathered
        self._gathered_states: Final[dict[torch.optim.Optimizer, dict[int, Any]]] = {}  # of all ranks

    def gather(self, optimizer: torch.optim.Optimizer) -> StateDict:
        """``optimizer.state_dict()`` as on a rank that steps all parameters; tensors as `TensorShard`. Collective.

        The names and plain values of states are exchanged only if they have changed; otherwise a call takes 1 ms.

        Raises:
            UsageError: if plain values in the optimizer's parameter groups differ between ranks.
        """
        state = optimizer.state_dict()
        own = self._written_here(optimizer, state)
        absent = {index: as_absent_shards(values) for index, values in own.items()}
        description = repr(absent)
        if self._changed(
            optimizer, state["param_groups"], changed=description != self._last_description.get(optimizer)
        ):
            everywhere = self._group.gather_objects(absent, "which states the optimizer has")
            self._gathered_states[optimizer] = {
                index: gathered for one in everywhere for index, gathered in one.items()
            }
            self._last_description[optimizer] = description
        states = {index: self._gathered_states[optimizer][index] for index in sorted(self._gathered_states[optimizer])}
        states |= own
        states |= {key: value for key, value in state["state"].items() if not isinstance(key, int)}
        return state | {"state": states}

    def own(self, optimizer: torch.optim.Optimizer) -> StateDict:
        """``optimizer.state_dict()`` with only the states that this rank writes; asks no other rank."""
        state = optimizer.state_dict()
        others = {key: value for key, value in state["state"].items() if not isinstance(key, int)}
        return state | {"state": self._written_here(optimizer, state) | others}

    def _written_here(self, optimizer: torch.optim.Optimizer, state: StateDict) -> dict[int, object]:
        parameters = parameters_of(optimizer)
        return {
            index: self._own(parameters[index], values)
            for index, values in state["state"].items()
            if isinstance(index, int) and self._writes(parameters[index])
        }

    def load(self, optimizer: torch.optim.Optimizer, state: StateDict) -> None:
        """Load a ``state`` of `gather`, in which every tensor is whole; states that other ranks hold are left out."""
        parameters = parameters_of(optimizer)
        kept = {
            key: values
            for key, values in state["state"].items()
            if not isinstance(key, int) or key >= len(parameters) or self._group.rank in self._ranks_of(parameters[key])
        }

        def part_of(value: object, parameter: nn.Parameter) -> object:
            rows = self._rows_of(parameter)
            return value if rows is None else rows.own(value)

        load_states(optimizer, {**state, "state": kept}, part_of)

    def _writes(self, parameter: nn.Parameter) -> bool:
        """Whether this rank writes the states of ``parameter``, or of some of its rows."""
        rows = self._rows_of(parameter)
        return self._ranks_of(parameter)[0] == self._group.rank if rows is None else len(rows.rows) > 0

    def _own(self, parameter: nn.Parameter, values: object) -> object:
        """The part of ``values``, the states of ``parameter``, that this rank writes."""
        rows = self._rows_of(parameter)
        return as_owned_shards(values) if rows is None else rows.shards(values)

    def _changed(self, optimizer: torch.optim.Optimizer, groups: list[StateDict], *, changed: bool) -> bool:
        """Whether some rank has ``changed``; also checks that parameter groups are equal. Collective."""
        plain = {
            f"{name} of group {number}": _plain_of(value)
            for number, group in enumerate(groups)
            for name, value in group.items()
            if name != "params"
        }
        gathered = self._group.gather_objects((changed, plain), "the optimizer's parameter groups")
        first = gathered[0][1]
        for rank, (_, other) in enumerate(gathered):
            for name in first | other:
                if first.get(name) != other.get(name):
                    raise UsageError(
                        f"the parameter groups of {type(optimizer).__name__} differ between ranks: {name} is "
                        f"{first.get(name, 'missing'):.100} on rank 0 and {other.get(name, 'missing'):.100} on rank "
                        f"{rank}. If the optimizer learns it from all parameters together, use --strategy ddp; else "
                        "set it alike on all ranks. Ranks that serve others run no body of the loop: there it is set "
                        "by run.scheduler(...), given LambdaLR or a subclass of torch.optim.lr_scheduler.LRScheduler"
                    )
        return any(one for one, _ in gathered)


def _plain_of(value: object) -> str:
    """``value``, an option of a parameter group, as a text that is the same on ranks whose options are equal.

    The text of a tensor would name its GPU, another one on each rank, and round its number to four digits.
    """
    return repr(map_leaves(lambda leaf: leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf, value))


def load_states(
    optimizer: torch.optim.Optimizer,
    state: StateDict,
    part_of: Callable[[Any, nn.Parameter], Any] = lambda value, _parameter: value,
) -> None:
    """``optimizer.load_state_dict(state)``, with memory for no more than the loaded part of the state and one tensor.

    The groups of parameters stay the objects that a script may hold, as in ``decay, rest = optimizer.param_groups``.

    Args:
        optimizer: its earlier states are dropped first.
        state: of the whole optimizer; tensors may be in a file.
        part_of: gives this rank's part of a value, for the parameter of the value.
    """
    parameters = dict(enumerate(parameters_of(optimizer)))
    if type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict:
        optimizer.state.clear()  # torch would replace it; an optimizer's own method may copy into the states that exist
    found = {}
    for key, values in state["state"].items():
        parameter = parameters.get(key)
        if parameter is None or not isinstance(values, dict):
            found[key] = in_memory(values)
        else:
            found[key] = {name: _read(name, part_of(v, parameter), parameter) for name, v in values.items()}
    rest = {name: in_memory(value) for name, value in state.items() if name != "state"}
    held, groups = optimizer.param_groups, list(optimizer.param_groups)
    optimizer.load_state_dict({**rest, "state": found})
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        group.clear()
        group.update(loaded)
    held[:] = groups
    optimizer.param_groups = held


def _read(name: str, value: object, parameter: nn.Parameter) -> object:
    """``value`` in memory; a stored tensor on the device where `torch.optim.Optimizer` would put it.

    In the parameter's memory format, if of its shape, as where an optimizer makes it: files hold rows one after
    another, and torch's kernels for lists and fused ones round differently where formats differ, or refuse that.
    """
    if not isinstance(value, StoredTensor):
        return in_memory(value)
    whole = value.whole()
    if name == "step":
        return whole
    if whole.shape != parameter.shape or parameter.is_contiguous():
        return whole.to(parameter.device)
    return torch.empty_like(parameter, dtype=whole.dtype, requires_grad=False).copy_(whole)
