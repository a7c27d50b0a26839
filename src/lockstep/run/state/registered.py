"""Everything that a checkpoint of a run holds, gathered and put back by name.

Models of the script beside those of the run, whose buffers the loop's body moves, as BatchNorm of a teacher does:

a body in the loop of run.train     each rank moves them by its own micro-batches; a replay of one moves nothing
the same loop, in eval mode         to compute with what bodies have moved is refused: ranks hold different ones
run.evaluate, on several ranks      so it is there
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any, Final, cast

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from lockstep.checkpoint import SavedModel, SavedTree, StateTree
from lockstep.collectives import in_memory
from lockstep.errors import CheckpointError, UsageError
from lockstep.run.checks.divergence import checksum
from lockstep.run.metrics.early_stopping import EarlyStopping
from lockstep.run.source.reachable import find, is_plain, script_roots
from lockstep.run.state.attributes import RunAttributes, path_of
from lockstep.run.state.kept_variables import KeptVariables
from lockstep.run.state.registered_scheduler import RegisteredScheduler, UnregisteredSchedulers
from lockstep.run.state.training_modes import TrainingModes
from lockstep.run.state.user_values import PlainValue, Stateful, as_stateful, exposed
from lockstep.strategies import StateLayout, Strategy, sparse_parameters
from lockstep.torch_private import is_transformed

#: Of each optimizer, each added group: each parameter as the number of its model and its name there.
_Named = list[list[list[tuple[int, str]]]]


class State:
    """The objects of a run: models, optimizers, schedulers, and objects that the user keeps."""

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        # Of each model, from its registration: a forward pass may leave gathered parameters in place of divided ones.
        self.parameters: list[tuple[nn.Parameter, ...]] = []
        self.known_parameters: set[nn.Parameter] = set()  # of models, now or before
        self.learning: frozenset[nn.Parameter] = frozenset()  # trainable when their model was registered
        self.sparse: set[nn.Parameter] = set()  # parameters whose gradients are sparse
        self.buffers: list[tuple[str, torch.Tensor]] = []  # of all models, with their names
        self.optimizers: list[torch.optim.Optimizer] = []
        self.with_closure = False  #: whether the run's only optimizer computes losses through a closure
        self.schedulers: list[RegisteredScheduler] = []
        self.unregistered: Final = UnregisteredSchedulers()
        self.kept: dict[str, Stateful] = {}
        self.early_stopping: dict[str, EarlyStopping] = {}  # by metric
        self.sample_sources: list[object] = []  # data sets, and the functions that loaders were given with them
        self.tracker: object = None  # the script's own, which a thread of the run uses
        self.attributes: RunAttributes | None = None  # once the training has begun
        self._added_groups: _AddedGroups | None = None  # likewise
        self._dtypes: list[dict[str, torch.dtype]] = []  # of each model's parameters and buffers, by name
        self._names: list[set[str]] = []  # of each model's parameters when the training began
        self.modes: list[TrainingModes] = []  # of each model
        self.beside: Final = BesideModules(self.models, self.kept)
        self._kept_variables: Final = KeptVariables(self.kept)
        self._kept_modes: dict[str, TrainingModes] = {}  # of each kept module
        self._transient: list[TransientBuffers] = []  # of each model
        self._kept_transient: dict[str, TransientBuffers] = {}  # of each kept module

    def used_by_run(self) -> list[object]:
        """The objects that no snapshot of the script's objects puts back, since the run or its threads change them."""
        return [*self.models, *self.known_parameters, *self.optimizers, self.tracker]

    def add_model(self, model: nn.Module) -> None:
        """Add ``model``, which is trained."""
        self.models.append(model)
        self.parameters.append(tuple(model.parameters()))
        self.known_parameters.update(model.parameters())
        self.learning |= {p for p in model.parameters() if p.requires_grad}
        self.sparse |= sparse_parameters(model).keys()
        self.buffers += model.named_buffers()
        self._transient.append(TransientBuffers(model))
        self.modes.append(TrainingModes(model))
        self._dtypes.append(_dtypes(model))

    def transient_buffers(self) -> list[torch.Tensor]:
        """The buffers of models that are in no state_dict: most are constants, such as tables of positions."""
        return [buffer for each in self._transient for buffer in each.registered()]

    def require_same_dtypes(self) -> None:
        """Check that the dtypes of models are unchanged since their registration.

        Raises:
            UsageError: if a model was converted.
        """
        for model, dtypes in zip(self.models, self._dtypes, strict=True):
            for name, dtype in _dtypes(model).items():
                if dtypes.get(name, dtype) != dtype:
                    raise UsageError(
                        f"{name} of {type(model).__name__} was {dtypes[name]} when run.model(...) was called, and is "
                        f"{dtype} now: convert the model before, as in run.model(model.to({dtype}))"
                    )

    def require_same_names(self) -> None:
        """Check that the names of parameters are those from the beginning of the training.

        Raises:
            UsageError: if a name has changed, so that no resumed script could load the parameter.
        """
        for model, names in zip(self.models, self._names, strict=False):
            now = {name for name, _ in model.named_parameters()}
            if odd := sorted(now ^ names):
                raise UsageError(
                    f"{', '.join(odd[:3])} of {type(model).__name__} came or went since the training began, as where "
                    "weights are pruned or a part is added: a resumed script makes the model as it was at first, and "
                    "could not load the checkpoint. Do it before run.epochs(...), with values that change nothing "
                    "until then (a mask of ones, prune.identity); or train the parts one after another, each in a "
                    "run of its own"
                )

    def rescan(self) -> None:
        """Find the present parameters and buffers of the models, whose modules may have been replaced or added."""
        self.parameters = [tuple(model.parameters()) for model in self.models]
        self.known_parameters.update(p for parameters in self.parameters for p in parameters)
        self.sparse = {p for model in self.models for p in sparse_parameters(model)}
        self.buffers = [named for model in self.models for named in model.named_buffers()]

    def name_of(self, parameter: torch.Tensor) -> str:
        """The name of ``parameter`` in its model."""
        for model in self.models:
            for name, known in model.named_parameters():
                if known is parameter:
                    return name
        return f"a parameter of shape {tuple(parameter.shape)}"

    def numbered(self, name: str, optimizers: Sequence[torch.optim.Optimizer]) -> str:
        """``name`` for a value of the step of ``optimizers``, with the first optimizer's number unless all step."""
        return name if len(optimizers) == len(self.optimizers) else f"{name}_{self.optimizers.index(optimizers[0])}"

    def keep(self, name: str, value: object, frame: FrameType | None = None) -> None:
        """Save ``value`` under ``name``; the script is in ``frame`` or an outer frame.

        Raises:
            UsageError: if the value cannot be saved, or the name is taken.
        """
        if name in self.kept:
            raise UsageError(f"keep({name}=...): something is kept under that name already; give it another")
        self.kept[name] = as_stateful(name, value)
        if isinstance(value, nn.Module):
            self._kept_transient[name] = TransientBuffers(value)
            self._kept_modes[name] = TrainingModes(value)
        self._kept_variables.note(name, frame)

    def require_kept(self, frame: FrameType) -> None:
        """Check that the saved values are those that the script means to keep.

        Raises:
            UsageError: if a value cannot be saved, or the script's variable now holds another object.
        """
        for kept in self.kept.values():
            if isinstance(kept, PlainValue):
                kept.state_dict()
        self._kept_variables.require_bound(frame)

    def look_for_schedulers(self, frame: FrameType) -> None:
        """Find the schedulers that the script steps itself, seen from ``frame``, which called the run."""
        self.unregistered.look(frame, self.optimizers, [*(s.scheduler for s in self.schedulers), *self.kept.values()])

    def note_attributes(self, device: torch.device) -> None:
        """Note the attributes with which the training begins; attributes that change later are state."""
        kept = {name: value for name, value in self.kept.items() if isinstance(value, nn.Module)}
        self._names = [{name for name, _ in model.named_parameters()} for model in self.models]
        self.attributes = RunAttributes(self.models, kept, self.optimizers, device)
        self._added_groups = _AddedGroups(self.optimizers, self.models)

    def settings_of_modules(self, *, attributes_of_all: bool) -> dict[str, object]:
        """The settings of modules of models and kept modules, by name: training modes, and changed attributes.

        In modules that are not torch's own, a body may set attributes that depend on its samples. Such attributes are
        known only after bodies were examined: only then may ``attributes_of_all`` be true.
        """
        kept = {name: value for name, value in self.kept.items() if isinstance(value, nn.Module)}
        roots = {str(number): model for number, model in enumerate(self.models)} | kept
        found: dict[str, object] = {
            f"the training mode of {path_of(root, name)}": module.training
            for root, of_root in roots.items()
            for name, module in of_root.named_modules()
        }
        if self.attributes is not None:
            found |= self.attributes.plain(of_all=attributes_of_all)
        return found

    def tree(self, layout: StateLayout) -> StateTree:
        """The state of every object; of models and optimizers by ``layout``. Collective if ``layout`` is."""
        return {
            "models": [layout.model_state(m) for m in self.models],
            "about_models": [SavedModel.of(m).tree() for m in self.models],
            "learn": [{name: p.requires_grad for name, p in m.named_parameters()} for m in self.models],
            "transient": [buffers.state() for buffers in self._transient],
            "modes": [modes.state() for modes in self.modes],
            "optimizers": [layout.optimizer_state(o) for o in self.optimizers],
            "added_groups": [] if self._added_groups is None else self._added_groups.state(),
            "schedulers": [s.scheduler.state_dict() for s in self.schedulers],
            "unregistered_schedulers": self.unregistered.state(),
            "kept": {n: v.state_dict() for n, v in self.kept.items() if not isinstance(v, PlainValue)},
            "kept_values": {n: v.state_dict() for n, v in self.kept.items() if isinstance(v, PlainValue)},
            "kept_transient": {name: buffers.state() for name, buffers in self._kept_transient.items()},
            "attributes": {} if self.attributes is None else self.attributes.state(),
            "kept_modes": {name: modes.state() for name, modes in self._kept_modes.items()},
        }

    def load_models(self, tree: SavedTree, strategy: Strategy) -> None:
        """Restore only the parameters and buffers of models from a ``tree``, see `tree`. Collective.

        Raises:
            CheckpointError: if the script made other models than the script that saved.
        """
        _load_all("models", self.models, tree["models"], strategy.state_layout.load_model)

    def load(self, tree: SavedTree, strategy: Strategy) -> list[str]:
        """Restore all objects from a ``tree``, see `tree`. Collective.

        Returns:
            The parameters whose ``requires_grad``, and the modules whose training mode, differed between script and
            checkpoint; both now have the checkpoint's values.

        Raises:
            CheckpointError: if the script made other objects than the script that saved, or an object does not fit.
        """
        self.load_models(tree, strategy)
        if self._added_groups is not None:
            self._added_groups.load(tree.get("added_groups", []), tree["optimizers"])  # older checkpoints have none
        _load_all("optimizers", self.optimizers, tree["optimizers"], strategy.state_layout.load_optimizer)
        # Of models and optimizers, a strategy reads only this rank's part; other state is small.
        tree = in_memory({name: value for name, value in tree.items() if name not in ("models", "optimizers")})
        _load_all("schedulers", [s.scheduler for s in self.schedulers], tree["schedulers"], _load)
        self.unregistered.load(tree.get("unregistered_schedulers", {}))
        kept = tree["kept"] | tree["kept_values"]
        if set(kept) != set(self.kept):
            raise CheckpointError(
                f"the checkpoint keeps {_names(kept)} and this script {_names(self.kept)}; "
                "call run.keep(...) for the same names before the training begins"
            )
        for name, value in self.kept.items():
            _load_one(f"keep({name}=...)", value, kept[name], _load)
        self._kept_variables.restored()
        for buffers, state in zip(self._transient, tree["transient"], strict=True):
            buffers.load(state)
        for name, state in tree["kept_transient"].items():
            self._kept_transient[name].load(state)
        changed = []
        for model, learn in zip(self.models, tree["learn"], strict=True):
            for name, parameter in model.named_parameters():
                if parameter.requires_grad != learn.get(name, parameter.requires_grad):
                    parameter.requires_grad_(learn[name])
                    changed.append(name)
        for modes, saved in zip(self.modes, tree.get("modes", ()), strict=False):  # older checkpoints have none
            changed += modes.load(saved)
        for name, saved in tree.get("kept_modes", {}).items():
            changed += [f"keep({name}=...).{module}" for module in self._kept_modes[name].load(saved)]
        if self.attributes is not None:
            self.attributes.load(tree.get("attributes", {}))
        return changed


def _dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def _load_all(kind: str, here: list[Any], saved: list[Any], load: Callable[[Any, Any], None]) -> None:
    if len(here) != len(saved):
        raise CheckpointError(
            f"the checkpoint holds {len(saved)} {kind} and this script made {len(here)}; "
            "it must be resumed by the script that wrote it, or begin with --fresh"
        )
    for place, (value, state) in enumerate(zip(here, saved, strict=True)):
        _load_one(f"{kind[:-1]} {place}" if len(here) > 1 else kind[:-1], value, state, load)


def _load_one(what: str, value: Any, state: Any, load: Callable[[Any, Any], None]) -> None:
    try:
        load(value, state)
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"the {what} of the checkpoint does not fit this script's {type(exposed(value)).__name__}: {error}"
        ) from error


def _load(value: Stateful, state: object) -> None:
    value.load_state_dict(state)


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


class TransientBuffers:
    """The buffers of ``module`` with ``persistent=False``, which are in no state_dict.

    Most such buffers hold constants; a checkpoint holds those that have changed since the module was registered.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module: Final = module
        self._before: Final = {name: int(checksum(buffer)) for name, buffer in self._buffers().items()}

    def registered(self) -> list[torch.Tensor]:
        """The transient buffers from the module's registration; asks no other rank, unlike a ``state_dict()``."""
        return [buffer for name, buffer in self._module.named_buffers() if name in self._before]

    def state(self) -> dict[str, torch.Tensor]:
        """The changed transient buffers, by name. Waits for the GPU."""
        now = self._buffers()
        return {name: b.detach() for name, b in now.items() if int(checksum(b)) != self._before.get(name)}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore the buffers of `state`."""
        buffers = self._buffers()
        with torch.no_grad():
            for name, value in state.items():
                buffers[name].copy_(value)

    def _buffers(self) -> dict[str, torch.Tensor]:
        persistent = {id(tensor) for tensor in self._module.state_dict(keep_vars=True).values()}
        return {
            name: buffer
            for name, buffer in self._module.named_buffers()
            if id(buffer) not in persistent and not buffer.is_meta  # not those of another rank's stage
        }


class BesideModules:
    """Of one run.

    Args:
        models: of the run.
        kept: of the script.
    """

    def __init__(self, models: Collection[nn.Module], kept: Mapping[str, Stateful]) -> None:
        self._models: Final = models
        self._kept: Final = kept
        # Buffers, and what they held before replays; None: there was no replay.
        self._before: list[tuple[str, nn.Module, torch.Tensor, torch.Tensor]] | None = None
        self._moved: Final[dict[nn.Module, str]] = {}  # with the name of a buffer
        self._hook: RemovableHandle | None = None  # within the loop, once a body has moved some

    def begin_replay(self) -> None:
        """A replay is about to be handed out: what buffers hold of modules within reach of the script."""
        self._watch()
        if self._before is not None:
            return
        self._before = [
            (f"{path}.{name}.{buffer_name}".replace("..", "."), module, buffer, buffer.clone())
            for path, name, module in self._within_reach()
            for buffer_name, buffer in module.named_buffers(recurse=False)
        ]

    def end_replays(self) -> None:
        """Something else is about to be handed out: what replays have moved is put back, if there were some."""
        before, self._before = self._before, None
        for name, module, buffer, value in before or ():
            if not torch.equal(buffer, value):
                buffer.copy_(value)
                self._moved[module] = name
        self._watch()

    def _watch(self) -> None:
        """From now on the body computes nothing with what it has moved."""
        if self._moved and self._hook is None:
            refuse = partial(self._refuse, where="eval mode in the loop of run.train(...)")
            self._hook = register_module_forward_pre_hook(refuse)

    def forget(self) -> None:
        """The loop is left, in a replay perhaps: what its body has moved stays, as it was moved once."""
        self._before = []
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    @contextlib.contextmanager
    def evaluating(self, ranks: int) -> Iterator[None]:
        """A context for an evaluation on so many ``ranks``.

        Raises:
            UsageError: if a module is called there whose buffers differ between ranks.
        """
        with register_module_forward_pre_hook(self._refuse) if self._moved and ranks > 1 else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def noting(self, called: dict[str, torch.Tensor]) -> Iterator[None]:
        """A context that adds, by name, checksums of the parameters of modules that are called there, when they are.

        Only of those that hold their values themselves; not of buffers, in which a metric may count. Queues its work on
        the device, and does not wait.
        """
        known, names = self._known(), dict[nn.Module, str]()

        def note(module: nn.Module, _inputs: object) -> None:
            if module in known:
                return
            known.add(module)
            held = list(module.named_parameters(recurse=False))
            if held and not names:
                names.update((module, f"{path}.{name}".strip(".")) for path, name, module in self._within_reach())
            whose = names.get(module, type(module).__name__)
            own = ((name, tensor) for name, tensor in held if is_plain(tensor) and not is_transformed(tensor))
            called.update((f"{whose}.{name}", checksum(tensor)) for name, tensor in own)

        with register_module_forward_pre_hook(note):
            yield

    def _known(self) -> set[nn.Module]:
        kept = (value for value in self._kept.values() if isinstance(value, nn.Module))
        return {module for root in (*self._models, *kept) for module in root.modules()}

    def _within_reach(self) -> Iterator[tuple[str, str, nn.Module]]:
        known = self._known()
        for path, root in find(script_roots(sys._getframe()), nn.Module).items():
            if isinstance(root, nn.Module) and root not in known:
                yield from ((path, name, module) for name, module in root.named_modules() if module not in known)

    def _refuse(self, module: nn.Module, _inputs: object, where: str = "run.evaluate(...)") -> None:
        name = self._moved.get(module)
        if name is not None and not module.training:
            model = name.partition(".")[0]
            raise UsageError(
                f"{model} is computed in {where}, and forward passes in the loop of run.train(...) have "
                f"moved {name}: on each rank by its own micro-batches, so that ranks hold different values. Give it to "
                f"run.model({model}), which keeps buffers alike on all ranks and in checkpoints; or call "
                f"{model}.eval() before the loop, if these are not to move"
            )


class _AddedGroups:
    """The parameter groups of ``optimizers`` that were not there as the training began.

    A resume makes them again before it loads the optimizer's state, for the lines that added them may not run again:

        if epoch == 1: optimizer.add_param_group({"params": model.head.parameters()})      resumed in epoch 3

    Args:
        optimizers: of the run, as the training begins.
        models: of the run, which have the parameters.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], models: Sequence[nn.Module]) -> None:
        self._optimizers: Final = optimizers
        self._models: Final = models
        self._began: Final = [len(optimizer.param_groups) for optimizer in optimizers]

    def state(self) -> _Named:
        """The added groups, as plain values."""
        added = [o.param_groups[count:] for o, count in zip(self._optimizers, self._began, strict=True)]
        if not any(added):
            return []
        models = enumerate(self._models)
        names = {id(p): (number, name) for number, model in models for name, p in model.named_parameters()}
        # A parameter of no model is refused before a step.
        return [[[names[id(p)] for p in group["params"] if id(p) in names] for group in groups] for groups in added]

    def load(self, added: _Named, states: Sequence[Mapping[str, Any]]) -> None:
        """Make the groups of ``added`` that an optimizer lacks, with the options that its state has in ``states``."""
        for optimizer, groups, state in zip(self._optimizers, added, states, strict=False):
            missing = min(len(state["param_groups"]) - len(optimizer.param_groups), len(groups))
            if missing <= 0:
                continue
            made = [[self._parameter(*each) for each in names] for names in groups[-missing:]]
            for parameters, options in zip(made, state["param_groups"][-missing:], strict=True):
                optimizer.add_param_group({**options, "params": parameters})
            _let_repeat(optimizer, made)

    def _parameter(self, number: int, name: str) -> nn.Parameter:
        return self._models[number].get_parameter(name)


def _let_repeat(optimizer: torch.optim.Optimizer, made: Sequence[Sequence[nn.Parameter]]) -> None:
    """Let the script add once more groups that a resume has ``made``: what the script gives is there already."""
    add: Callable[[dict[str, Any]], None] = optimizer.add_param_group
    known = [{id(p) for p in parameters} for parameters in made]

    def add_param_group(group: dict[str, Any]) -> None:
        given = group["params"]
        parameters = [given] if isinstance(given, torch.Tensor) else list(given)
        if {id(p[1] if isinstance(p, tuple) else p) for p in parameters} not in known:
            add({**group, "params": parameters})

    cast(Any, optimizer).add_param_group = add_param_group
