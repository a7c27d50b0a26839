"""Parameters, gradients and optimizer state divided among ranks, with torch's `fully_shard`; summed along the tree.

    forward      gather block 0, compute, drop | gather block 1, compute, drop | ...
    backward     ... | gather block 1, compute, exchange and fold its gradient: each rank keeps its rows | ...
    step         each rank updates its rows

Per rank, for W ranks: 16 / W bytes a parameter with Adam in fp32 (4 each for the parameter, its gradient and two
moments), and one block with its gradient whole. Bytes on the wire: 3 (W - 1) / W times the model's, as each block is
gathered twice and its gradient scattered once; replicas take 2 (W - 1) / W. With several micro-batches per rank this
holds for each micro-batch, and no whole tensor is kept between them: ranks take micro-batches in turn, so that the
micro-batches exchanged in a turn are neighbours in the tree, and a rank keeps its rows of at most log2(M) + 1 sums.
Autocast keeps its own bf16 copy of each weight until the backward pass, so ``mixed=bf16`` or ``checkpoint_activations``
save more than ``precision="bf16"``.

On the CPUs of one machine blocks are gathered, and gradients exchanged, in shared memory.

The bits are those of the strategy ``none``, with optimizers that treat each element alike: torch's ``fused=True``
ones do not on CPUs, where other instructions compute the last few elements of a tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Final, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate

from lockstep.batch import MicroBatchPosition
from lockstep.collectives import (
    Group,
    ShardGroups,
    StoredTensor,
    TensorShard,
    local_part,
    open_all_reduce,
    open_gather,
    open_reduce_scatter,
    translating_peer_errors,
)
from lockstep.errors import SettingError, UsageError
from lockstep.strategies.not_whole import division_checks as checks
from lockstep.strategies.not_whole.divided_construction import DividedConstruction
from lockstep.strategies.not_whole.divided_operations import DividedOperations
from lockstep.strategies.not_whole.divided_parameters import DividedParameter, refuse_gradient
from lockstep.strategies.not_whole.partial_models import (
    PickleGuard,
    half_a_model,
    of_divided_parameters,
    outside_forward,
    refuse_copies,
    replaced_parameters,
)
from lockstep.strategies.parts.buffers import Buffers
from lockstep.strategies.parts.grad_norm import norm_of_rows, squared_norms
from lockstep.strategies.parts.gradient_accumulation import ParameterSet, begin_total, divide_by_counts, parameters_of
from lockstep.strategies.parts.module_states import sync_module_states
from lockstep.strategies.parts.sparse_gradients import refuse_sparse
from lockstep.strategies.parts.state_layout import load_states
from lockstep.strategies.replicated.single_process import SingleProcess
from lockstep.strategies.sharded.fsdp_gradients import (
    FsdpBackward,
    FsdpModel,
    FsdpUnit,
    Gradients,
    ParameterUse,
    TrackedUse,
)
from lockstep.strategies.sharded.prefetch import Prefetch
from lockstep.strategies.sharded.sharded_blocks import ShardedBlocks
from lockstep.strategies.sharded.whole_gradients import by_type
from lockstep.strategies.sharded.wrapping import BlockCompiler, blocks_of, ignored_parameters, recompute
from lockstep.strategies.strategy import ReplicaAssignment, StateDict, StateLayout, StatePart, Strategy, StrategyContext
from lockstep.strategies.tensor_parallel.tensor_parallel import TensorParallel
from lockstep.strategy_kinds import FsdpOptions
from lockstep.torch_private import require_divided

_WHOLE: Final = (Replicate(),)
#: Torch's messages about operations that it does not compute with `DTensor`s. In what blocks are gathered and computed,
#: by the word of the option `mixed`.
_LOWER: Final = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_OF_DTENSORS: Final = (
    *("mixed torch.Tensor and DTensor", "sharding strategy", "Sharding propagation failed"),
    *("in-place operations that require placement changes", "not supported with DTensor"),
    "appears to not have been used in the graph",  # by a parameter: what was gathered is another tensor
)


def open_strategy(context: StrategyContext, options: FsdpOptions, name: str = "fsdp") -> Strategy:
    """The strategy ``fsdp``, or the same strategy under another ``name``; a single rank divides nothing. Collective."""
    if options.tensor > 1:
        data_parallel = replace(options, tensor=1)
        return TensorParallel(context, options.tensor, name, lambda inner: open_strategy(inner, data_parallel, name))
    if context.group.size == 1 and options.mixed == "none" and not options.checkpoint_activations:
        return SingleProcess(
            context.group,
            context.runs,
            exact=context.exact,
            prepare=lambda model: _compile_by_block(model, blocks_of(model, options.wrap), gathered=False),
        )
    require_divided(DTensor)
    return FullySharded(context, options, context.group.size, name)


class FullySharded(Strategy):
    """The strategies ``fsdp`` and ``hsdp``.

    Args:
        context: the conditions.
        options: of the strategy.
        ranks: that hold one copy of the model; neighbours, and a divisor of all.
        name: of the strategy, as the user gave it.
    """

    divides_construction = True
    repeats_other_ranks = True

    def __init__(self, context: StrategyContext, options: FsdpOptions, ranks: int, name: str) -> None:
        if options.mixed == "fp16" and context.dtype is not torch.float16:
            raise SettingError(
                "mixed=fp16: its gradients need the loss scale of precision='fp16'; give that beside it, or mixed=bf16"
            )
        if options.ignored_modules:
            context.refuse_fp16(f"{name} with ignored_modules", "torch unscales divided and whole gradients apart")
        group = context.group
        self._group: Final = group
        self._options: Final = options
        self._name: Final = name
        self._say: Final = context.say
        self._exact: Final = context.exact
        self._shard_groups: Final = ShardGroups(group, ranks)
        self._reduce_scatter: Final = open_reduce_scatter(self._shard_groups, context.runs, exact=context.exact)
        self._gather: Final = open_gather(self._shard_groups)
        self._units: Final = FsdpBackward()
        # On a single rank torch never calls a custom reduce-scatter.
        self._gradients: Final[Gradients] = (
            self._units if group.size > 1 else SingleProcess(group, context.runs, exact=context.exact)
        )
        self._all_reduce: Final = open_all_reduce(group, context.runs)
        self._buffers: Final = Buffers(self._all_reduce, group)
        # A single rank gathers only bf16 copies of its parameters.
        divides = group.size > 1 or options.mixed != "none"
        # A process group of its own, so that blocks are gathered while the gradients of others are scattered.
        self._mesh: Final = (
            DeviceMesh.from_group(
                self._shard_groups.new_process_group(), group.device.type, mesh_dim_names=("rows of lockstep",)
            )
            if divides
            else None
        )
        self._construction: Final = DividedConstruction(self._shard_groups.within, group)
        self._constructed: nn.Module | None = None  # the model made last
        self._guard: PickleGuard | None = None
        self._operations: DividedOperations | None = None
        # Blocks in shared memory need no wait.
        prefetch = Prefetch(options.prefetch if self._gather is None else 0, over_cpu=group.over_cpu)
        self._blocks: Final = ShardedBlocks(group, prefetch, name, keeps_gathered=options.reshard == "step")
        self.assignment = ReplicaAssignment(group.rank, group.size, in_turn=ranks)
        self.state_layout = DTensorLayout(group, self._shard_groups)
        within = self._shard_groups.within
        own = DTensorLayout(group, self._shard_groups, every_copy=True)
        self.state_part = StatePart(within.rank, within.size, own, divides_models=True)
        self._buffers_are_moved = False  # whether buffers have moved already, before the step's end
        self.forward_is_collective = group.size > 1

    def construct(self, make: Callable[[], nn.Module]) -> nn.Module:
        """The model of ``make``, of which this rank holds rows. Collective.

        Raises:
            MismatchError: if ranks made different models.
        """
        if self._shard_groups.within.size == 1:
            return make().to(self._group.device)
        self._constructed = self._construction.construct(make)
        return self._constructed

    def setup_model(self, model: nn.Module, *, find_unused_parameters: bool, static_graph: bool = False) -> nn.Module:
        """``model`` itself, with divided parameters and rank 0's values. Collective.

        Its parameters are new objects from now on, for which optimizers must be made.

        Raises:
            MismatchError: if ranks made different models.
            UsageError: for a parameter that cannot be divided.
        """
        refuse_sparse(model, self._name)
        if model is self._constructed:
            _move(model.buffers(), self._group.device)
        else:
            sync_module_states(self._group, model)
        blocks = blocks_of(model, self._options.wrap)
        _compile_by_block(model, blocks, gathered=True)
        if self._options.checkpoint_activations:
            for block in blocks:
                recompute(block)
            if not blocks:
                self._say(
                    f"checkpoint_activations: {type(model).__name__} has no blocks by wrap={self._options.wrap}, so "
                    "all of its activations are kept; name the classes of its blocks in wrap=..."
                )
        if self._mesh is not None and any(True for _ in model.parameters()):
            # If the called blocks depend on the micro-batch, ranks would wait for each other's blocks.
            self._shard_model(model, [] if find_unused_parameters else blocks, find_unused_parameters, self._mesh)
        whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
        self._construction.restore(whole)
        _move(whole, self._group.device)
        self._constructed = None
        self._buffers.setup_model(model)
        return model

    def _shard_model(self, model: nn.Module, blocks: Sequence[nn.Module], watch: bool, mesh: DeviceMesh) -> None:
        options = self._options
        ignored = ignored_parameters(model, options.ignored_modules)
        checks.check_divisible(model, self._name, ignored)
        checks.check_without_hooks(model, ignored)
        lower = _LOWER[options.mixed]
        if lower:
            checks.check_stateless(model, options.mixed)
        offload = options.offload and self._group.device.type != "cpu"
        units: list[FsdpUnit] = []
        sharded: list[FSDPModule] = []
        divided = set(ignored)
        for module in (*blocks, model):
            whole = module is model
            policy = MixedPrecisionPolicy(
                param_dtype=lower,
                reduce_dtype=lower and torch.float32,
                output_dtype=torch.float32 if lower and whole else None,
            )
            checks.check_one_type(module, model, divided)
            self._construction.restore_rows(p for p in module.parameters() if p not in divided)
            block: FSDPModule = fully_shard(
                module,
                mesh=mesh,
                # The whole model's own parameters are needed first in the backward pass.
                reshard_after_forward=options.reshard == "true" and not whole,
                mp_policy=policy,
                offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy(),
                ignored_params=ignored,
            )
            own = [p for p in module.parameters() if p not in divided]
            divided.update(own)
            sharded.append(block)
            self._blocks.add(model, module, own)
            checks.refuse_second_order(module)
            if own:
                units.append(FsdpUnit(own, self._shard_groups.within.size, self._reduce_scatter))
                block.set_custom_reduce_scatter(cast(Any, units[-1]))
                if self._gather is not None:
                    block.set_custom_all_gather(cast(Any, self._gather))
                block.set_gradient_divide_factor(1.0)
                block.set_force_sum_reduction_for_comms(True)
        self._blocks.add_model(model, sharded)
        refuse_copies(model, self._name)
        for name, parameter in model.named_parameters():
            if isinstance(parameter, DTensor):
                cast(Any, parameter).__class__ = DividedParameter
                refuse_gradient(cast(DividedParameter, parameter), name)
        if self._guard is None:
            self._guard = PickleGuard((DTensor, DividedParameter), lambda one: one.device_mesh == mesh, self._name)
            self._operations = DividedOperations(mesh, self._group)
        if any(p.requires_grad for p in model.parameters()):
            learning = [p for p in model.parameters() if p in ignored and p.requires_grad]
            kept = by_type(learning, self._shard_groups, self._reduce_scatter)
            self._units.add(FsdpModel(model, units, kept, TrackedUse(model, self._group) if watch else ParameterUse()))

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that ``optimizer`` can step tensors that are divided.

        Raises:
            UsageError: for a fused optimizer on CPUs, an optimizer that steps divided and whole parameters at once, or
                one that rounds rows differently.
        """
        if self._operations is not None:
            checks.check_optimizer(optimizer, self._group.device, self._options.ignored_modules)
            if self._exact:
                checks.check_fused_kernel(optimizer, lambda p: isinstance(p, DTensor))
            if any(p.dtype.itemsize < 4 for p in parameters_of(optimizer)):
                self._operations.handle_scaled_sums()

    def begin_micro_batch(self, position: MicroBatchPosition) -> None:
        """A forward pass comes that a backward pass will follow."""
        # A weight that a forward pass limits leaves its limits after some epochs: the first steps of all passes are
        # compared.
        self._blocks.begin_micro_batch(compares=position.is_checked or position.step < 2)

    def backward(
        self, loss: torch.Tensor, weight: torch.Tensor | None, target: ParameterSet, position: MicroBatchPosition
    ) -> None:
        """Compute gradients, and sum them after the last micro-batch. Collective for every micro-batch.

        Raises:
            UsageError: for a second backward pass through one forward pass, as of a gradient penalty, and for a block
                whose outputs torch does not find.
        """
        with _explaining_freed(), self._blocks.computing_gradients(is_last=position.last):
            self._gradients.backward(loss, weight, target, position)

    def begin_count(self, counted: int) -> Callable[[], int]:
        """Begin to add up the items of all ranks. Collective."""
        return begin_total(self._group, counted)

    def normalize_by_count(self, target: ParameterSet, samples: int, counted: int) -> None:
        """Divide by the number of items of the step."""
        divide_by_counts(target, samples, counted)

    def end_micro_batch(self, position: MicroBatchPosition) -> None:
        """Restore buffers; after the last micro-batch, move buffers by the mean over the step. Collective then."""
        if not self._buffers_are_moved:
            self.before_update(position)
        self._buffers_are_moved = False
        self._blocks.end_micro_batch(is_last=position.last)

    def replay(
        self, loss: torch.Tensor, weight: torch.Tensor | None, target: ParameterSet, position: MicroBatchPosition
    ) -> None:
        """Gather blocks for one more backward pass, whose gradients stay on this rank and are dropped. Collective."""
        with _explaining_freed(), self._blocks.computing_gradients(is_last=False):
            self._gradients.replay(loss, weight, target, position)

    def end_replay(self) -> None:
        """Restore buffers."""
        self._buffers.restore(discards_step=False)
        self._blocks.end_micro_batch(is_last=False)

    def before_update(self, position: MicroBatchPosition) -> None:
        """Move buffers by the mean over the step, whose rest then needs no other rank. Collective."""
        with translating_peer_errors("the reduction of buffers"):
            self._buffers.end_micro_batch(position)
        self._buffers_are_moved = True

    def evaluating(self) -> AbstractContextManager[None]:
        """A context for forward passes, after which no block stays gathered. Collective."""
        return self._blocks.evaluating()

    def finish_training(self) -> None:
        """Check that all ranks called the same blocks; each rank holds its part of the trained model. Collective."""
        self._blocks.compare_calls()
        self._blocks.check_values()

    def explain(self, error: Exception, method: str) -> str:
        """Where torch speaks of a tensor that is divided."""
        if any(words in str(error) for words in _OF_DTENSORS):
            return outside_forward(self._name, method) if method else of_divided_parameters(self._name)
        if isinstance(error, AttributeError) and error.name == "_local_tensor":
            return replaced_parameters(self._name)
        if "invalid python storage" in str(error):  # as safetensors' save_file says
            return half_a_model("the tensors of a divided model", self._name)
        return ""

    def discard_step(self) -> None:
        """Drop gradients, free gathered blocks, and restore buffers."""
        self._buffers_are_moved = False
        self._gradients.discard_step()
        self._blocks.discard_step()
        self._buffers.restore()

    def resync(self) -> None:
        """Free gathered blocks, and start from the buffers that models hold. Collective."""
        self._blocks.compare_calls()
        self._blocks.reshard()
        self._blocks.check_held()
        self._buffers.resync()

    def close(self) -> None:
        """End the threads and connections."""
        self._reduce_scatter.close()
        if self._gather is not None:
            self._gather.close()
        self._all_reduce.close()
        self._shard_groups.close()
        if self._guard is not None:
            self._guard.close()
        if self._operations is not None:
            self._operations.close()


class DTensorLayout(StateLayout):
    """The layout of tensors that are divided by rows.

    For example, of shape (5, 3) on three ranks: rows 0 and 1, rows 2 and 3, row 4. If ranks hold several copies, a
    checkpoint gets the first copy.

    Args:
        group: all ranks.
        shard_groups: of the ranks that hold one copy.
        every_copy: whether ranks of all copies give their rows, not only those of the first copy.
    """

    def __init__(self, group: Group, shard_groups: ShardGroups, *, every_copy: bool = False) -> None:
        self._group: Final = group
        self._every_copy: Final = every_copy
        self._shard_groups: Final = shard_groups

    def norm(self, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """The 2-norm of all gradients, from the squares of every rank's rows. Collective."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        divided = iter(self._row_squares_of([g for g in gradients if isinstance(g, DTensor)]))
        whole = iter(squared_norms([g for g in gradients if not isinstance(g, DTensor)]))
        squares = [next(divided if isinstance(g, DTensor) else whole) for g in gradients]
        return norm_of_rows(squares, parameters[0].device if not gradients else local_part(gradients[0]).device)

    def _row_squares_of(self, gradients: Sequence[DTensor]) -> list[torch.Tensor]:
        """The `squared_row_norms` of gradients that are divided. Collective."""
        if not gradients:
            return []
        ranks = self._shard_groups.within.size
        rows = [len(g) for g in gradients]
        most = [-(-r // ranks) for r in rows]  # rows of a tensor on one rank
        own = squared_norms([local_part(g) for g in gradients])
        widest_type = max((m.dtype for m in own), key=lambda dtype: dtype.itemsize)
        padded = [nn.functional.pad(m.to(widest_type), (0, high - len(m))) for m, high in zip(own, most, strict=True)]
        table = self._shard_groups.gather(torch.cat(padded)).view(ranks, -1)
        return [part.reshape(-1)[:r] for part, r in zip(table.split(most, dim=1), rows, strict=True)]

    def any(self, found: torch.Tensor) -> torch.Tensor:
        """1.0 if ``found`` is not zero on some rank, else 0.0. Collective."""
        return (self._group.sum_tensor(local_part(found), "whether gradients are finite") != 0).to(found.dtype)

    def model_state(self, model: nn.Module) -> StateDict:
        """This rank's rows of each tensor, as `TensorShard`."""
        return {name: self._to_shard(value) for name, value in model.state_dict().items()}

    def load_model(self, model: nn.Module, state: StateDict) -> None:
        """Load this rank's rows of each tensor, one tensor after the other."""
        own = model.state_dict()
        # Divided tensors are loaded before `load_state_dict`, which copies them into themselves, and checks names and
        # shapes.
        model.load_state_dict({name: self._copied(value, own.get(name)) for name, value in state.items()})

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> StateDict:
        """This rank's rows of each state, as `TensorShard`."""
        whole = optimizer.state_dict()
        whole["state"] = {
            number: {name: self._to_shard(value) for name, value in of_one.items()}
            for number, of_one in whole["state"].items()
        }
        return whole

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: StateDict) -> None:
        """Load this rank's rows: a state of its parameter's shape is divided like the parameter."""
        load_states(optimizer, state, self._to_dtensor)

    def _to_shard(self, value: object) -> object:
        if not isinstance(value, DTensor):
            return value
        if value.placements == _WHOLE:  # such as an optimizer's state of means of rows
            return value.to_local().detach()
        local, shape = value.to_local().detach(), tuple(value.shape)
        if (self._shard_groups.copy and not self._every_copy) or not local.numel():
            return TensorShard.absent(shape, value.dtype)
        first = self._shard_groups.within.rank * -(-shape[0] // self._shard_groups.within.size)
        return TensorShard(local, (first, *(0 for _ in shape[1:])), shape, value.dtype)

    def _copied(self, value: Any, like: Any) -> object:
        """``like`` with this rank's rows of ``value``, if that lies divided as ``like`` does; else ``value``."""
        if not _is_divided_as(like, value):
            return value
        with torch.no_grad():
            like.to_local().copy_(self._rows_of(value))
        return like

    def _to_dtensor(self, value: Any, like: Any) -> object:
        """This rank's rows of ``value`` if it is a whole tensor to be divided as ``like``; else ``value`` itself."""
        if not _is_divided_as(like, value):
            return _beside(value, like)
        # New memory, also on the CPU: the optimizer uses it, and the whole tensor must be freed.
        own = self._rows_of(value).to(like.to_local().device, copy=not isinstance(value, StoredTensor))
        return DTensor.from_local(
            own, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    def _rows_of(self, value: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a whole tensor; of a tensor in a file, only these rows are read."""
        high = -(-len(value) // self._shard_groups.within.size)
        first = min(self._shard_groups.within.rank * high, len(value))
        end = min(first + high, len(value))
        return value.rows(first, end) if isinstance(value, StoredTensor) else value[first:end]


def _is_divided_as(like: object, value: object) -> bool:
    return isinstance(like, DTensor) and isinstance(value, torch.Tensor) and value.shape == like.shape


def _beside(value: object, like: object) -> object:
    """``value``, whole on every rank, as a `DTensor` for computations with ``like``, if ``like`` is divided.

    For numbers torch needs no conversion.
    """
    if not (isinstance(like, DTensor) and isinstance(value, torch.Tensor) and value.dim()):
        return value
    return DTensor.from_local(value.to(like.device), like.device_mesh, _WHOLE, run_check=False)


@contextlib.contextmanager
def _explaining_freed() -> Iterator[None]:
    """A context for a backward pass, in which torch's error of freed memory is one of Lockstep's."""
    try:
        yield
    except RuntimeError as error:
        if "storage of size 0" not in str(error):
            raise
        raise UsageError(checks.NOT_GATHERED) from error


def _move(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    for tensor in tensors:
        tensor.data = tensor.data.to(device)


def _compile_by_block(model: nn.Module, blocks: Sequence[nn.Module], *, gathered: bool) -> None:
    model.compile = BlockCompiler(model, blocks, gathered=gathered)  # type: ignore[method-assign]
