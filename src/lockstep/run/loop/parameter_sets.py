"""Which parameters each set of optimizers updates, followed while layers are frozen, unfrozen, replaced and added."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from typing import Final

import torch
from torch import nn

from lockstep.collectives import Group
from lockstep.errors import MismatchError, UsageError
from lockstep.formatting import plural, some_of
from lockstep.run.checks.divergence import checksum
from lockstep.run.state.registered import State
from lockstep.strategies import ParameterSet, Strategy, parameters_of

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


_Learning = tuple[str, tuple[int, ...], int | None]
"""A trainable parameter: its name, its shape, and a checksum of new ones."""


class ParameterSets:
    """The parameter sets of a run: one for each combination of optimizers that the script has named."""

    def __init__(self, group: Group, strategy: Strategy, state: State, strategy_name: str) -> None:
        self._group: Final = group
        self._strategy: Final = strategy
        self._strategy_name: Final = strategy_name
        self._state: Final = state
        self._by_optimizers: Final[dict[tuple[int, ...], ParameterSet]] = {}
        self._to_check: set[tuple[int, ...]] = set()  # keys of sets to be made again

    def named(self, optimizer: Optimizers) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizers that the script means by ``optimizer``.

        Raises:
            UsageError: if ``optimizer`` is none of the run's, or is None and the run has several or no optimizers.
        """
        known = self._state.optimizers
        if optimizer is None:
            if len(known) != 1:
                raise UsageError(
                    f"the run has {len(known)} optimizers; "
                    + (
                        "say run.step(loss, optimizer=...): the one that this loss trains, or a list [first, second]"
                        if known
                        else "call run.optimizer(optimizer) first"
                    )
                )
            return (known[0],)
        named = (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer)
        if not all(any(o is k for k in known) for o in named):
            raise UsageError("step(optimizer=...): give what run.optimizer(...) returned")
        return named

    def describe(self, target: ParameterSet) -> str:
        """The optimizers of ``target``, described in words that are equal on all ranks."""
        for key, known in self._by_optimizers.items():
            if known is target:
                return " and ".join(
                    f"optimizer {number} ({type(optimizer).__name__})"
                    for number, optimizer in enumerate(self._state.optimizers)
                    if id(optimizer) in key
                )
        raise AssertionError("no set of this run")

    def new_pass(self) -> None:
        """Have all sets checked before the first micro-batch of a pass: modules may have been replaced or added."""
        if self._strategy.can_update_trainable:
            self._state.rescan()
            self._to_check = set(self._by_optimizers)

    def known(self, optimizers: tuple[torch.optim.Optimizer, ...]) -> ParameterSet | None:
        """The set of ``optimizers`` that `current` returned last; None: `current` was not called for them yet."""
        return self._by_optimizers.get(tuple(map(id, optimizers)))

    def name_of_loss(self, target: ParameterSet) -> str:
        """The name of the metric of a loss for ``target``: ``loss``, or with the numbers of its optimizers.

        Numbers are given if ``target`` has not all parameters; optimizers are numbered from 0 in the order of
        `Run.optimizer`: ``loss_0``, ``loss_1``.
        """
        if target.everything:
            return "loss"
        key = next(key for key, known in self._by_optimizers.items() if known is target)
        return "_".join(["loss", *(str(n) for n, known in enumerate(self._state.optimizers) if id(known) in key)])

    def current(
        self, optimizers: tuple[torch.optim.Optimizer, ...], in_step: Collection[ParameterSet], step: int
    ) -> ParameterSet:
        """The parameters of ``optimizers`` that are trainable now. Collective where trainable parameters have changed.

        Args:
            optimizers: as `named` gives them.
            in_step: sets that have a loss already in this step, and must stay as they are.
            step: steps done.

        Raises:
            UsageError: if the trainable parameters have changed within a step, or cannot change under this strategy.
            MismatchError: if ranks have different trainable parameters.
        """
        key = tuple(map(id, optimizers))
        target = self._by_optimizers.get(key)
        if target is not None and key not in self._to_check and _is_current(target, optimizers):
            return target
        self._to_check.discard(key)
        found = self._make(optimizers)
        before = self._state.learning if target is None else frozenset(target.parameters)
        inside = {p for parameters in self._state.parameters for p in parameters}
        # A parameter that is in no model any more, as where weights were tied, will get no gradient.
        if not before <= inside or before.intersection(found.candidates) != set(found.parameters):
            if target in in_step:
                raise UsageError(
                    "the trainable parameters have changed between two micro-batches of a step, so ranks would differ: "
                    "freeze, unfreeze and add the same parameters in each micro-batch of a step, or where "
                    "run.step(loss) has returned True"
                )
            self._follow(found, before, step)
        self._by_optimizers[key] = found
        return found

    def _follow(self, now: ParameterSet, before: frozenset[nn.Parameter], step: int) -> None:
        """Train other parameters from this step on than ``before``. Collective."""
        if not self._strategy.can_update_trainable:
            # Raised without asking the other ranks: they may be servers, which have no loop body.
            raise UsageError(
                f"other parameters learn than when run.model(...) was called, and strategy "
                f"{self._strategy_name} divides a model as it is then: freeze, unfreeze and add parameters before "
                "run.model(...), or use ddp or zero"
            )
        self._require_same(
            [
                (self._state.name_of(p), tuple(p.shape), None if p in before else int(checksum(p)))
                for p in now.parameters
            ],
            step,
        )
        self._strategy.update_trainable(now)

    def compare(self, step: int) -> None:
        """Check before a pass that all ranks train the same parameters, else some would wait for others. Collective.

        Raises:
            MismatchError: if not.
        """
        if not self._strategy.can_update_trainable or self._group.size == 1:
            return
        named = (one for model in self._state.models for one in model.named_parameters())
        own: list[_Learning] = [(name, tuple(p.shape), None) for name, p in named if p.requires_grad]
        if len(set(self._group.gather_objects(zlib.crc32(repr(own).encode()), "which parameters learn"))) > 1:
            self._require_same(own, step)

    def _require_same(self, own: list[_Learning], step: int) -> None:
        for rank, theirs in enumerate(self._group.gather_objects(own, "which parameters learn")):
            odd = sorted({name for name, *_ in set(own) ^ set(theirs)})
            if odd:
                raise MismatchError(
                    f"the trainable parameters have changed before step {step + 1}, and not in the same way on all "
                    f"ranks: {some_of(odd, 1)} of rank {rank} differ from "
                    f"those of rank {self._group.rank}. Freeze, unfreeze and add the same on all ranks, and make new "
                    "parameters outside of the loop over micro-batches, where all ranks draw the same random numbers. "
                    "What decides about it is the same on all ranks if it comes from run.metrics, or from run.sum(...)"
                )

    def _make(self, optimizers: tuple[torch.optim.Optimizer, ...]) -> ParameterSet:
        """The parameter set of ``optimizers``: the parameters that may be trained, and those that are trainable now."""
        held = [p for optimizer in optimizers for p in parameters_of(optimizer)]
        everything = len(optimizers) == len(self._state.optimizers)
        if self._strategy.can_update_trainable and not self._state.known_parameters.issuperset(held):
            self._state.rescan()
        models = self._state.parameters
        strangers = [p for p in held if p.requires_grad and p not in self._state.known_parameters]
        if strangers:
            raise UsageError(
                f"{len(strangers)} of {plural(len(held), 'parameter')} that are to learn belong to no model of this "
                f"run, the first of shape {tuple(strangers[0].shape)}: make them part of what run.model(...) was given"
            )
        inside = dict.fromkeys(p for parameters in models for p in parameters)
        candidates = [*inside] if everything else [p for p in held if p in inside]
        if not everything:
            held_set = set(held)
            for model, parameters in zip(self._state.models, models, strict=True):
                held_here = [p in held_set for p in parameters if p.requires_grad]
                if any(held_here) and not all(held_here):
                    raise UsageError(
                        f"{type(model).__name__} is shared by optimizers that step apart; give each a model of its "
                        "own, or let them share the backward pass: run.step(loss, optimizer=[first, second])"
                    )
        learn = [p.requires_grad for p in candidates]
        learning = tuple(p for p, learns in zip(candidates, learn, strict=True) if learns)
        return ParameterSet(
            learning,
            everything=everything,
            sparse=frozenset(p for p in learning if p in self._state.sparse),
            candidates=tuple(candidates),
            learn=learn,
            held=len(held),
        )


def _is_current(target: ParameterSet, optimizers: tuple[torch.optim.Optimizer, ...]) -> bool:
    """Whether ``target`` still has the parameters that ``optimizers`` hold, and the trainable ones among them."""
    held = sum([len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups])
    return held == target.held and target.learn == [p.requires_grad for p in target.candidates]
