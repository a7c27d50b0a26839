"""Plain attributes of modules and optimizers that change in training and are in no state_dict.

model.dropout.p *= 0.5          between two epochs, by the script     in the checkpoint, by its name
self.t += 1                     in an optimizer's step()              in the checkpoint, by its name
self.aux = loss                 in a forward pass                     computed anew in each body: not state
self.config.depth = 3           within another object                 not seen

An attribute is stored if its value differs from that at the beginning of the training and a checkpoint can hold it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from lockstep.checkpoint import SavedTree, StateTree
from lockstep.errors import UsageError
from lockstep.nested import leaves, map_leaves
from lockstep.run.source.reachable import mark_of
from lockstep.run.state.user_values import restored
from lockstep.strategies import LossStrategy, ReplicatedLayout, ServerStrategy, Strategy

_LARGEST_BYTES: Final = 1 << 20  # of a module's tensor: larger tensors are caches, or belong into a buffer
_DEPTH: Final = 4  # of lists within lists
_MOST_ITEMS: Final = 2000
_PLAIN: Final = (bool, int, float, str, bytes, type(None))
_HOLDERS: Final = (list, tuple, dict)
_OF_MODULES: Final = frozenset(vars(nn.Module()))  # hooks, parts and the mode, which are elsewhere

Values = dict[str, Any]


class Attributes:
    """The attributes of a module or optimizer.

    Args:
        owner: the object.
        is_module: whether it is a module, not an optimizer.
    """

    def __init__(self, owner: object, *, is_module: bool) -> None:
        self._owner: Final = owner
        self._is_module: Final = is_module
        self._other: Final = _OF_MODULES if is_module else _of_optimizers()
        self._first: Final = self.marks()
        self._plain_first: Final = {n: v for n, v in self._values() if type(v) in _PLAIN}
        self.kind: Final = type(owner).__name__
        self.is_torchs: Final = is_module and type(owner).__module__.startswith("torch.nn.modules.")
        self._of_bodies: set[str] = set()  # attributes that the loop's body sets before its step

    def marks(self) -> Values:
        """Marks of all attributes, by name; a mark differs if its attribute changes. Waits for no GPU."""
        return {name: mark for name, value in self._values() if (mark := _mark(value, _DEPTH)) is not None}

    def note_of_body(self, before: Values) -> None:
        """Note attributes that differ from ``before``: the body changes them before its step, so they are no state."""
        now = self.marks()
        changed = {name for name in now.keys() | before.keys() if now.get(name) != before.get(name)}
        # The forward passes of torch's own modules set no attributes: any change is the script's.
        self._of_bodies |= {name for name in changed if not (self.is_torchs and type(self._of(name)) in _PLAIN)}

    def _of(self, name: str) -> object:
        return vars(self._owner).get(name)

    def changed(self) -> Values:
        """The attributes that have changed since the training began, by name."""
        now = self.marks()
        return {
            name: value
            for name, value in self._values()
            if name in now and now[name] != self._first.get(name) and name not in self._of_bodies
        }

    def require_as_traced(self) -> None:
        """Check that the numbers in the forward pass are those with which the pass was traced.

        Raises:
            UsageError: if a number has changed.
        """
        for name, value in self.changed().items():
            if type(value) in _PLAIN:
                raise UsageError(
                    f"{self.kind}.{name} has become {value!r} since the training began, and strategy pipeline has "
                    f"traced {self.kind}.forward with the value that it had then. Give it to a module within "
                    f"{self.kind} that uses it in a forward of its own, as nn.Dropout uses p"
                )

    def state(self) -> Values:
        """The changed attributes for a checkpoint; empty if a checkpoint cannot hold one of them.

        A module with such an attribute has a cache, of which a part would be worse than nothing.
        """
        changed = self.changed()
        limit = _LARGEST_BYTES if self._is_module else None
        return changed if all(is_storable(value, limit) for value in changed.values()) else {}

    def load(self, state: Mapping[str, object], device: torch.device) -> None:
        """Set the attributes in ``state``, and reset other numbers to their values as the training began."""
        held = vars(self._owner)
        for name, value in self._plain_first.items():
            if name in held and name not in state and name not in self._of_bodies and type(held[name]) in _PLAIN:
                held[name] = value
        for name, value in state.items():
            moved = map_leaves(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, value)
            held[name] = restored(held.get(name), moved)

    def _values(self) -> Iterator[tuple[str, object]]:
        return ((name, value) for name, value in vars(self._owner).items() if name not in self._other)


class RunAttributes:
    """The attributes of all models, kept modules and optimizers of a run, from the beginning of the training."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        kept: Mapping[str, nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        device: torch.device,
    ) -> None:
        self._device: Final = device
        roots = {str(place): model for place, model in enumerate(models)} | dict(kept)
        modules = {f"{root}:{name}": m for root, model in roots.items() for name, m in model.named_modules()}
        self._modules: Final = {name: Attributes(module, is_module=True) for name, module in modules.items()}
        self._optimizers: Final = {
            str(place): Attributes(optimizer, is_module=False)
            for place, optimizer in enumerate(optimizers)
            # An optimizer with its own state_dict method defines its state itself.
            if type(optimizer).state_dict is torch.optim.Optimizer.state_dict
        }
        self._before_body: list[Values] | None = None

    def begin_body(self) -> None:
        """Begin a body whose changes are examined."""
        self._before_body = [attributes.marks() for attributes in self._modules.values()]

    def end_of_body(self) -> None:
        """End the examination, as the body has come to its step."""
        before, self._before_body = self._before_body, None
        for attributes, was in zip(self._modules.values(), before or (), strict=False):
            attributes.note_of_body(was)

    def state(self) -> StateTree:
        """The attributes for a checkpoint, which may differ between ranks that hold different parts of a model."""
        return {
            kind: {name: values for name, one in of_kind.items() if (values := one.state())}
            for kind, of_kind in (("modules", self._modules), ("optimizers", self._optimizers))
        }

    def plain(self, *, of_all: bool) -> dict[str, object]:
        """The plain values among the changed attributes of torch's own modules, or ``of_all`` modules, by name."""
        return {
            f"{path_of(*name.split(':'))}.{attribute}": value
            for name, one in self._modules.items()
            if of_all or one.is_torchs
            for attribute, value in one.changed().items()
            if type(value) in _PLAIN
        }

    def load(self, state: SavedTree) -> None:
        """Restore the attributes of `state`."""
        for kind, of_kind in (("modules", self._modules), ("optimizers", self._optimizers)):
            for name, one in of_kind.items():
                one.load(state.get(kind, {}).get(name, {}), self._device)

    def require_storable(self, strategy: Strategy) -> None:
        """Check that a checkpoint can hold changed attributes of optimizers, and that a pipeline needs none of modules.

        Raises:
            UsageError: if not.
        """
        whole, served = isinstance(strategy.state_layout, ReplicatedLayout), isinstance(strategy, ServerStrategy)
        for attributes in self._optimizers.values():
            for name, value in attributes.changed().items():
                if why := _why_not_saved(value, whole=whole, served=served):
                    raise UsageError(
                        f"{attributes.kind}.{name} has changed since the training began, and {why}: a resumed run "
                        "would begin it again. Keep what belongs to a parameter p in self.state[p], and numbers in "
                        "self.param_groups, as torch's optimizers do: that is saved"
                    )
        if isinstance(strategy, LossStrategy):
            for root in (one for name, one in self._modules.items() if name.endswith(":")):
                root.require_as_traced()


def path_of(root: str, name: str) -> str:
    """The user's name of module ``name`` within the model number ``root``, or within the module kept as ``root``."""
    return f"{f'models.{root}' if root.isdigit() else f'keep({root}=...)'}{'.' * bool(name)}{name}"


def _why_not_saved(value: object, *, whole: bool, served: bool) -> str:
    if not is_storable(value):
        return f"is a {type(value).__name__} that cannot be saved"
    if served:
        return "under this strategy not on the rank that saves it"
    if not whole and any(isinstance(leaf, torch.Tensor) for _, leaf in leaves(value)):
        return "holds tensors, of which each rank has others under this strategy"
    return ""


def is_storable(value: object, limit_bytes: int | None = None) -> bool:
    """Whether a checkpoint can hold ``value``: numbers, text, plain tensors up to the limit, and lists of them."""
    if type(value) in _HOLDERS:
        parts = value.values() if isinstance(value, dict) else value
        keys: Collection[object] = value.keys() if isinstance(value, dict) else ()
        return all(type(key) in (str, int) for key in keys) and all(is_storable(v, limit_bytes) for v in parts)  # type: ignore[attr-defined]
    if isinstance(value, torch.Tensor):
        is_plain = value.layout is torch.strided and not value.is_nested and not hasattr(value, "to_local")
        fits = limit_bytes is None or value.numel() * value.element_size() <= limit_bytes
        return is_plain and fits and not value.requires_grad and not value.is_meta
    return type(value) in _PLAIN or isinstance(value, np.number | np.bool_)


def _mark(value: object, depth: int) -> object:
    """A mark that differs if ``value`` changes; None for an object that is not examined."""
    if type(value) in _HOLDERS:
        if not depth or len(value) > _MOST_ITEMS:  # type: ignore[arg-type]
            return None
        items = value.items() if isinstance(value, dict) else enumerate(value)  # type: ignore[arg-type]
        return type(value), [(key if type(key) in _PLAIN else id(key), _mark(item, depth - 1)) for key, item in items]
    if isinstance(value, torch.Tensor) and value.requires_grad:
        return None  # a parameter, or a tensor of a graph
    return mark_of(value)


@cache
def _of_optimizers() -> frozenset[str]:
    """The names of attributes of every optimizer, including those of torch's schedulers and loss scaling.

    Called late, since making an optimizer imports much of torch.
    """
    of_all = vars(torch.optim.Optimizer([torch.zeros(1, device="cpu")], {}))
    return frozenset((*of_all, "step", "_opt_called", "_step_count", "grad_scale", "found_inf"))
