"""Torchvision, also on machines for which it has no build of its operators.

The package on an index is built for CUDA. Where its library cannot be loaded, torchvision fails to import, and with it
whatever imports it, such as transformers: for want of two operators that detection models use and its data sets,
transforms and other models do not. Declared, without an implementation, they let it import; calling them still fails.

python vision.py    # declares them in the torchvision of this environment, for every program; `make` does it
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch

_OPERATORS = "nms", "qnms"
_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_definitions: list[torch.library.Library] = []  # they hold as long as this lives

_ADDED = f"""
# Added by vision.py of torch-lockstep, since the library of operators could not be loaded: they are only declared.
if not _has_ops():
    _declared = torch.library.Library("torchvision", "DEF")
    for _operator in {_OPERATORS}:
        _declared.define(_operator + "{_SIGNATURE}")
"""


def torchvision(module: str = "") -> ModuleType:
    """The package, or its ``module`` such as ``"datasets"``; in this process with its operators declared.

    Raises:
        ImportError: if torchvision is not installed.
    """
    name = f"torchvision.{module}".rstrip(".")
    try:
        return importlib.import_module(name)
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
    for loaded in [m for m in sys.modules if m.partition(".")[0] == "torchvision"]:
        del sys.modules[loaded]
    library = torch.library.Library("torchvision", "DEF")
    for operator in _OPERATORS:
        library.define(operator + _SIGNATURE)
    _definitions.append(library)
    return importlib.import_module(name)


def declare_for_all(package: Path) -> bool:
    """Declare the operators in the torchvision installed at ``package``, if it needs that; whether it did.

    Doing it again changes nothing.
    """
    file = package / "extension.py"
    text = file.read_text(encoding="utf-8")
    if _ADDED in text:
        return False
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        file.write_text(text + _ADDED, encoding="utf-8")
        return True
    return False


if __name__ == "__main__":
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        raise SystemExit("torchvision is not installed")
    if declare_for_all(Path(found.origin).parent):
        print(f"torchvision has no operators here: {', '.join(_OPERATORS)} are declared, and fail when they are called")
