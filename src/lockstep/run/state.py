"""Everything that a checkpoint of a run holds, gathered and put back by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch
from torch import nn

from lockstep.checkpoint import SavedModel, SavedTree, StateTree
from lockstep.collectives import in_memory
from lockstep.errors import CheckpointError, UsageError
from lockstep.run.divergence import checksum
from lockstep.run.early_stopping import EarlyStopping
from lockstep.run.kept import PlainValue, Stateful, as_stateful, exposed
from lockstep.run.registered_scheduler import RegisteredScheduler
from lockstep.strategies import StateLayout, Strategy, sparse_parameters


class State:
    """The objects of a run: models, optimizers, schedulers, and what the user wants kept."""

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        # Of each, as they were when it was registered: a forward pass may leave gathered ones in place of divided ones.
        self.parameters: list[tuple[nn.Parameter, ...]] = []
        self.known_parameters: set[nn.Parameter] = set()  # of models, now or before
        self.learning: frozenset[nn.Parameter] = frozenset()  # those that learnt when their model was registered
        self.sparse: set[nn.Parameter] = set()  # those whose gradients are sparse
        self.buffers: list[tuple[str, torch.Tensor]] = []  # of all models, with their names
        self.optimizers: list[torch.optim.Optimizer] = []
        self.with_closure = False  #: whether the run's only optimizer computes losses through a closure
        self.schedulers: list[RegisteredScheduler] = []
        self.kept: dict[str, Stateful] = {}
        self.early_stopping: dict[str, EarlyStopping] = {}  # by metric
        self._transient: list[TransientBuffers] = []  # of each model
        self._kept_transient: dict[str, TransientBuffers] = {}  # of each kept module

    def add_model(self, model: nn.Module) -> None:
        """``model`` is trained."""
        self.models.append(model)
        self.parameters.append(tuple(model.parameters()))
        self.known_parameters.update(model.parameters())
        self.learning |= {p for p in model.parameters() if p.requires_grad}
        self.sparse |= sparse_parameters(model).keys()
        self.buffers += model.named_buffers()
        self._transient.append(TransientBuffers(model))

    def rescan(self) -> None:
        """Modules may have been replaced or added since: which parameters and buffers the models have now."""
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

    def keep(self, name: str, value: object) -> None:
        """Save ``value`` under ``name``.

        Raises:
            UsageError: if it cannot be saved, or the name is taken.
        """
        if name in self.kept:
            raise UsageError(f"keep({name}=...): something is kept under that name already; give it another")
        self.kept[name] = as_stateful(name, value)
        if isinstance(value, nn.Module):
            self._kept_transient[name] = TransientBuffers(value)

    def tree(self, layout: StateLayout) -> StateTree:
        """The state of every object, of models and optimizers as ``layout`` gives it. Collective where that is."""
        return {
            "models": [layout.model_state(m) for m in self.models],
            "about_models": [SavedModel.of(m).tree() for m in self.models],
            "learn": [{name: p.requires_grad for name, p in m.named_parameters()} for m in self.models],
            "transient": [buffers.state() for buffers in self._transient],
            "optimizers": [layout.optimizer_state(o) for o in self.optimizers],
            "schedulers": [s.scheduler.state_dict() for s in self.schedulers],
            "kept": {n: v.state_dict() for n, v in self.kept.items() if not isinstance(v, PlainValue)},
            "kept_values": {n: v.state_dict() for n, v in self.kept.items() if isinstance(v, PlainValue)},
            "kept_transient": {name: buffers.state() for name, buffers in self._kept_transient.items()},
        }

    def load_models(self, tree: SavedTree, strategy: Strategy) -> None:
        """Of `tree`, put back only what models hold: parameters and buffers. Collective.

        Raises:
            CheckpointError: if the script made other models than the one that saved.
        """
        _load_all("models", self.models, tree["models"], strategy.state_layout.load_model)

    def load(self, tree: SavedTree, strategy: Strategy) -> list[str]:
        """Put `tree` back. Collective.

        Returns:
            The parameters that learn, or do not, as they did when it was saved and not as the script has just said.

        Raises:
            CheckpointError: if the script made other objects than the one that saved, or one of them does not fit.
        """
        self.load_models(tree, strategy)
        _load_all("optimizers", self.optimizers, tree["optimizers"], strategy.state_layout.load_optimizer)
        # Of models and optimizers, a strategy reads what this rank needs; the rest is small.
        tree = in_memory({name: value for name, value in tree.items() if name not in ("models", "optimizers")})
        _load_all("schedulers", [s.scheduler for s in self.schedulers], tree["schedulers"], _load)
        kept = tree["kept"] | tree["kept_values"]
        if set(kept) != set(self.kept):
            raise CheckpointError(
                f"the checkpoint keeps {_names(kept)} and this script {_names(self.kept)}; "
                "call run.keep(...) for the same names before the training begins"
            )
        for name, value in self.kept.items():
            _load_one(f"keep({name}=...)", value, kept[name], _load)
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
        return changed


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


def _load(value: Stateful, state: Any) -> None:
    value.load_state_dict(state)


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


class TransientBuffers:
    """The buffers of ``module`` that are in no state_dict, those with ``persistent=False``.

    Most hold constants; a checkpoint takes those that have changed since the module was registered.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module: Final = module
        self._before: Final = {name: int(checksum(buffer)) for name, buffer in self._buffers().items()}

    def state(self) -> dict[str, torch.Tensor]:
        """Those that have changed, by name. Waits for the GPU."""
        now = self._buffers()
        return {name: b.detach() for name, b in now.items() if int(checksum(b)) != self._before.get(name)}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Put `state` back."""
        buffers = self._buffers()
        with torch.no_grad():
            for name, value in state.items():
                buffers[name].copy_(value)

    def _buffers(self) -> dict[str, torch.Tensor]:
        persistent = {id(tensor) for tensor in self._module.state_dict(keep_vars=True).values()}
        return {
            name: buffer
            for name, buffer in self._module.named_buffers()
            if id(buffer) not in persistent and not buffer.is_meta  # those of another rank's stage
        }
