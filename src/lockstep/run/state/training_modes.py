"""Training and evaluation modes of modules: the run calls `train()` and `eval()` as a hand-written loop does.

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
    """The modes of all modules within ``root``, a model of the run or a kept module."""

    def __init__(self, root: nn.Module) -> None:
        self._root: Final = root
        self._set: Modes = {}  # after the run's last call; a missing module was in training mode
        self._frozen: set[nn.Module] = set()  # modules that the script has set to eval

    def begin_pass(self) -> None:
        """Set the root and its modules to training mode, except modules that the script has set to eval.

        Modules that the root's own ``train()`` sets to eval are also excepted. If the root is in evaluation mode, no
        module that the script has set to eval stays so.
        """
        frozen = self._frozen_now() if self._root.training else set()
        self._root.train()
        # A module that the root's own train() sets to eval stays so as long as train() sets it.
        self._frozen = {module for module in frozen if module.training}
        self._set = _of(self._root) | dict.fromkeys(self._frozen, False)
        _restore(self._root, self._set)

    def state(self) -> StateTree:
        """The names of modules in evaluation mode, and of those that the script has set to eval, for a checkpoint.

        Plain values.
        """
        frozen = self._frozen_now()
        names = {name: module for name, module in self._root.named_modules() if not module.training}
        return {"eval": list(names), "frozen": [name for name, module in names.items() if module in frozen]}

    def load(self, state: SavedTree) -> list[str]:
        """Set all modes by ``state``; returns the modules whose mode has changed, if the root's has not."""
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
    """Set all modules within ``root`` to ``modes``; ``train(mode)`` of the root is called in any case."""
    root.train(modes[root])
    _restore(root, modes)


def _restore(root: nn.Module, modes: Mapping[nn.Module, bool]) -> None:
    for module in root.modules():  # outer modules first, since each sets its inner modules
        wanted = modes.get(module, module.training)
        if module.training != wanted:
            module.train(wanted)
            module.training = wanted  # whatever the module's own train() has set


def _of(root: nn.Module) -> Modes:
    return {module: module.training for module in root.modules()}
