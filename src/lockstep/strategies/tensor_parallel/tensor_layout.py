"""The layout of tensors that are divided within a tensor group, and then among data-parallel ranks.

                   the whole        a tensor group divides it     another strategy divides what each rank has
colwise.weight     8 rows of 6      rows 0..3 | rows 4..7         rows 0..1, 2..3 | rows 4..5, 6..7
rowwise.weight     6 rows of 8      columns 0..3 | columns 4..7   rows 0..2, 3..5 of each
norm.weight        6                the same on both              rows 0..2, 3..5; the first rank of a group gives them
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn

from lockstep.collectives import Group, ShardGroups, TensorShard, local_part
from lockstep.errors import MismatchError, UsageError
from lockstep.strategies.not_whole.partial_models import PartialTensor
from lockstep.strategies.parts.gradient_accumulation import parameters_of
from lockstep.strategies.parts.module_states import checksum
from lockstep.strategies.strategy import StateDict, StateLayout
from lockstep.strategies.tensor_parallel.tensor_plan import TensorDivision


class TensorDivisions:
    """The divisions of all models' tensors, for this rank; the other strategy may put new parameters in their place."""

    def __init__(self) -> None:
        self._by_model: Final[dict[nn.Module, Mapping[str, TensorDivision]]] = {}
        self._by_parameter: Final[dict[nn.Parameter, TensorDivision]] = {}
        self._noted: Final[dict[nn.Parameter, int]] = {}  # a checksum of this rank's part

    def add(self, model: nn.Module, divisions: Mapping[str, TensorDivision]) -> None:
        """Remember ``divisions`` by their names in ``model``, whose parameters are those that optimizers step."""
        self._by_model[model] = divisions
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if name in divisions:
                self._by_parameter[parameter] = divisions[name]

    def named_parameters(self, model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of ``model`` that are divided, with their names."""
        divisions = self._by_model[model]
        return ((name, parameter) for name, parameter in model.named_parameters() if name in divisions)

    def note_parts(self, model: nn.Module) -> None:
        """Note this rank's parts of ``model`` as they are: `changed_parts` gives parts that change afterwards."""
        for _, parameter in self.named_parameters(model):
            self._noted[parameter] = checksum(local_part(parameter.detach()))

    def changed_parts(self) -> dict[tuple[int, str], int]:
        """Checksums of changed parts with more than one value, by number of the model, and name."""
        changed = {}
        for number, model in enumerate(self._by_model):
            for name, parameter in self.named_parameters(model):
                part = local_part(parameter.detach())
                found = checksum(part)
                if found != self._noted.get(parameter) and part.numel() and (part != part.flatten()[0]).any():
                    changed[number, name] = found
        return changed

    def of_model(self, model: nn.Module) -> Mapping[str, TensorDivision]:
        """The divisions of a model's tensors, by their names."""
        return self._by_model[model]

    def of_parameter(self, parameter: nn.Parameter) -> TensorDivision | None:
        """The division of a parameter; None: each rank of a tensor group has the whole parameter."""
        return self._by_parameter.get(parameter)


def take_own_part(module: nn.Module, name: str, division: TensorDivision) -> None:
    """Let ``load_state_dict`` of ``module``, or of a module around it, also accept whole tensors named ``name``."""

    def replace(_module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        value = state.get(prefix + name)
        if isinstance(value, torch.Tensor) and tuple(value.shape) == division.shape:
            state[prefix + name] = division.own(value)

    module.register_load_state_dict_pre_hook(replace)


class TensorLayout(StateLayout):
    """The layout of a strategy's tensors, each of which is a part of a tensor group's.

    Args:
        inner: of the strategy, as if this rank's part were the whole.
        shard_groups: of which a tensor group is a copy.
        divisions: of tensors into such parts.
        alike: other values that must be equal on all ranks of a tensor group, by name.
        alone: whether states are only this rank's, without asking other ranks.
    """

    def __init__(
        self,
        inner: StateLayout,
        shard_groups: ShardGroups,
        divisions: TensorDivisions,
        alike: Mapping[str, torch.Tensor] = MappingProxyType({}),
        *,
        alone: bool = False,
    ) -> None:
        self._inner: Final = inner
        self._shard_groups: Final = shard_groups
        self._group: Final[Group] = shard_groups.within
        self._divisions: Final = divisions
        self._alike: Final = alike
        self._alone: Final = alone

    def norm(self, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """The 2-norm of all gradients, from the norms of the parts and of whole gradients. Collective."""
        divided = [p for p in parameters if self._divisions.of_parameter(p) is not None]
        known = set(divided)
        whole = [p for p in parameters if p not in known]
        of_whole, of_part = (self._inner.norm(some) if some else None for some in (whole, divided))
        norms = [] if of_whole is None else [of_whole.view(1)]
        norms += [] if of_part is None else [self._shard_groups.gather(of_part.view(1))]
        kind = norms[0].dtype
        return torch.cat([n.double() for n in norms]).square().sum().sqrt().to(kind)

    def any(self, found: torch.Tensor) -> torch.Tensor:
        """1.0 if ``found`` is not zero on some rank, else 0.0. Collective."""
        own = self._inner.any(found)
        return (self._group.sum_tensor(own, "whether all gradients are finite") != 0).to(own)

    def model_state(self, model: nn.Module) -> StateDict:
        """This rank's tensors of ``model``, parts as `TensorShard`. Collective, unless ``alone``.

        Raises:
            MismatchError: if ranks of a tensor group have different values of a tensor that each has whole.
        """
        divisions = self._divisions.of_model(model)
        state = {
            name: value.as_subclass(torch.Tensor) if isinstance(value, PartialTensor) else value
            for name, value in self._inner.model_state(model).items()
        }
        self._check_equal({name: value for name, value in state.items() if name not in divisions} | dict(self._alike))
        return {name: self._outside(value, divisions.get(name)) for name, value in state.items()}

    def load_model(self, model: nn.Module, state: StateDict) -> None:
        """Load this rank's part of each tensor.

        Raises:
            ValueError: for a tensor of another shape.
        """
        divisions = self._divisions.of_model(model)
        self._inner.load_model(model, {name: _own(value, divisions.get(name)) for name, value in state.items()})
        self._divisions.note_parts(model)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> StateDict:
        """This rank's optimizer states, parts as `TensorShard`. Collective, unless ``alone``.

        Raises:
            UsageError: for a state that is no part of a tensor of its parameter's shape.
        """
        state = self._inner.optimizer_state(optimizer)
        return state | {"state": self._states(optimizer, state, self._outside)}

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: StateDict) -> None:
        """Load this rank's part of each state.

        Raises:
            ValueError: for a tensor of another shape than its parameter.
        """
        self._inner.load_optimizer(optimizer, state | {"state": self._states(optimizer, state, _own)})

    def check_parts_differ(self) -> None:
        """Check that no parts got equal values, other than one value, on all ranks of a tensor group. Collective.

        Raises:
            UsageError: if parts did: ranks have drawn the same numbers, each for its part, and would learn the same.
        """
        own = self._divisions.changed_parts()
        by_rank = self._group.gather_objects(own, "a checksum of what has changed of each rank's part of each tensor")
        alike = [name for number, name in own if len({found.get((number, name)) for found in by_rank}) == 1]
        if alike:
            raise UsageError(
                f"each rank of a tensor group has the same values in its part of {', '.join(alike[:5])}: after "
                "run.model(...) ranks draw the same numbers, each for its own part. Initialise before it, or within "
                "the function that it is given, as in run.model(lambda: initialised(Net()))"
            )

    def _states(
        self,
        optimizer: torch.optim.Optimizer,
        state: StateDict,
        convert: Callable[[Any, TensorDivision | None], Any],
    ) -> StateDict:
        """The states of all parameters, by their numbers, every value converted by ``convert``."""
        parameters = dict(enumerate(parameters_of(optimizer)))
        found = dict(state["state"])
        for key, values in found.items():
            if key in parameters and isinstance(values, dict):
                division = self._divisions.of_parameter(parameters[key])
                found[key] = {name: convert(value, division) for name, value in values.items()}
        return found

    def _outside(self, value: object, division: TensorDivision | None) -> object:
        """The value for the whole tensor, from the other strategy's ``value`` for a part."""
        if not isinstance(value, torch.Tensor | TensorShard):
            return value
        shape = tuple(value.shape)
        if division is None:
            shared = isinstance(value, TensorShard) and self._group.rank > 0
            return TensorShard.absent(shape, value.dtype) if shared else value
        if shape == division.local_shape:
            return division.shard(value)
        if len(shape):
            raise UsageError(
                f"the optimizer remembers a tensor of shape {shape} of a part of shape {division.local_shape} of a "
                f"parameter of shape {division.shape}: it does not treat each element alike; use another one, or no "
                "tensor=..."
            )
        return value

    def _check_equal(self, state: Mapping[str, object]) -> None:
        """Check that the tensors of ``state`` are equal on all ranks of a tensor group. Collective.

        Raises:
            MismatchError: naming tensors that differ.
        """
        if self._alone:
            return
        held = {name: value.tensor if isinstance(value, TensorShard) else value for name, value in state.items()}
        sums = {name: checksum(tensor) for name, tensor in held.items() if isinstance(tensor, torch.Tensor)}
        by_rank = self._group.gather_objects(sums, "a checksum of what each rank of a tensor group has whole")
        differ = [name for name in sums if len({found[name] for found in by_rank}) > 1]
        if differ:
            raise MismatchError(
                f"ranks of a tensor group hold different values of {', '.join(differ[:5])}, of which each has the "
                "whole. The plan is not right where they are computed with: a layer that computes with divided "
                'activations is named in it as "replicated_with_grad_allreduce", what "colwise" layers give must reach '
                'a "rowwise" one, and a head whose outputs the loss needs is "colwise_gather_output". Or ranks compute '
                "with other values: of run.rank; with a norm of parameters or gradients, of which each has parts (clip "
                "by Run(clip_norm=...), decay weights in the optimizer); or with random numbers for whole activations "
                "that are drawn between a colwise layer and its rowwise one: draw them before"
            )


def _own(value: object, division: TensorDivision | None) -> object:
    """This rank's part of ``value``, a tensor of the divided shape; ``value`` itself if it has no dimension.

    Raises:
        ValueError: for a tensor of another shape, which may be that of a part.
    """
    if division is None or not isinstance(value, torch.Tensor) or not value.dim():
        return value
    if tuple(value.shape) != division.shape:
        raise ValueError(f"a tensor of shape {tuple(value.shape)} was saved, and here it has shape {division.shape}")
    return division.own(value)
