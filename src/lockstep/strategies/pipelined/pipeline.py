"""A model cut into stages, each on a rank of its own; micro-batches go through them one behind the other.

    two stages, micro-batches 0 1 2 3; F: forward, B: backward

    gpipe   rank 0   F0 F1 F2 F3 .. B0 B1 B2 B3          all forwards, then all backwards
            rank 1   .. F0 F1 F2 F3 B0 B1 B2 B3
    1f1b    rank 0   F0 F1 .. B0 F2 B1 F3 B2 .. B3       as few in flight as can be
            rank 1   .. F0 B0 F1 B1 F2 B2 F3 B3

    zero-bubble splits a backward pass in two, I: of inputs, which the stage before waits for, W: of weights, later

            rank 0   F0 F1 .. I0 W0 F2 I1 W1 F3 I2 W2 .. I3 W3
            rank 1   .. F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3

Ranks [0, stages) hold the first replica of the model, the next ones the second, and so on; each keeps only its stage's
parameters. All ranks of a replica are given the same micro-batches, so a model's inputs and a loss's targets need not
be sent; activations and their gradients are, by torch.distributed.pipelining, which also orders the work.

A micro-batch's gradient is that of the whole model, bit for bit, and is folded along the tree like any other. Random
numbers are those of one device, too: the state of the generators goes from stage to stage with the activations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from lockstep.batch import MicroBatchPosition
from lockstep.collectives import (
    AllReduce,
    Group,
    NativeAllReduce,
    ObjectChannel,
    ShardGroups,
    StoredTensor,
    open_all_reduce,
    translating_peer_errors,
)
from lockstep.errors import SettingError, UsageError
from lockstep.formatting import plural
from lockstep.strategies.not_whole.divided_construction import DividedConstruction
from lockstep.strategies.not_whole.partial_models import of_absent_parameters
from lockstep.strategies.parts.batchnorm import normalises_over_ranks
from lockstep.strategies.parts.buffers import Buffers
from lockstep.strategies.parts.gradient_accumulation import (
    LossCall,
    ParameterSet,
    Tensors,
    align_gradients,
    begin_total,
    divide_by_counts,
    gradient_like,
    negative_zeros_like,
)
from lockstep.strategies.parts.module_states import sync_module_states
from lockstep.strategies.parts.random_state import random_state, set_random_state
from lockstep.strategies.parts.sparse_gradients import refuse_sparse
from lockstep.strategies.parts.stage_sequence import StageSequence
from lockstep.strategies.parts.state_layout import OwnerLayout
from lockstep.strategies.pipelined.division import divide, made_apart, neighbours, stage_ranks
from lockstep.strategies.pipelined.pipelined_model import USE_RUN_STEP, keep_own_tensors, prepare_in_place
from lockstep.strategies.pipelined.random_states import RandomStates
from lockstep.strategies.pipelined.stage import (
    AutocastContext,
    Losses,
    Stage,
    StageInterface,
    StageMicroBatch,
    fold_passes,
    shapes_in,
)
from lockstep.strategies.replicated.single_process import SingleProcess
from lockstep.strategies.strategy import LossStrategy, ReplicaAssignment, Strategy, StrategyContext, UpdateShare
from lockstep.strategy_kinds import CHUNKS, PipelineOptions
from lockstep.torch_private import version_of

_SCHEDULES: Final[dict[str, Any]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}
#: Those that compute the gradients of inputs and of weights in passes of their own.
_SPLITTING: Final = ("zero-bubble", "zbv")
_KEPT = 8  #: schedules; each has memory for what its micro-batches receive


def open_strategy(context: StrategyContext, options: PipelineOptions) -> Strategy:
    """The strategy ``pipeline``; one rank alone needs none. Collective.

    Raises:
        SettingError: if the ranks cannot be divided into replicas of so many stages, or torch is older than 2.13.
    """
    ranks, stages = context.group.size, options.stages or context.group.size
    if ranks == 1 and options.stages <= 1:
        return SingleProcess(context.group, context.runs, exact=context.exact)
    if torch.__version__ < "2.13":  # what some models and schedules need is missing in torch.distributed.pipelining
        raise SettingError(f"strategy pipeline needs torch 2.13 or newer; this is {torch.__version__}: update torch")
    if stages == 1:
        raise SettingError("strategy pipeline: stages=1 cuts nothing; use ddp")
    if ranks % stages:
        raise SettingError(
            f"strategy pipeline: stages={stages} does not divide {plural(ranks, 'rank')} into replicas; start a "
            f"multiple of {stages} ranks, or give stages= a divisor of {ranks}"
        )
    return Pipeline(context, options, stages)


class Pipeline(LossStrategy):
    """The strategy ``pipeline``."""

    divides_construction = True
    forward_is_collective = True
    update_share = UpdateShare()

    def __init__(self, context: StrategyContext, options: PipelineOptions, ranks: int) -> None:
        group = context.group
        shard_groups = ShardGroups(group, ranks)
        replica, index = divmod(group.rank, ranks)
        self._rank_of: Final = stage_ranks(options.schedule, ranks, ranks * options.chunks_per_rank)  # of each stage
        # The rank of the last stage alone learns the losses, so what is measured counts there.
        self.assignment = ReplicaAssignment(replica, shard_groups.copies, counts=index == self._rank_of[-1])
        self._context: Final = context
        self._options: Final = options
        transport_device = torch.device("cpu") if group.over_cpu else group.device
        self._autocast: Final = AutocastContext(group.device, transport_device, context.dtype)
        self._replica_group: Final = shard_groups.within  # this replica's ranks
        # For what stages send. Over NCCL the world's own group is bound to its GPU and does all in one order: another
        # one has connections for each pair of ranks.
        self._between: Final = (
            self._replica_group.process_group
            if group.over_cpu
            else self._replica_group.new_process_group(backend=group.backend)
        )
        self._states: Final = RandomStates(self._replica_group, self._rank_of)
        self._stage_group: Final = shard_groups.across  # the ranks of the same stages
        self._channel: Final = ObjectChannel(self._replica_group)
        self._all_reduce: Final = open_all_reduce(self._stage_group, context.runs)
        self._reduction: Final = StageReduction(self._stage_group, self._all_reduce, exact=context.exact)
        self._layout: Final = OwnerLayout(group)
        self.state_layout = self._layout
        self._names: dict[nn.Parameter, str] = {}
        self._stages: list[Stage] = []
        # Buffers that are in none of them, each with its name and what counts its changes.
        self._unfollowed: list[tuple[str, torch.Tensor, int]] = []
        self._construction: Final = DividedConstruction(group, group)
        self._made: nn.Module | None = None  # a model that was made here, divided by rows or into stages
        self._find_unused = False
        self._queued: list[StageMicroBatch] = []
        self._schedules: dict[tuple[str, int, object], Any] = {}
        self._interfaces: dict[
            object, list[StageInterface]
        ] = {}  # behind each stage but the last, by the shapes of inputs

    # ---- the model ----------------------------------------------------------------------------------------------

    def setup_model(self, model: nn.Module, *, find_unused_parameters: bool, static_graph: bool = False) -> nn.Module:
        """``model`` itself, with rank 0's values; parameters of other ranks' stages take no memory here. Collective.

        Raises:
            SettingError: if it cannot be cut as was asked for.
            UsageError: for a second model.
        """
        if self._stages:
            raise UsageError("strategy=pipeline: run.model(...) was called twice, and it trains one model; use ddp")
        if normalises_over_ranks(model):
            raise SettingError("strategy=pipeline: SyncBatchNorm would wait for ranks of other stages; leave it out")
        refuse_sparse(model, "pipeline")
        self._find_unused = find_unused_parameters
        if model is not self._made:
            sync_module_states(self._context.group, model)
        sample = None
        if given := self._options.sample_shape():
            sample = given[0], getattr(torch, given[1])
            self._construction.restore(model.parameters())  # for they are computed
        wanted, cut = len(self._rank_of), self._options.cut
        division = divide(model, wanted, cut, sample, group=self._context.group, autocast=self._autocast)
        ranks, rank = self._replica_group.size, self._replica_group.rank
        rank_of = {name: self._rank_of[stage] for name, stage in division.stage_of.items()}
        own = {name for name, owner in rank_of.items() if owner == rank}
        keep_own_tensors(model, own, self._context.group.device, lambda one: self._construction.restore([one]))
        splits = self._options.schedule in _SPLITTING
        for number in (number for number, owner in enumerate(self._rank_of) if owner == rank):
            modules = division.modules(number)
            buffers = Buffers(self._all_reduce, self._stage_group)
            buffers.setup_model(modules.training)
            self._stages.append(
                Stage(
                    number,
                    len(self._rank_of),
                    modules,
                    lambda: model.training,
                    buffers,
                    self._states,
                    [p for n, p in model.named_parameters() if division.stage_of[n] == number and p.requires_grad],
                    self._autocast,
                    exact=self._context.exact,
                    splits_backward=splits,
                )
            )
        followed = {id(b) for stage in self._stages for b in stage.in_training.buffers()}
        self._unfollowed = [(n, b, version_of(b)) for n, b in model.named_buffers() if id(b) not in followed]
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        # The ranks of the same stages in each replica are as far apart as a replica has ranks.
        self._layout.setup_model(model, lambda name: range(rank_of.get(name, 0), self._context.group.size, ranks))
        self._context.say(f"pipeline: {division.words}")
        absent = [name for name, owner in rank_of.items() if owner != rank]
        prepare_in_place(model, self._evaluate, self._stages, absent, self._context.group.device)
        return model

    def construct(self, make: Callable[[], nn.Module]) -> nn.Module:
        """What ``make`` gives; of its parameters each rank holds rows, until `setup_model`. Collective.

        Raises:
            MismatchError: if ranks made different models.
        """
        self._made = model = self._construction.construct(make)
        return model

    def make_stages(
        self, makers: Sequence[Callable[[], nn.Module]], weights: Mapping[str, StoredTensor] | None
    ) -> StageSequence:
        """A model of the stages that ``makers`` make one after the other; this rank keeps its own. Collective.

        Its values are those that rank 0 draws, or reads. At most one stage that is another rank's is in memory at a
        time.

        Raises:
            SettingError: for a stage that shares a tensor with one before it.
            UsageError: if ``weights`` are of another model.
        """
        runs = zip(self._rank_of, neighbours(len(makers), len(self._rank_of)), strict=True)
        own = {place for rank, run in runs if rank == self._replica_group.rank for place in run}
        self._made = model = made_apart(makers, weights, own, self._context.group)
        return model

    def _evaluate(self, inputs: tuple[Any, ...]) -> object:
        """The model's output, on every rank of the replica. Collective for its ranks, with the same inputs."""
        device = self._context.group.device
        before = random_state(device)
        with torch.no_grad():
            output = self._forward_through_stages(inputs, before, {})
        set_random_state(before, device)  # the same on all of them
        return self._channel.broadcast(output, self._rank_of[-1])

    # ---- a step -------------------------------------------------------------------------------------------------

    def backward(
        self, loss: torch.Tensor, weight: torch.Tensor | None, target: ParameterSet, position: MicroBatchPosition
    ) -> None:
        """Refuse: a pipeline makes its forward passes itself.

        Raises:
            UsageError: always.
        """
        raise UsageError(USE_RUN_STEP)

    def compute(
        self, task: LossCall, weight: torch.Tensor | None, target: ParameterSet, position: MicroBatchPosition
    ) -> Sequence[tuple[int, torch.Tensor]]:
        """Queue a micro-batch; for a rank's last one of the step, compute all of them. Collective then.

        Returns:
            On the rank of the last stage, the losses of the step, each with the index of its micro-batch.
        """
        if position.is_padding and not position.last:
            return []
        device = self._context.group.device
        self._queued.append(StageMicroBatch(task, weight, position, random_state(device)))
        if not position.last:
            return []
        stage_micro_batches, self._queued = self._queued, []
        losses: Losses = []
        for stage in self._stages:
            stage.running_buffers.restore()  # forward passes without gradients, before the step, are not part of it
        with translating_peer_errors("the work of the pipeline"), self._autocast.backward():
            if position.is_padding:
                # Buffers that count forward passes must count one in each step, on all ranks.
                with torch.no_grad():
                    self._forward_through_stages(task.inputs, stage_micro_batches[0].random, {})
            else:
                self._run(stage_micro_batches, losses)
            self._states.finish()
            self._reduction.finish(self._stages, position, self._names, find_unused=self._find_unused)
        set_random_state(stage_micro_batches[-1].random, device)  # the same on all ranks of the replica
        return losses

    def _run(self, stage_micro_batches: Sequence[StageMicroBatch], losses: Losses) -> None:
        specs = [shapes_in(micro.task.inputs) for micro in stage_micro_batches]
        for like, micro in zip(specs, stage_micro_batches, strict=True):
            if like not in self._interfaces:
                self._interfaces[like] = self._find_interfaces(micro)
        for stage in self._stages:
            stage.begin_step(stage_micro_batches, losses)
        for part in schedule_runs(specs, self._options.schedule, self._replica_group.size):
            interfaces = [None, *self._interfaces[specs[part.first]], None]
            for stage in self._stages:
                around = (interfaces[stage.number], interfaces[stage.number + 1])
                stage.set_schedule_run(stage_micro_batches[part.first : part.first + part.length], around)
            schedule = self._schedule(part, specs[part.first], interfaces)
            indices = torch.arange(part.length, device="cpu")
            try:
                schedule.step(target=indices, index=indices, return_outputs=False)
            except RuntimeError as error:
                # Torch wraps what a module or the loss function raised.
                if isinstance(error.__cause__, Exception):
                    raise error.__cause__ from None
                raise

    def _schedule(self, part: ScheduleRun, like: object, interfaces: Sequence[StageInterface | None]) -> Any:
        """Torch's schedule for such a run; the last ones are kept."""
        key = (part.schedule, part.length, like)
        if key not in self._schedules:
            while len(self._schedules) >= _KEPT:
                self._schedules.pop(next(iter(self._schedules)))
            stages = []
            for stage in self._stages:
                before, behind = interfaces[stage.number], interfaces[stage.number + 1]
                stages.append(
                    PipelineStage(
                        stage,
                        stage.number,
                        stage.of,
                        self._autocast.transport_device,
                        input_args=before.examples() if before else (),
                        output_args=behind.examples() if behind else _LOSS,
                        group=self._between,
                    )
                )
                fold_passes(stages[-1], stage)
            _, most = CHUNKS[part.schedule]
            self._schedules[key] = _SCHEDULES[part.schedule](
                stages[0] if most == 1 else stages,
                part.length,
                loss_fn=lambda output, _: output,
                scale_grads=False,
            )
        return self._schedules[key]

    def _find_interfaces(self, micro: StageMicroBatch) -> list[StageInterface]:
        """The interfaces of all stages for micro-batches like this one, found by one more forward pass of it."""
        own_interfaces: dict[int, StageInterface] = {}
        with torch.enable_grad():
            self._forward_through_stages(micro.task.inputs, micro.random, own_interfaces)
        for stage in self._stages:
            stage.running_buffers.restore()
        found: dict[int, StageInterface] = {}
        for each in self._replica_group.gather_objects(own_interfaces, "interfaces of stages"):
            found |= each
        return [found[number] for number in sorted(found)]

    def _forward_through_stages(
        self, inputs: Sequence[object], random: torch.Tensor, interfaces: dict[int, StageInterface]
    ) -> Any:
        """Compute the stages one after the other; the output, on the last stage's rank, else None.

        The interfaces behind this rank's stages are put into ``interfaces``.
        """
        rank = self._replica_group.rank
        draws_random, output = False, None
        handed_over: Any = None  # from a stage to one on the same rank
        for stage in self._stages:
            into: Sequence[torch.Tensor] = ()
            if stage.number:
                source = self._rank_of[stage.number - 1]
                tensors, interface, state = handed_over if source == rank else self._channel.receive(source)
                random = torch.from_numpy(state)
                into = [t.requires_grad_(learns) for t, (*_, learns) in zip(tensors, interface.specs, strict=True)]
                draws_random = interface.draws_random
            output, after = stage.forward_once(inputs, into, random)
            if not stage.is_last:
                interface = interfaces[stage.number] = StageInterface.of(
                    output, draws_random or not torch.equal(after, random)
                )
                target = self._rank_of[stage.number + 1]
                state = after.numpy()  # not as a tensor, which would arrive on the device
                if target == rank:
                    handed_over = (tuple(tensor.detach() for tensor in output), interface, state)
                else:
                    self._channel.send((output, interface, state), target)
        return output if self._stages[-1].is_last else None

    def begin_count(self, counted: int) -> Callable[[], int]:
        """Begin to add up the items of all replicas. Collective."""
        return begin_total(self._stage_group, counted)

    def normalize_by_count(self, target: ParameterSet, samples: int, counted: int) -> None:
        """Divide by the number of items of the step."""
        divide_by_counts(target, samples, counted)

    def end_micro_batch(self, position: MicroBatchPosition) -> None:
        """After the last micro-batch, move the stages' buffers by the mean over the step. Collective then."""
        if position.last:
            for name, buffer, version in self._unfollowed:
                if version_of(buffer) != version:
                    raise UsageError(
                        f"the buffer {name} was changed by a stage whose forward pass does not use it, as where a hook "
                        "writes to a buffer of another module, which may lie on another rank: let the module that "
                        "changes it hold it (register_buffer), or use ddp or zero"
                    )
            with translating_peer_errors("the reduction of buffers"):
                for stage in self._stages:
                    stage.running_buffers.end_micro_batch(position)

    def explain(self, error: Exception, method: str) -> str:
        """Where torch speaks of a tensor that is on another rank."""
        return of_absent_parameters("pipeline", error, method)

    def end_replay(self) -> None:
        """No stage has computed anything: of a replay, what it would compute the loss of is compared."""

    def discard_step(self) -> None:
        """Forget queued micro-batches, and restore buffers."""
        self._queued.clear()
        self._states.discard()
        for stage in self._stages:
            stage.running_buffers.restore()

    def resync(self) -> None:
        """Start from the buffers that models hold."""
        self._unfollowed = [(name, buffer, version_of(buffer)) for name, buffer, _ in self._unfollowed]
        for stage in self._stages:
            stage.running_buffers.resync()

    def close(self) -> None:
        """End the threads and connections."""
        self._all_reduce.close()


_LOSS = torch.empty((), device="meta", requires_grad=True)


@dataclass(frozen=True, slots=True)
class ScheduleRun:
    """A run of one schedule: the micro-batches that go through it, which are neighbours."""

    schedule: str
    first: int  #: the index of its first micro-batch among the rank's
    length: int


def schedule_runs(specs: Sequence[object], schedule: str, ranks: int) -> list[ScheduleRun]:
    """How a rank's micro-batches of a step go through a replica of ``ranks`` ranks.

    A schedule takes micro-batches of one shape, so a short last one goes by itself. 1F1B needs as many micro-batches
    as ranks; with fewer it would be no other than GPipe. Interleaving and zero-bubble go in rounds of as many as ranks,
    or in one of fewer.

    Args:
        specs: one for each micro-batch; equal for equal shapes.
        schedule: gpipe, 1f1b, interleaved, zero-bubble or zbv.
        ranks: of one replica.
    """
    made: list[ScheduleRun] = []
    first = 0
    while first < len(specs):
        length = 1
        while first + length < len(specs) and specs[first + length] == specs[first]:
            length += 1
        if schedule in ("interleaved", "zero-bubble"):
            rest = length % ranks
            runs = ((first, length - rest), (first + length - rest, rest))
            made += [ScheduleRun(schedule, start, count) for start, count in runs if count]
        else:
            made.append(ScheduleRun("gpipe" if schedule == "1f1b" and length < ranks else schedule, first, length))
        first += length
    return made


class StageReduction:
    """Sums the gradients of the stages that this rank holds.

    Args:
        group: the ranks that hold the same stages, one in each replica.
        all_reduce: along the tree over micro-batches, among them.
        exact: whether gradients are summed along that tree.
    """

    def __init__(self, group: Group, all_reduce: AllReduce, *, exact: bool) -> None:
        self._group: Final = group
        self._all_reduce: Final = all_reduce
        self._native: Final = NativeAllReduce(group)
        self._exact: Final = exact

    def finish(
        self,
        stages: Sequence[Stage],
        position: MicroBatchPosition,
        names: Mapping[nn.Parameter, str],
        *,
        find_unused: bool,
    ) -> None:
        """Set ``.grad`` of the parameters of ``stages`` to the sum over the step. Collective.

        Args:
            stages: of this rank.
            position: of the rank's last micro-batch of the step.
            names: of the model's parameters.
            find_unused: whether forward passes may leave out parameters.

        Raises:
            UsageError: with the names of parameters that had no part in the loss, without ``find_unused``.
        """
        for stage in stages:
            trained = stage.trained
            if not trained:
                continue
            if self._exact:
                sums = [] if position.is_padding else stage.sums.finish(position.index + 1)
                used = set() if position.is_padding else stage.sums.used
            else:
                sums = [[negative_zeros_like(p) if p.grad is None else p.grad for p in trained]]
                used = {index for index, p in enumerate(trained) if p.grad is not None}
            if self._group.size > 1:
                if find_unused:
                    used = self._used_anywhere(used)
                else:
                    if not position.is_padding:
                        _check_all_used(stage, used, names)
                    used = set(range(len(trained)))
                total = self._sum_over_replicas(trained, sums, position)
            else:
                (total,) = sums
            for index, (parameter, gradient) in enumerate(zip(trained, total, strict=True)):
                parameter.grad = gradient if index in used else None
            align_gradients(parameter for parameter in trained if parameter.is_cuda)

    def _sum_over_replicas(
        self, parameters: Sequence[nn.Parameter], sums: Sequence[Tensors], position: MicroBatchPosition
    ) -> Tensors:
        """Add up, over all replicas, what each has summed for its nodes of the tree."""
        total: dict[int, torch.Tensor] = {}
        for dtype in dict.fromkeys(p.dtype for p in parameters):
            indices = [i for i, p in enumerate(parameters) if p.dtype == dtype]
            lengths = [parameters[i].numel() for i in indices]
            flats = [torch.cat([each[i].reshape(-1) for i in indices]) for each in sums]
            out = flats[-1] if flats else parameters[indices[0]].new_empty(sum(lengths))
            if self._exact:
                self._all_reduce.begin(out, flats, position.of)
                self._all_reduce.finish()
            else:
                self._native.begin(out)
                self._native.finish()
            pieces = zip(indices, out.split(lengths), strict=True)
            total |= {index: gradient_like(parameters[index], piece) for index, piece in pieces}
        return [total[index] for index in range(len(parameters))]

    def _used_anywhere(self, used: set[int]) -> set[int]:
        """The indices of the parameters that had a part in some loss on any rank. Collective."""
        return set().union(*self._group.gather_objects(used, "parameters that had a part in the loss"))


def _check_all_used(stage: Stage, used: set[int], names: Mapping[nn.Parameter, str]) -> None:
    """Check that every trained parameter of ``stage`` had a part in a loss of this rank.

    Raises:
        UsageError: with the names of those that had none.
    """
    unused = [names[p] for index, p in enumerate(stage.trained) if index not in used]
    if unused:
        raise UsageError(
            f"{len(unused)} of {plural(len(stage.trained), 'parameter')} of stage {stage.number} had no part in the "
            f"loss: {', '.join(unused[:5])}. Use them in forward(), freeze them with requires_grad_(False), or say "
            "run.model(model, find_unused_parameters=True), which costs a little in each step"
        )
