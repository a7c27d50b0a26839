"""The content of a run's checkpoint, gathered from the parts of the run and restored to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import nn

from lockstep.checkpoint import SavedTree, StateTree
from lockstep.collectives import as_absent_shards, as_owned_shards, in_memory
from lockstep.errors import CheckpointError, UsageError
from lockstep.progress import Progress
from lockstep.run.checks.divergence import DivergenceCheck, numbers
from lockstep.run.loop.step_end import StepEnd
from lockstep.run.recovery.resume_point import tree_marks
from lockstep.run.setup.run_context import RunContext
from lockstep.strategies import LossStrategy, ServerStrategy, StatePart
from lockstep.strategy_kinds import split


class RunSnapshot:
    """The state of a whole run, equal for any number of ranks."""

    def __init__(self, context: RunContext) -> None:
        self._context: Final = context
        self._state: Final = context.state
        self._position: Final = context.position
        self._metrics: Final = context.metrics
        self._carried: Final = context.carried
        self._strategy_name: Final = split(context.settings.strategy)[0]
        self._divergence: Final = DivergenceCheck(context.group)
        self._marks_of_taken: object = None
        self._left: dict[str, object] = {}  # settings of modules as the last loop was left, until ranks compare them

    def take(self) -> StateTree:
        """The state to be saved, equal on all ranks. Collective.

        Raises:
            MismatchError: if ranks hold different values.
        """
        objects = self.objects()
        tree = objects | {
            **self._common(),
            "measures": self._metrics.train.state(self._context.group),
            "recent": self._metrics.recent.state(self._context.group) if self._context.settings.log_every else {},
            "carry": self._carried.state(),
            "is_left": self._position.step_end.is_left,
        }
        self._compare(tree)
        self._marks_of_taken = tree_marks(objects)
        return tree

    def changed_since_taken(self) -> bool:
        """Whether the script has changed the state since the last `take`, on any rank; False before any. Collective."""
        changed = self._marks_of_taken is not None and tree_marks(self.objects()) != self._marks_of_taken
        return any(self._context.group.gather_objects(changed, "whether there is something to save"))

    def take_own(self, part: StatePart) -> StateTree:
        """This rank's part of the state after a step, without measured values.

        Asks no other rank.
        """
        common = {**self._common(), "carry": self._carried.own_state(), "is_left": False}
        return self._state.tree(part.layout) | common

    def take_shared(self, part: StatePart) -> StateTree:
        """The result of `take_own`, if ranks with the same part number hold equal states.

        Raises:
            CheckpointError: if the script carries state, of which each rank has a part.
        """
        if self._carried.is_used:
            raise CheckpointError("what the script carries from step to step lies on all ranks, each with a part")
        return self.take_own(part)

    def _common(self) -> StateTree:
        """The state outside of objects, equal on all ranks."""
        position = self._position
        return {
            "strategy": (self._strategy_name, self._context.strategy.state_dict()),
            "progress": position.progress.as_dict(),
            "scaler": self._context.precision.state_dict(),
            "metrics": position.metrics,
            "measured_at": position.measured_at,
            "evaluations": position.evaluations_done,
            "passes": position.passes.as_dict(),
            "early_stopping": {name: one.state_dict() for name, one in self._state.early_stopping.items()},
            "ended": position.ended,
            "reports": position.reports,
            "best": position.best.as_dict(),
            "norms": self._metrics.norms_state(),
        }

    def compare_ranks(self, *, looked_at: bool = True) -> None:
        """Check that ranks hold equal values after a step, where the strategy keeps them equal. Collective.

        Args:
            looked_at: whether the bodies of the step were examined: then attributes of all modules are compared, too.

        Raises:
            MismatchError: if values differ.
            UsageError: if numbers have other formats than when the training began.
        """
        self._context.kernels.require_formats()
        if self._context.share.in_step and self._context.group.size > 1:
            self._compare(self.objects(), attributes_of_all=looked_at)

    def note_modules(self) -> None:
        """Note the settings of modules as a loop over micro-batches is left, to be compared later. Asks no other rank.

        The next pass or evaluation would set modes again.
        """
        if self._context.share.in_step and self._context.group.size > 1:
            modules = self._modules(attributes_of_all=False)
            self._left = {f"{name}, as the loop over run.train(...) was left,": v for name, v in modules.items()}

    def compare_models(self) -> None:
        """Check that models and kept modules are equal on all ranks before an evaluation, if ranks hold them whole.

        Between two steps the script may have changed a model on one rank, and the next step would hide the change.
        Collective.

        Raises:
            MismatchError: if they do not.
        """
        if self._compares_models:
            kept = {name: value for name, value in self._state.kept.items() if isinstance(value, nn.Module)}
            tree = {
                "models": [_tensors_of(model) for model in self._state.models],
                "kept": {name: _tensors_of(module) for name, module in kept.items()},
            }
            self._divergence.compare(tree, self._position.progress.step, modules=self._take_left())

    @property
    def _compares_models(self) -> bool:
        context = self._context
        part = context.strategy.state_part
        is_whole = context.strategy.can_update_trainable and (part is None or not part.divides_models)
        return context.share.in_step and context.group.size > 1 and is_whole

    def compare_called(self, called: Mapping[str, torch.Tensor]) -> None:
        """Check that other modules were equal on all ranks when an evaluation called them. Collective.

        Args:
            called: checksums of their tensors, by name.

        Raises:
            MismatchError: if they were not.
        """
        if self._compares_models:
            sums = dict(zip(called, numbers(list(called.values())), strict=True))
            inputs = {f"{name}, by which run.evaluate(...) is computed,": ("", value) for name, value in sums.items()}
            self._divergence.compare({}, self._position.progress.step, inputs=inputs)

    def restore(self, tree: SavedTree) -> list[str]:
        """Restore the state of a ``tree`` from `take`, but for the position; see `State.load`. Collective."""
        context = self._context
        changed = self._state.load(tree, context.strategy)
        saved_by, saved_state = tree.get("strategy", ("", {}))
        context.strategy.load_state_dict(in_memory(saved_state) if saved_by == self._strategy_name else {})
        tree = in_memory(
            {name: value for name, value in tree.items() if name not in ("models", "optimizers", "strategy")}
        )
        context.precision.load_state_dict(tree["scaler"])
        recent, leads = bool(context.settings.log_every), context.group.leads
        self._metrics.train.load(tree["measures"], here=leads)
        self._metrics.recent.load(tree["recent"] if recent else {}, here=leads)
        self._metrics.load_norms(tree.get("norms", {}))  # checkpoints of older versions have no norms
        self._carried.load(tree["carry"])
        self._position.metrics = dict(tree["metrics"])
        self._position.measured_at = dict(tree["measured_at"])
        self._position.best.load(tree["best"])
        self._position.reports = tree.get("reports", 0)  # checkpoints of older versions have no reports
        for name, one in self._state.early_stopping.items():
            if name in tree["early_stopping"]:
                one.load_state_dict(tree["early_stopping"][name])
        return changed

    def restore_position(self, tree: SavedTree) -> bool:
        """Restore the position, after `restore`; returns whether it is within a turn of the outer loop."""
        position = self._position
        position.progress = Progress.from_dict(tree["progress"])
        position.passes.load(tree["passes"])
        position.step_end = StepEnd.LEFT if tree["is_left"] else StepEnd.ENDED
        self.restore_evaluations(tree)
        # With more patience than the run that ended, this one goes on.
        position.ended = tree["ended"] and any(one.stopped for one in self._state.early_stopping.values())
        return position.within_turn and not position.ended

    def restore_evaluations(self, tree: SavedTree) -> None:
        """Restore the number of evaluations since the last step, without those that a resumed script repeats."""
        self._position.evaluations = self._position.evaluations_done = tree["evaluations"]

    def _compare(self, tree: StateTree, *, attributes_of_all: bool = False) -> None:
        self._context.kernels.require_formats()
        # Tensors in a module's attributes may depend on this rank's samples, such as the last samples.
        shared = {name: value for name, value in tree.items() if name != "attributes"}
        # Between two passes the script may change modules on one rank, such as to draw a picture.
        modules = self._modules(attributes_of_all=attributes_of_all) if self._metrics.inside == "train" else {}
        self._divergence.compare(
            shared,
            self._position.progress.step,
            modules=modules | self._take_left(),
            inputs=self._context.inputs.between_bodies() if self._context.share.in_step else {},
        )
        self._context.inputs.ranks_are_equal()

    def _modules(self, *, attributes_of_all: bool) -> dict[str, object]:
        """The settings of modules, by name, where they must be equal on all ranks."""
        strategy = self._context.strategy
        if not self._context.share.in_step or isinstance(strategy, ServerStrategy | LossStrategy):
            return {}
        return self._state.settings_of_modules(attributes_of_all=attributes_of_all)

    def _take_left(self) -> dict[str, object]:
        left, self._left = self._left, {}
        return left

    def objects(self) -> StateTree:
        """The state of models, optimizers, schedulers and kept objects. Collective."""
        context = self._context
        if self._state.attributes is not None:
            self._state.attributes.require_storable(context.strategy)
        tree = self._state.tree(context.strategy.state_layout)
        of_leader = ["attributes", "unregistered_schedulers"]
        if isinstance(context.strategy, ServerStrategy) or not context.share.in_step:
            # On server ranks, the script's own objects have not changed; on ranks that step separately, changes differ.
            # A checkpoint holds the leader's objects, not a mixture.
            of_leader += ["kept", "kept_values", "kept_transient", "transient"]
        if context.group.size > 1:
            kept = {name: tree[name] for name in of_leader}
            outline = context.group.broadcast_object(as_absent_shards(kept), "what is kept")
            tree |= as_owned_shards(kept) if context.group.leads else outline
        if isinstance(context.strategy, LossStrategy):
            moved = context.group.gather_objects([*tree["transient"][0]], "buffers that are in no state_dict")
            for name in sorted({name for names in moved for name in names}):
                raise UsageError(
                    f"strategy pipeline: forward passes move the buffer {name}, which has persistent=False, and only "
                    "the ranks of its stage know it; register it with persistent=True"
                )
        return tree


def _tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict((*module.named_parameters(), *module.named_buffers()))
