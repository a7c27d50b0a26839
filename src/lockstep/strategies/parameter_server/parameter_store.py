"""Which rank owns which parameter, and how other ranks get the values.

    parameters    a 40   b 30   c 20   d 6   e 4   buffers
    rank 2        a 40              d 6   e 4
    rank 3               b 30   c 20
    rank 0                                         buffers    and what is not trained

Whole parameters are divided, not their rows, so that an optimizer finds on the owner all that it needs of one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

import torch
from torch import nn

from lockstep.collectives import Group
from lockstep.strategies.parameter_server.flat_buckets import FlatBucket, flat_buckets_of
from lockstep.strategies.parameter_server.rpc import RpcEndpoint
from lockstep.strategies.parts.module_states import verify_module_states
from lockstep.strategies.parts.state_layout import OwnerLayout
from lockstep.strategies.strategy import StateDict, StateLayout

#: The operation during which parameters are received, as errors name it.
PULL = "the pull of parameters"


class ParameterStore:
    """The models of a run, with each parameter on its owner; other ranks hold copies, which may be old.

    Args:
        group: all ranks.
        endpoint: of this rank.
    """

    def __init__(self, group: Group, endpoint: RpcEndpoint) -> None:
        self._group: Final = group
        self._endpoint: Final = endpoint
        self.version = 0  #: how often what this rank owns has been updated; the strategy counts
        self._models: Final[list[list[torch.Tensor]]] = []
        self._owners: Final[dict[torch.Tensor, int]] = {}
        self._buckets: list[FlatBucket] = []

    def setup_model(
        self, model: nn.Module, owner_of: Callable[[torch.Tensor], int], elsewhere: Collection[torch.Tensor] = ()
    ) -> None:
        """Copy rank 0's values of ``model`` to all ranks, and give each of its tensors an owner. Collective.

        Args:
            model: the same on all ranks, by names, shapes and types.
            owner_of: the rank that owns a tensor.
            elsewhere: tensors that are none of this store's.

        Raises:
            MismatchError: if ranks made different models.
        """
        skipped = {id(tensor) for tensor in elsewhere}
        tensors = [t for t in dict.fromkeys((*model.parameters(), *model.buffers())) if id(t) not in skipped]
        self._models.append(tensors)
        self._owners.update((tensor, owner_of(tensor)) for tensor in tensors if tensor not in self._owners)
        self._buckets = flat_buckets_of(self._owners, self._owners.values())
        verify_module_states(self._group, model)
        if not self._group.leads:
            what = "the first values of a model"
            _, flats = self._endpoint.wait(0, self._endpoint.read(0, len(self._models) - 1), what)
            for bucket, flat in zip(flat_buckets_of(tensors, [0] * len(tensors)), flats, strict=True):
                bucket.fill(flat)
        self._group.barrier("first values of a model")

    def owner_of(self, tensor: torch.Tensor) -> int:
        """The rank that owns a parameter or a buffer."""
        return self._owners[tensor]

    def read(self, model: int | None) -> tuple[int, list[torch.Tensor]]:
        """Answer `RpcEndpoint.read`: the version, and what this rank owns (None) or holds of the model so numbered."""
        if model is None:
            return self.version, [bucket.values() for bucket in self._buckets if bucket.owner == self._group.rank]
        tensors = self._models[model]
        return self.version, [bucket.values() for bucket in flat_buckets_of(tensors, [0] * len(tensors))]

    def refresh(self, ranks: Iterable[int]) -> dict[int, int]:
        """Copy what the owners hold to each of ``ranks``; the versions that were copied, by owner. Collective."""
        versions: dict[int, int] = {}
        self._group.barrier("values of the owners")  # they have them
        if self._group.rank in ranks:
            buckets = [bucket for bucket in self._buckets if bucket.owner != self._group.rank]
            unanswered = {
                rank: self._endpoint.read(rank, None) for rank in sorted({bucket.owner for bucket in buckets})
            }
            for rank, answer in unanswered.items():
                versions[rank], flats = self._endpoint.wait(rank, answer, PULL)
                for bucket, flat in zip((bucket for bucket in buckets if bucket.owner == rank), flats, strict=True):
                    bucket.fill(flat)
        self._group.barrier("copies of the owners' values")
        return versions


class LayoutWithHooks(StateLayout):
    """The layout ``owner_layout``, with another norm, another way to load models, and something to do before a save.

    Args:
        owned: each tensor is written by its owner, with what optimizers remember of it.
        norm: see `StateLayout.norm`.
        load_model: see `StateLayout.load_model`.
        before_model_state: called before `model_state`, where ranks hold values of their own.
    """

    def __init__(
        self,
        owner_layout: OwnerLayout,
        norm: Callable[[Sequence[nn.Parameter]], torch.Tensor],
        load_model: Callable[[nn.Module, StateDict], None],
        before_model_state: Callable[[], None] = lambda: None,
    ) -> None:
        self._owner_layout: Final = owner_layout
        self._norm: Final = norm
        self._load_model: Final = load_model
        self._before_model_state: Final = before_model_state

    def norm(self, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """The norm that was given."""
        return self._norm(parameters)

    def any(self, found: torch.Tensor) -> torch.Tensor:
        """1.0 if ``found`` is not zero on some rank, else 0.0. Collective."""
        return self._owner_layout.any(found)

    def model_state(self, model: nn.Module) -> StateDict:
        """The tensors that this rank owns, after the hook. Collective."""
        self._before_model_state()
        return self._owner_layout.model_state(model)

    def load_model(self, model: nn.Module, state: StateDict) -> None:
        """Load a model in the way that was given."""
        self._load_model(model, state)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> StateDict:
        """The states of the parameters that this rank owns. Collective."""
        return self._owner_layout.optimizer_state(optimizer)

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: StateDict) -> None:
        """Load the states of the parameters that this rank owns."""
        self._owner_layout.load_optimizer(optimizer, state)
