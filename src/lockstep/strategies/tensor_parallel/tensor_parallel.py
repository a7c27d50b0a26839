"""The strategy that divides layers among the ranks of a tensor group, with another strategy among equal parts.

    six ranks, tensor=2            micro-batches     layers                  the other strategy, such as ``fsdp``
    rank 0 | rank 1                0 1               left half | right half  ranks 0, 2, 4 train a model that consists
    rank 2 | rank 3                2 3               left half | right half  of left halves, ranks 1, 3, 5 one of right
    rank 4 | rank 5                4 5               left half | right half  halves, each along the tree

To the other strategy a part is a model like any other: its layers are smaller, and their forward passes happen to wait
for the other ranks of the tensor group. Layers that are not divided are computed by all ranks of a group equally, from
equal values, and so are their gradients.

Each rank holds 1 / tensor of the divided layers, which the other strategy may divide further. Sent within a group for a
micro-batch: the output of each ``rowwise`` layer in the forward pass, the gradient of the input of ``colwise`` layers
in the backward pass; activations, where a data-parallel rank sends gradients.

A sum over a tensor group is made in the order of its ranks, and one over micro-batches along the tree. So the bits
depend on the number of ranks of a tensor group, not on the number of groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lockstep.batch import MicroBatchPosition
from lockstep.collectives import ShardGroups, broadcast_from_rank0
from lockstep.errors import SettingError, UsageError
from lockstep.formatting import plural
from lockstep.strategies.delegation import DelegatingStrategy
from lockstep.strategies.not_whole.divided_construction import DividedConstruction
from lockstep.strategies.not_whole.partial_models import mark_partial, refuse_copies
from lockstep.strategies.parts.batchnorm import normalises_over_ranks
from lockstep.strategies.parts.gradient_accumulation import ParameterSet, steps_across_elements
from lockstep.strategies.parts.module_states import sync_module_states, verify_module_states
from lockstep.strategies.parts.sparse_gradients import refuse_sparse
from lockstep.strategies.strategy import StatePart, Strategy, StrategyContext, TensorPlan, UpdateShare
from lockstep.strategies.tensor_parallel.parallel_layers import DividedRegion, compute_in_parallel
from lockstep.strategies.tensor_parallel.tensor_group import TensorGroup
from lockstep.strategies.tensor_parallel.tensor_layout import TensorDivisions, TensorLayout, take_own_part
from lockstep.strategies.tensor_parallel.tensor_plan import divisions_of, styles_of

#: Torch's messages where a layer gets activations that are divided in an unexpected way.
_SHAPE_ERRORS: Final = (
    "shapes cannot be multiplied",
    "is invalid for input of size",
    "must match the size of tensor",
    "don't multiply up to the size of dim",
)


class TensorParallel(DelegatingStrategy):
    """A strategy whose layers tensor groups compute together. The constructor is collective.

    Args:
        context: the conditions.
        ranks: of a tensor group.
        name: of the strategy, as the user gave it.
        open_inner: opens the strategy among the ranks that have the same part of each layer.

    Raises:
        SettingError: if the ranks cannot be divided into tensor groups, each on one machine.
    """

    divides_construction = True
    forward_is_collective = True
    repeats_other_ranks = False  # a rank has the gradients of its part
    update_share = UpdateShare()

    def __init__(
        self, context: StrategyContext, ranks: int, name: str, open_inner: Callable[[StrategyContext], Strategy]
    ) -> None:
        group = context.group
        check_groups(group.nodes, ranks, name)
        self._context: Final = context
        self._ranks: Final = ranks
        self._name: Final = name
        self._shard_groups: Final = ShardGroups(group, ranks)
        self._tensor_group: Final = TensorGroup(self._shard_groups)
        self._inner: Final = open_inner(replace(context, group=self._shard_groups.across))
        self._construction: Final = DividedConstruction(group, group)
        self._constructed: nn.Module | None = None  # the model made last
        self._plan: TensorPlan | None = None
        self._is_checked = False  # whether the parts of ranks were compared
        self._regions: Final[list[DividedRegion]] = []
        self._divisions: Final = TensorDivisions()
        self.assignment = replace(self._inner.assignment, counts=self._tensor_group.rank == 0)
        # Losses are whole; a penalty on parts of parameters, or a use of run.rank, shows in them.
        self._losses: Final = torch.zeros((), dtype=torch.float64, device=group.device)
        alike = {"the sum of the losses": self._losses}
        self._layout: Final = TensorLayout(self._inner.state_layout, self._shard_groups, self._divisions, alike)
        self.state_layout = self._layout
        part = self._inner.state_part
        self.state_part = part and StatePart(
            self._tensor_group.rank * part.of + part.number,
            ranks * part.of,
            TensorLayout(part.layout, self._shard_groups, self._divisions, alone=True),
            divides_models=True,
        )

    def delegate(self) -> Strategy:
        """The strategy among the ranks that have the same part of each layer."""
        return self._inner

    def construct(self, make: Callable[[], nn.Module]) -> nn.Module:
        """The model of ``make``, of which each rank holds rows until `setup_model`. Collective.

        Raises:
            MismatchError: if ranks made different models.
        """
        self._constructed = self._construction.construct(make)
        return self._constructed

    def plan_layers(self, plan: TensorPlan | None) -> None:
        """Divide the model that is set up next by ``plan``; None: by its own."""
        self._plan = plan

    def setup_model(self, model: nn.Module, *, find_unused_parameters: bool, static_graph: bool = False) -> nn.Module:
        """``model`` itself, with this rank's part of each planned layer, from rank 0's values. Collective.

        Raises:
            MismatchError: if ranks made different models.
            SettingError: for layers that normalise over all ranks.
            UsageError: for a plan that cannot be followed, or for an embedding with sparse gradients.
        """
        group, tensor_group = self._context.group, self._tensor_group
        refuse_sparse(model, self._name)
        if normalises_over_ranks(model):
            raise SettingError(
                f"sync_batchnorm with tensor={self._ranks}: ranks of a tensor group compute the same micro-batch, "
                f"which would count {self._ranks} times; leave it out (running statistics are the mean over the step's "
                "micro-batches), or leave tensor= out"
            )
        styles = styles_of(model, self._plan)
        group.check_equal("the tensor plan", sorted(styles.items()))
        divisions = divisions_of(model, styles, tensor_group.rank, tensor_group.size)
        if model is self._constructed:
            verify_module_states(group, model)  # its parameters were compared in `construct`
            broadcast_from_rank0(group, model.buffers())
        else:
            sync_module_states(group, model)
        for name, parameter in model.named_parameters():
            self._construction.restore([parameter])  # one after the other: of all others this rank holds only parts
            own = divisions[name].own(parameter.data) if name in divisions else parameter.data
            parameter.data = own.to(group.device)
        for buffer in model.buffers():
            buffer.data = buffer.data.to(group.device)
        self._constructed = self._plan = None
        region = DividedRegion(tensor_group.rank, group.device)
        self._regions.append(region)
        compute_in_parallel(model, styles, divisions, tensor_group, region)
        self._inner.setup_model(model, find_unused_parameters=find_unused_parameters, static_graph=static_graph)
        self._divisions.add(model, divisions)
        self._divisions.note_parts(model)
        for name in divisions:
            layer, _, own_name = name.rpartition(".")
            module = model.get_submodule(layer)
            take_own_part(module, own_name, divisions[name])
            if not isinstance(getattr(module, own_name), DTensor):  # else the other strategy has done this
                mark_partial(module, [own_name], self._name)
        refuse_copies(model, self._name)
        model.compile = self._refuse_compile  # type: ignore[method-assign]
        return model

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that ``optimizer`` can step a part of each tensor.

        Raises:
            UsageError: for a torch optimizer that looks at several elements at once.
        """
        if known := steps_across_elements(optimizer):
            raise UsageError(
                f"{known} looks at several elements of a parameter at once, and with "
                f"tensor={self._ranks} a rank steps a part of each; use an optimizer that treats each element alike, "
                "such as AdamW, or leave tensor= out"
            )
        self._inner.check_optimizer(optimizer)

    def resync(self) -> None:
        """Let the other strategy start from what models hold. Collective.

        Raises:
            UsageError: before the first step, if each rank has drawn its part anew.
        """
        self._inner.resync()
        if not self._is_checked:
            self._layout.check_parts_differ()
        self._is_checked = True

    def begin_micro_batch(self, position: MicroBatchPosition) -> None:
        """Forget the random numbers of the micro-batch before."""
        self._forget_regions()
        self._inner.begin_micro_batch(position)

    def backward(
        self, loss: torch.Tensor, weight: torch.Tensor | None, target: ParameterSet, position: MicroBatchPosition
    ) -> None:
        """Let the other strategy compute and sum gradients, on each rank for its part. Collective."""
        self._losses.add_(loss.detach().to(self._losses))
        self._inner.backward(loss, weight, target, position)

    def end_micro_batch(self, position: MicroBatchPosition) -> None:
        """Let the other strategy end the micro-batch."""
        self._forget_regions()
        self._inner.end_micro_batch(position)

    def explain(self, error: Exception, method: str) -> str:
        """Where shapes do not fit, for activations are divided."""
        if not any(words in str(error) for words in _SHAPE_ERRORS):
            return self._inner.explain(error, method)
        return (
            f"with tensor={self._ranks}, a layer that the plan names as colwise gives each rank 1 / {self._ranks} of "
            'its outputs, for one that is named as rowwise. Name both; "colwise_gather_output" gives them whole. Write '
            "view(..., -1, head_size), for a rank has some of the heads"
        )

    def end_replay(self) -> None:
        """Let the other strategy restore buffers."""
        self._forget_regions()
        self._inner.end_replay()

    def discard_step(self) -> None:
        """Let the other strategy drop the step."""
        self._forget_regions()
        self._inner.discard_step()

    def close(self) -> None:
        """Close both."""
        self._inner.close()
        self._tensor_group.close()
        self._shard_groups.close()

    def _forget_regions(self) -> None:
        for region in self._regions:
            region.forget()

    def _refuse_compile(self, *_: object, **__: object) -> NoReturn:
        raise SettingError(
            f"compile with tensor={self._ranks}: torch.compile does not see the sums between the ranks of a tensor "
            "group; leave compile out, or use fsdp without tensor="
        )


def check_groups(nodes: tuple[int, ...], ranks: int, name: str) -> None:
    """Check that ranks on these ``nodes`` make tensor groups of ``ranks`` neighbours, each on one node.

    Raises:
        SettingError: if not.
    """
    if len(nodes) % ranks:
        raise SettingError(
            f"strategy {name}: tensor={ranks} does not divide {plural(len(nodes), 'rank')} into tensor groups; start a "
            f"multiple of {ranks} ranks, or give tensor= a divisor of {len(nodes)}"
        )
    apart = [first for first in range(0, len(nodes), ranks) if len(set(nodes[first : first + ranks])) > 1]
    if apart:
        raise SettingError(
            f"strategy {name}: with tensor={ranks}, the tensor group of ranks {apart[0]} to {apart[0] + ranks - 1} "
            "would be on several machines, whose links are too slow for activations; give tensor= a divisor of the "
            "number of ranks of each machine, and start neighbouring ranks there"
        )
