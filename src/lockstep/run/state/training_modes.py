"""Training and evaluation modes of modules: the run calls `train()` and `eval()` as a loop by hand does.

run.train(...)       model.train()         a module's own train(mode) sees it: a frozen BatchNorm, weights to be merged
                     bn.eval()             what the script has set to eval since the run's last call stays so
run.evaluate(...)    model.eval()
... its end          model.train(), and all modes as they were before
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from torch import nn

from lockstep.checkpoint import SavedTree, StateTree

Modes = dict[nn.Module, bool]


class TrainingModes:
    """The modes of all modules within ``root``, a model of the run or a module that is kept."""

    def __init__(self, root: nn.Module) -> None:
        self._root: Final = root
        self._set: Modes = {}  # after the run's last call; a module that is not in it was in training mode
        self._frozen: set[nn.Module] = set()  # those that the script has set to eval

    def begin_pass(self) -> None:
        """The root is in training mode, as are its modules but for those that the script has set to eval.

        And for those that the root's own ``train()`` has set to eval. Where the root is in evaluation mode, none stays.
        """
        frozen = self._frozen_now() if self._root.training else set()
        self._root.train()
        # A module that the root's own train() has set to eval stays so as long as that says it.
        self._frozen = {module for module in frozen if module.training}
        self._set = _of(self._root) | dict.fromkeys(self._frozen, False)
        _restore(self._root, self._set)

    def state(self) -> StateTree:
        """What a checkpoint holds: the names of modules that are in evaluation mode, and of those set so by the script.

        Plain values.
        """
        frozen = self._frozen_now()
        names = {name: module for name, module in self._root.named_modules() if not module.training}
        return {"eval": list(names), "frozen": [name for name, module in names.items() if module in frozen]}

    def load(self, state: SavedTree) -> list[str]:
        """Set all modes as `state` says; returns the modules that were otherwise, if the root was not."""
        modules = dict(self._root.named_modules())
        modes = {module: name not in state["eval"] for name, module in modules.items()}
        odd = [name for name, module in modules.items() if module.training != modes[module]]
        restore(self._root, modes)
        self._set = modes
        self._frozen = {modules[name] for name in state["frozen"] if name in modules}
        return [] if "" in odd else odd

    def _frozen_now(self) -> set[nn.Module]:
        return {
            module
            for module in self._root.modules()
            if not module.training and (module in self._frozen or self._set.get(module, True))
        }


def modes_of(roots: Iterable[nn.Module]) -> list[tuple[nn.Module, Modes]]:
    """The modes of all modules within each of ``roots``."""
    return [(root, _of(root)) for root in roots]


def restore(root: nn.Module, modes: Mapping[nn.Module, bool]) -> None:
    """All modules within ``root`` are in these ``modes``; ``train(mode)`` of the root is called in any case."""
    root.train(modes[root])
    _restore(root, modes)


def _restore(root: nn.Module, modes: Mapping[nn.Module, bool]) -> None:
    for module in root.modules():  # the outer ones first, as each sets those within
        wanted = modes.get(module, module.training)
        if module.training != wanted:
            module.train(wanted)
            module.training = wanted  # whatever its own train() makes of it


def _of(root: nn.Module) -> Modes:
    return {module: module.training for module in root.modules()}
