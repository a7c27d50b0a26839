"""Parameters, gradients and optimizer state divided among ranks, with torch's `fully_shard`; summed along the tree.

    forward      gather block 0, compute, drop | gather block 1, compute, drop | ...
    backward     ... | gather block 1, compute, exchange and fold its gradient: each rank keeps its rows | ...
    step         each rank updates its rows

Per rank, for W ranks: 16 / W bytes a parameter with Adam in fp32 (4 each for the parameter, its gradient and two
moments), and one block with its gradient whole. Bytes on the wire: 3 (W - 1) / W times the model's, as each block is
gathered twice and its gradient scattered once; replicas take 2 (W - 1) / W. With several micro-batches per rank it is
gathered for each of them, and a rank also keeps its sum of whole gradients, for adding up shards would round in
another order: give each rank one large micro-batch where memory counts. Autocast keeps its own bf16 copy of each weight
until the backward pass, so ``mixed=bf16`` or ``checkpoint_activations`` save more than ``precision="bf16"``.

The bits are those of the strategy ``none``, with optimizers that treat each element alike: torch's ``fused=True``
ones do not on CPUs, where other instructions compute the last few elements of a tensor.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
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
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.batch import MicroBatchPosition
from lockstep.collectives import (
    NativeReduceScatter,
    ReduceScatter,
    ShardGroups,
    TreeAccumulator,
    TreeReduceScatter,
    open_all_reduce,
    translating_peer_errors,
)
from lockstep.errors import SettingError, UsageError
from lockstep.strategies.abilities import (
    ChecksOptimizers,
    CommunicatesInForward,
    ExplainsErrors,
    FinishesTraining,
    KnowsStatePart,
    PreparesEvaluation,
    PreparesUpdate,
    StatePart,
)
from lockstep.strategies.buffers import Buffers
from lockstep.strategies.gradient_accumulation import ParameterSet, divide_by_counts, total_count
from lockstep.strategies.module_states import sync_module_states
from lockstep.strategies.partial_models import PickleGuard, half_a_model, outside_forward, refuse_copies
from lockstep.strategies.protocol import ReplicaAssignment, Strategy, StrategyContext
from lockstep.strategies.sharded.dtensor_layout import DTensorLayout
from lockstep.strategies.sharded.fsdp_gradients import (
    AllUsed,
    FsdpBackward,
    FsdpModel,
    FsdpUnit,
    Gradients,
    RunningSum,
    TrackedUse,
    UnitSums,
)
from lockstep.strategies.sharded.wrapping import blocks_of, recompute
from lockstep.strategies.single_process import SingleProcess
from lockstep.strategies.sparse_gradients import refuse_sparse

_MIXED: Final = {"none": None, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Options:
    """The options of ``fsdp``."""

    #: Which modules are gathered as one: ``auto`` (members of lists of modules), ``whole`` (the model), a least number
    #: of parameters such as ``1M``, or names of classes such as ``Block+Head``.
    wrap: str = "auto"
    #: ``bf16``: blocks are gathered and computed in bf16, with master parameters and sums in fp32. The bits are the
    #: same for any number of ranks, and those of no other strategy.
    mixed: str = "none"
    #: Drop a block after its forward pass and gather it again for the backward pass: less memory, more traffic.
    reshard: bool = True
    #: Keep parameters, gradients and optimizer state in the memory of the CPU, for models on GPUs.
    offload: bool = False
    #: Keep only the inputs of blocks, and compute their forward pass once more in the backward pass; the same bits.
    checkpoint_activations: bool = False

    def __post_init__(self) -> None:
        if self.mixed not in _MIXED:
            raise SettingError(f"mixed={self.mixed!r}: give one of {', '.join(_MIXED)}")


def open_strategy(context: StrategyContext, options: Options) -> Strategy:
    """The strategy ``fsdp``; one rank alone divides nothing. Collective."""
    if context.group.size == 1 and options.mixed == "none" and not options.checkpoint_activations:
        return SingleProcess(context.group, context.runs, exact=context.exact)
    return FullySharded(context, options, context.group.size, "fsdp")


class FullySharded(
    Strategy,
    ChecksOptimizers,
    CommunicatesInForward,
    PreparesUpdate,
    PreparesEvaluation,
    FinishesTraining,
    ExplainsErrors,
    KnowsStatePart,
):
    """The strategies ``fsdp`` and ``hsdp``.

    Args:
        context: the conditions.
        options: of the strategy.
        ranks: that hold one copy of the model; neighbours, and a divisor of all.
        name: of the two, as the user said it.
    """

    def __init__(self, context: StrategyContext, options: Options, ranks: int, name: str) -> None:
        group = context.group
        self._group: Final = group
        self._options: Final = options
        self._name: Final = name
        self._say: Final = context.say
        self._shard_groups: Final = ShardGroups(group, ranks)
        self._reduce_scatter: Final[ReduceScatter] = (
            TreeReduceScatter(self._shard_groups, context.runs)
            if context.exact
            else NativeReduceScatter(self._shard_groups)
        )
        self._fold: Final[Callable[[int], UnitSums]] = _tree if context.exact else lambda _: RunningSum()
        self._units: Final = FsdpBackward()
        # On a single rank torch never calls a custom reduce-scatter.
        self._gradients: Final[Gradients] = (
            self._units if group.size > 1 else SingleProcess(group, context.runs, exact=context.exact)
        )
        self._all_reduce: Final = open_all_reduce(group, context.runs)
        self._buffers: Final = Buffers(self._all_reduce, group)
        # One rank alone has nothing to gather, but bf16 copies of its parameters.
        divides = group.size > 1 or options.mixed != "none"
        # A process group of its own, so that blocks are gathered while the gradients of others are scattered.
        self._mesh: Final = (
            DeviceMesh.from_group(self._shard_groups.new_process_group(), group.device.type) if divides else None
        )
        self._blocks: Final[list[FSDPModule]] = []
        self._guard: PickleGuard | None = None
        self._call_checksum = 0  # a checksum of which blocks were called, in their order
        self._roots: Final[list[FSDPModule]] = []
        self.assignment = ReplicaAssignment(group.rank, group.size)
        self.state_layout = DTensorLayout(group, self._shard_groups)
        within = self._shard_groups.within
        own = DTensorLayout(group, self._shard_groups, every_copy=True)
        self.state_part = StatePart(within.rank, within.size, own, divides_models=True)
        self._buffers_are_moved = False  # ... by the mean over the step, which is not quite over
        self.forward_is_collective = group.size > 1

    def setup_model(self, model: nn.Module, *, find_unused_parameters: bool, static_graph: bool = False) -> nn.Module:
        """``model`` itself, its parameters divided, as rank 0 made it. Collective.

        Its parameters are others from now on: optimizers are made for them.

        Raises:
            MismatchError: if ranks made different models.
            UsageError: for a parameter that cannot be divided.
        """
        refuse_sparse(model, self._name)
        sync_module_states(self._group, model)
        blocks = blocks_of(model, self._options.wrap)
        if self._options.checkpoint_activations:
            for block in blocks:
                recompute(block)
            if not blocks:
                self._say(
                    f"checkpoint_activations: {type(model).__name__} has no blocks by wrap={self._options.wrap}, so "
                    "all of its activations are kept; name the classes of its blocks in wrap=..."
                )
        if self._mesh is not None and any(True for _ in model.parameters()):
            # Where it depends on the micro-batch which blocks are called, ranks would wait for each other's blocks.
            self._shard_model(model, [] if find_unused_parameters else blocks, find_unused_parameters, self._mesh)
        self._buffers.setup_model(model)
        return model

    def _shard_model(self, model: nn.Module, blocks: Sequence[nn.Module], watch: bool, mesh: DeviceMesh) -> None:
        _check_divisible(model, self._name)
        options = self._options
        lower = _MIXED[options.mixed]
        if lower:
            _check_stateless(model)
        offload = options.offload and self._group.device.type != "cpu"
        units: list[FsdpUnit] = []
        divided: set[nn.Parameter] = set()
        for module in (*blocks, model):
            whole = module is model
            policy = MixedPrecisionPolicy(
                param_dtype=lower,
                reduce_dtype=lower and torch.float32,
                output_dtype=torch.float32 if lower and whole else None,
            )
            _check_one_type(module, model, divided)
            block: FSDPModule = fully_shard(
                module,
                mesh=mesh,
                # What the whole model holds itself is needed first thing in the backward pass.
                reshard_after_forward=options.reshard and not whole,
                mp_policy=policy,
                offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy(),
            )
            own = [p for p in module.parameters() if p not in divided]
            divided.update(own)
            self._blocks.append(block)
            module.register_forward_pre_hook(partial(self._record_call, len(self._blocks)), prepend=True)
            if own:
                units.append(FsdpUnit(own, self._shard_groups.within.size, self._reduce_scatter, self._fold))
                block.set_custom_reduce_scatter(cast(Any, units[-1]))
                block.set_gradient_divide_factor(1.0)
                block.set_force_sum_reduction_for_comms(True)
        self._roots.append(block)
        if callable(getattr(model, "generate", None)):
            # Models of transformers use parameters in it outside of forward(): an encoder is called by itself.
            register_fsdp_forward_method(model, "generate")
        refuse_copies(model, self._name)
        if self._guard is None:
            self._guard = PickleGuard(DTensor, lambda tensor: tensor.device_mesh == mesh, self._name)
        if any(p.requires_grad for p in model.parameters()):
            self._units.add(FsdpModel(model, units, TrackedUse(model, self._group) if watch else AllUsed()))

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that ``optimizer`` can step tensors that are divided.

        Raises:
            UsageError: for a fused optimizer on CPUs.
        """
        fused = any(group.get("fused") for group in optimizer.param_groups)
        if fused and self._mesh is not None and self._group.device.type == "cpu":
            raise UsageError(
                f"{type(optimizer).__name__}(fused=True): torch's fused kernels on CPUs know no divided tensors; leave "
                "fused=True out, or use ddp or zero"
            )

    def backward(
        self, loss: torch.Tensor, weight: torch.Tensor | None, target: ParameterSet, position: MicroBatchPosition
    ) -> None:
        """Compute gradients, and sum them after the last micro-batch. Collective for every micro-batch.

        Raises:
            UsageError: for a second backward pass through one forward pass, as of a gradient penalty.
        """
        try:
            self._gradients.backward(loss, weight, target, position)
        except RuntimeError as error:
            if "storage of size 0" not in str(error):
                raise
            raise UsageError(
                "the loss depends on gradients that were computed before, as with torch.autograd.grad(..., "
                "create_graph=True) for a gradient penalty, and after those, fully_shard has let go of the whole "
                "parameters, which the second backward pass needs: use ddp or zero"
            ) from error

    def normalize_by_count(self, target: ParameterSet, samples: int, counted: int) -> None:
        """Divide by the number of items of the step. Collective."""
        divide_by_counts(target, samples, total_count(self._group, counted))

    def end_micro_batch(self, position: MicroBatchPosition) -> None:
        """Restore buffers; after the last micro-batch, move them by the mean over the step. Collective then."""
        if not self._buffers_are_moved:
            self.before_update(position)
        self._buffers_are_moved = False

    def before_update(self, position: MicroBatchPosition) -> None:
        """Move buffers by the mean over the step: nothing that follows in it needs another rank. Collective."""
        with translating_peer_errors("the reduction of buffers"):
            self._buffers.end_micro_batch(position)
        self._buffers_are_moved = True

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """A context for forward passes, after which no block stays gathered. Collective."""
        self._compare_calls()
        yield
        self._compare_calls()
        self._reshard()

    def finish_training(self) -> None:
        """Check that all ranks called the same blocks; each holds its part of the trained model already. Collective."""
        self._compare_calls()

    def explain(self, error: Exception, method: str) -> str:
        """Where torch speaks of a tensor that is divided."""
        if method and "mixed torch.Tensor and DTensor" in str(error):
            return outside_forward(self._name, method)
        if "invalid python storage" in str(error):  # as safetensors' save_file says
            return half_a_model("the tensors of a divided model", self._name)
        return ""

    def discard_step(self) -> None:
        """Drop gradients, free gathered blocks, and restore buffers."""
        self._buffers_are_moved = False
        self._gradients.discard_step()
        for root in self._roots:
            # Torch 2.11 has no such method; there, what it remembers of the pass is replaced by the next one's.
            if hasattr(root, "reset_iter_state"):
                root.reset_iter_state()
        self._reshard()
        self._buffers.restore()

    def resync(self) -> None:
        """Free gathered blocks, and start from the buffers that models hold. Collective."""
        self._compare_calls()
        self._reshard()
        self._buffers.resync()

    def close(self) -> None:
        """End the threads and connections."""
        self._reduce_scatter.close()
        self._all_reduce.close()
        self._shard_groups.close()
        if self._guard is not None:
            self._guard.close()

    def _record_call(self, block: int, *_: object) -> None:
        self._call_checksum = zlib.crc32(block.to_bytes(4, "little"), self._call_checksum)

    def _compare_calls(self) -> None:
        """Check that all ranks called the same blocks; else they may have got each other's parameters. Collective.

        Raises:
            MismatchError: if some did.
        """
        self._group.check_equal(
            "a checksum of the order in which forward() calls the blocks of wrap=... (where that depends on the data, "
            "say run.model(model, find_unused_parameters=True), which gathers the whole model at once)",
            self._call_checksum,
        )

    def _reshard(self) -> None:
        """Free gathered blocks, so that what is read next are the ranks' rows."""
        for block in self._blocks:
            block.reshard()


def _tree(micro_batches: int) -> UnitSums:
    return TreeAccumulator(micro_batches, lambda left, right: left.add_(right))


def _check_divisible(model: nn.Module, strategy: str) -> None:
    for name, parameter in model.named_parameters():
        if not parameter.dim():
            raise UsageError(
                f"the parameter {name} has no dimension, and {strategy} divides rows; make it of shape (1,), as with "
                "nn.Parameter(torch.ones(1))"
            )
        if not parameter.is_contiguous():
            raise UsageError(
                f"the parameter {name} of shape {tuple(parameter.shape)} has strides {parameter.stride()}, and "
                f"{strategy} divides contiguous rows; leave out .to(memory_format=...), or use ddp"
            )


def _check_stateless(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is not None:
            raise UsageError(
                f"mixed=bf16 with {name or 'the model'}, a {type(module).__name__}: its statistics are fp32, and "
                "torch computes it in one type; use precision='bf16' instead of mixed=bf16, or another normalisation"
            )


def _check_one_type(block: nn.Module, model: nn.Module, divided: Container[nn.Parameter]) -> None:
    """Check what torch would refuse in the first forward pass: parameters of several types in one block."""
    types: dict[torch.dtype, nn.Parameter] = {}
    for parameter in block.parameters():
        if parameter.requires_grad and parameter not in divided:
            types.setdefault(parameter.dtype, parameter)
    if len(types) > 1:
        names = {p: name for name, p in model.named_parameters()}
        raise UsageError(
            f"{type(block).__name__} is gathered as one, and its parameters have several types: "
            f"{', '.join(f'{names[p]} {dtype}' for dtype, p in types.items())}; "
            "let wrap=... name a block of each type, or use one"
        )
