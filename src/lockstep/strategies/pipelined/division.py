"""A model as the stages that a pipeline computes: cut by `partition`, or given as a list of stages."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import fx, nn

from lockstep.collectives import Group, StoredTensor
from lockstep.errors import SettingError, UsageError
from lockstep.formatting import plural
from lockstep.strategies.parts.initial_values import check_names, give_values
from lockstep.strategies.parts.module_states import sync_module_states
from lockstep.strategies.parts.stage_sequence import StageSequence
from lockstep.strategies.pipelined import partition
from lockstep.strategies.pipelined.pipelined_model import in_mode, keep_own_tensors
from lockstep.strategies.pipelined.stage import AutocastContext, StageModules

Sample = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of a micro-batch."""


@dataclass(frozen=True, slots=True)
class Division:
    """The stages of a model."""

    stage_of: Mapping[str, int]  #: of each parameter and buffer, by name
    #: what a stage computes, by its number; to be asked once the rank holds its own tensors only
    modules: Callable[[int], StageModules]
    words: str  #: where it is cut, for the user


def stage_ranks(schedule: str, ranks: int, stages: int) -> list[int]:
    """The rank of each stage: round and round, but there and back for ``zbv``.

    two ranks, four stages      interleaved 0 1 0 1      zbv 0 1 1 0
    """
    if schedule == "zbv":
        return [min(number, stages - 1 - number) for number in range(stages)]
    return [number % ranks for number in range(stages)]


def neighbours(given: int, wanted: int) -> list[range]:
    """Which of ``given`` stages make each of ``wanted``: neighbours, as equally many as can be.

    Raises:
        SettingError: if there are too few.
    """
    if given < wanted:
        raise SettingError(
            f"strategy pipeline: {plural(given, 'stage')} in run.model([...]), too few for {wanted}; start fewer "
            "ranks, or give more stages: neighbours are put together where there are fewer ranks"
        )
    starts = [0, *partition.balance([1.0] * given, wanted), given]
    return [range(first, end) for first, end in itertools.pairwise(starts)]


class _TensorsOfStages:
    """Which tensor is in which stage, of stages that are made one after the other; it keeps none of them alive."""

    def __init__(self) -> None:
        self._known: Final[dict[int, tuple[weakref.ref[torch.Tensor], int, str]]] = {}  # by the tensor's id

    def add(self, place: int, stage: nn.Module) -> None:
        """Note the tensors of ``stage``, the one at this ``place``, as they are now.

        Raises:
            SettingError: if one of them is in another stage, too.
        """
        for name, tensor in (*stage.named_parameters(), *stage.named_buffers()):
            reference, other, known_as = self._known.get(id(tensor), (None, place, name))
            if reference is not None and reference() is tensor and other != place:
                raise SettingError(
                    f"strategy pipeline: {place}.{name} and {other}.{known_as} are one tensor, of stages that "
                    "functions make one at a time: do not share weights between them, let one function make both "
                    "in one stage, or give run.model([...]) the stages as modules"
                )
            self._known[id(tensor)] = (weakref.ref(tensor), place, name)


def made_apart(
    makers: Sequence[Callable[[], nn.Module]],
    weights: Mapping[str, StoredTensor] | None,
    own: Container[int],
    group: Group,
) -> StageSequence:
    """The model of the stages that ``makers`` make, of which only this rank's ``own`` take memory. Collective.

    Its values are those of rank 0, or of ``weights``, by their names in the whole model. At most one stage that is not
    this rank's is in memory at a time.

    Raises:
        SettingError: for a stage that shares a tensor with one before it, which other ranks may have let go of.
        UsageError: if ``weights`` are of another model, or nothing gives a value to something on ``meta``.
    """
    stages, tensors = [], _TensorsOfStages()
    places = {str(place) for place in range(len(makers))}
    check_names(StageSequence.__name__, (), [name for name in weights or () if name.partition(".")[0] not in places])
    for place, make in enumerate(makers):
        stage = make()
        tensors.add(place, stage)
        try:
            give_values(stage, None if weights is None else _weights_of(place, weights))
        except UsageError as error:
            raise UsageError(f"stage {place} of run.model([...]): {error}") from error
        sync_module_states(group, stage)
        if place not in own:
            keep_own_tensors(stage, set(), group.device)
        tensors.add(place, stage)
        stages.append(stage)
    return StageSequence(stages)


def _weights_of(place: int, weights: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Those of the stage at ``place``, by their names in the stage."""
    prefix = f"{place}."
    return {name.removeprefix(prefix): stored for name, stored in weights.items() if name.startswith(prefix)}


def divide(
    model: nn.Module,
    wanted: int,
    cut: str,
    sample: Sample | None,
    *,
    group: Group,
    autocast: AutocastContext,
) -> Division:
    """The stages of ``model``; the same on all ranks. Collective.

    Args:
        model: to be traced, or given as stages.
        wanted: stages.
        cut: the first module of each stage but the first, joined by ``+``; "": balanced.
        sample: by whose times to balance; None: by parameters.
        group: all ranks.
        autocast: in which a sample is computed.

    Raises:
        SettingError: if it cannot be cut as was asked for.
    """
    if isinstance(model, StageSequence):
        if cut or sample is not None:
            raise SettingError(
                "strategy pipeline: cut=... and sample=... are for a model that is cut by torch.fx, and this one "
                "was given as stages; leave them out"
            )
        return of_given_stages(model, wanted)
    if not cut:
        return of_traced(model, balanced_cuts(model, wanted, group, sample, autocast))
    cuts = cut.split("+")
    if len(cuts) != wanted - 1:
        raise SettingError(
            f"strategy pipeline: cut={cut} makes {plural(len(cuts) + 1, 'stage')} of {wanted}; "
            f"name {plural(wanted - 1, 'module')}"
        )
    return of_traced(model, cuts)


def of_given_stages(model: StageSequence, wanted: int) -> Division:
    """The division of a model that was given as stages, into ``wanted`` of them.

    Raises:
        SettingError: if there are too few, or two stages share a tensor.
    """
    runs = neighbours(len(model.stages), wanted)
    stage_of_given = {str(place): number for number, run in enumerate(runs) for place in run}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    stage_of = {name: stage_of_given[name.partition(".")[0]] for name, _ in tensors}
    first: dict[int, str] = {}
    for name, tensor in tensors:
        other = first.setdefault(id(tensor), name)
        if stage_of[other] != stage_of[name]:
            raise SettingError(
                f"strategy pipeline: {name} and {other} are one tensor in stages {stage_of[name]} and "
                f"{stage_of[other]}, and each lies on one rank: do not share weights, or put both into one stage"
            )

    def modules(number: int) -> StageModules:
        computed = StageSequence(model.stages[runs[number].start : runs[number].stop])
        return StageModules(computed, computed, takes_inputs=number == 0)

    counts = ", ".join(str(len(run)) for run in runs)
    together = "" if len(model.stages) == wanted else f"; of the {len(model.stages)} given ones they have {counts}"
    return Division(stage_of, modules, f"{plural(wanted, 'stage')}, as given{together}")


def of_traced(model: nn.Module, cuts: Sequence[str]) -> Division:
    """The division of ``model`` before the first call of each module of ``cuts``, as torch.fx traces it.

    Raises:
        SettingError: if it cannot be cut so.
    """

    def stages() -> list[partition.Stage]:
        return partition.split_stages(partition.trace(model, cuts), cuts)

    modes = tuple(in_mode(model, training, stages) for training in (True, False))

    def modules(number: int) -> StageModules:
        training, evaluation = (fx.GraphModule(model, mode[number].graph) for mode in modes)
        return StageModules(training, evaluation, takes_inputs=True)

    words = f"{len(cuts) + 1} stages; cut before {', '.join(cuts)}"
    return Division(partition.stage_of_tensors(model, modes), modules, words)


def balanced_cuts(
    model: nn.Module,
    wanted: int,
    group: Group,
    sample: Sample | None,
    autocast: AutocastContext,
) -> list[str]:
    """The first module of each of ``wanted`` stages but the first; the same on all ranks. Collective.

    Args:
        model: is traced.
        wanted: stages.
        group: all ranks.
        sample: shape and type of a micro-batch by whose times to balance; None: by parameters.
        autocast: in which it is measured.

    Raises:
        SettingError: for a model of too few modules.
    """
    graph = in_mode(model, True, lambda: partition.trace(model))
    names = partition.called_modules(graph)
    if len(set(names)) < wanted:
        raise SettingError(
            f"strategy pipeline: {type(model).__name__} calls {len(set(names))} modules, too few for {wanted} "
            "stages; start fewer ranks, or name modules further inside with cut=..."
        )
    if sample is None:
        costs = partition.parameter_counts(model, graph)
    else:
        inputs = torch.zeros(sample[0], dtype=sample[1], device=group.device)
        with autocast.forward():
            costs = in_mode(model, True, lambda: partition.measured_times_s(model, graph, [inputs]))
    names, costs = partition.merge_repeated_calls(names, costs)
    indices = partition.balance(costs, wanted)
    # Ranks have measured different times.
    return group.broadcast_object([names[index] for index in indices], "the cut of the model")
