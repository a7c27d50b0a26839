"""A rank must not start ranks of its own: those would join the store of the outer ones, and all wait for each other."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final, NoReturn

from lockstep.errors import UsageError

_SPAWN: Final = "torch.multiprocessing.spawn"


def refuse_nested_ranks() -> None:
    """From now on `torch.multiprocessing.spawn` and `start_processes` raise `UsageError` in this process.

    Torch is not loaded for that; where it is not yet, this waits for it.
    """
    module = sys.modules.get(_SPAWN)
    if module is None:
        sys.meta_path.insert(0, _WhenLoaded())
        return
    _refuse(module)
    sys.modules["torch.multiprocessing"].start_processes = module.start_processes  # type: ignore[attr-defined]


def _refuse(module: ModuleType) -> None:
    def start_processes(fn: Any, *args: Any, **kwargs: Any) -> NoReturn:
        name = getattr(fn, "__name__", "main")
        raise UsageError(
            "the script starts ranks of its own by torch.multiprocessing, and lockstep run has started this rank "
            f'already: call {name}(int(os.environ["LOCAL_RANK"]), ...) in its place, or start the script with python; '
            "processes that are no ranks: multiprocessing.get_context('spawn')"
        )

    module.start_processes = start_processes  # type: ignore[attr-defined]


class _WhenLoaded(MetaPathFinder, Loader):
    """Waits for the module and changes it once it is loaded."""

    def __init__(self) -> None:
        self._loader: Loader | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _SPAWN:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        assert self._loader is not None, "find_spec came first"
        self._loader.exec_module(module)
        _refuse(module)
