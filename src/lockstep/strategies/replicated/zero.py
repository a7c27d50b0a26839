"""The strategy ``zero``, which divides the optimizer's work and memory: each rank steps and broadcasts its parameters.

backward, reduction          as with ddp: .grad is the same on all ranks
the optimizer's step         rank 0: A B      rank 1: C       rank 2: D E       each its own parameters
then                         A B C D E        A B C D E       A B C D E         which all ranks receive

This is the first of the three stages of ZeRO (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054). With AdamW in
fp32 a parameter takes 4 bytes for itself, 4 for its gradient and 8/W of W ranks' memory for the state of the optimizer,
where ddp takes 16. The second stage divides gradients as well: `fully_sharded`, with blocks that stay gathered until
the last backward pass of a step, 4 + 12/W bytes a parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torch import nn

from lockstep.batch import MicroBatchPosition
from lockstep.collectives import Group, OwnerBroadcast, open_owner_broadcast
from lockstep.size_balancing import owners_of
from lockstep.strategies.delegation import DelegatingStrategy
from lockstep.strategies.parts.gradient_accumulation import ParameterSet
from lockstep.strategies.parts.state_layout import ShardedOptimizerLayout
from lockstep.strategies.replicated.ddp import Ddp
from lockstep.strategies.replicated.single_process import SingleProcess
from lockstep.strategies.sharded import fully_sharded
from lockstep.strategies.strategy import ReplicaAssignment, StatePart, Strategy, StrategyContext, UpdateShare
from lockstep.strategy_kinds import FsdpOptions, ZeroOptions
from lockstep.torch_private import require_ddp


def open_strategy(context: StrategyContext, options: ZeroOptions) -> Strategy:
    """The strategy ``zero``; for a single rank `SingleProcess`. Collective."""
    if options.stage == 2:
        return fully_sharded.open_strategy(context, FsdpOptions(reshard="step"), "zero:stage=2")
    if context.group.size == 1:
        return SingleProcess(context.group, context.runs, exact=context.exact)
    require_ddp()
    replicas = Ddp(context.group, context.runs, exact=context.exact, bucket_mb=context.bucket_mb)
    return Zero(context.group, replicas, open_owner_broadcast(context.group))


class Zero(DelegatingStrategy):
    """The strategy ``zero``: the bits of ``ddp``, for optimizers that step each parameter by itself, as in torch.

    The user's own optimizer steps: optimizers skip a parameter without a gradient and make no state for it. So the
    optimizer's groups, hooks and schedulers are the same as on one rank, and so is the saved state. An optimizer that
    makes its states in its constructor, such as Adagrad, also keeps the states of other ranks' parameters.
    """

    can_update_trainable = True
    repeats_step = False  # an optimizer's closure would see only the parameters that this rank steps
    update_share = UpdateShare(has_gradients=True)
    check_optimizer = Strategy.check_optimizer  # by this strategy's own part of the state

    def __init__(self, group: Group, replicas: Ddp, owner_broadcast: OwnerBroadcast) -> None:
        self.assignment = ReplicaAssignment(group.rank, group.size)
        self.state_layout = ShardedOptimizerLayout(group, self._owner_of)
        self.state_part = StatePart(group.rank, group.size, ShardedOptimizerLayout(group, self._owner_of, alone=True))
        self._rank: Final = group.rank
        self._replicas: Final = replicas
        self._owner_broadcast: Final = owner_broadcast
        self._owners: Final[dict[int, int]] = {}  # of parameters, by their ids
        self._loads: list[int] = [0] * group.size  # bytes of parameters that each rank owns
        self._stepped: list[ParameterSet] = []  # in this step

    def setup_model(self, model: nn.Module, *, find_unused_parameters: bool, static_graph: bool = False) -> nn.Module:
        """Set up ``model`` as ``ddp`` does, and give each parameter an owner. Collective."""
        prepared = self._replicas.setup_model(
            model, find_unused_parameters=find_unused_parameters, static_graph=static_graph
        )
        # A frozen parameter has an owner, too, for its state if it is trained later, also after a resume.
        frozen = [p for p in model.parameters() if not p.requires_grad]
        self._share_out([p for p in model.parameters() if p.requires_grad])
        loads, self._loads = self._loads, [0] * len(self._loads)
        self._share_out(frozen)
        self._loads = loads
        return prepared

    def update_trainable(self, target: ParameterSet) -> None:
        """Train the parameters of ``target``; new parameters get an owner, frozen ones keep theirs. Collective."""
        self._replicas.update_trainable(target)
        self._share_out(target.parameters)

    def _share_out(self, parameters: Sequence[nn.Parameter]) -> None:
        new = [p for p in parameters if id(p) not in self._owners]
        owners, self._loads = owners_of([p.numel() * p.element_size() for p in new], self._loads)
        self._owners.update(zip(map(id, new), owners, strict=True))

    def delegate(self) -> Strategy:
        """The strategy that keeps the replicas in step."""
        return self._replicas

    def before_optimizer_step(self, target: ParameterSet) -> None:
        """Drop the gradients of parameters that other ranks own, so that this rank's optimizer skips them."""
        for parameter in target.parameters:
            if self._owner_of(parameter) != self._rank:
                parameter.grad = None
        self._stepped.append(target)

    def end_micro_batch(self, position: MicroBatchPosition) -> None:
        """After the last micro-batch, send this rank's stepped parameters to all ranks, and receive the others'."""
        if position.last:
            parameters = [p for target in self._stepped for p in target.parameters]
            self._owner_broadcast([p.detach() for p in parameters], [self._owner_of(p) for p in parameters])
            self._stepped.clear()
        self._replicas.end_micro_batch(position)

    def discard_step(self) -> None:
        """Drop gradients, and restore buffers."""
        self._stepped.clear()
        self._replicas.discard_step()

    def close(self) -> None:
        """Close the threads and connections for sums of gradients and for sending parameters."""
        self._replicas.close()
        self._owner_broadcast.close()

    def _owner_of(self, parameter: nn.Parameter) -> int:
        # A parameter of no model, or a frozen one, has no gradient that ranks share, as on one rank.
        return self._owners.get(id(parameter), 0)
