"""Torchvision, also on machines for which it has no build of its operators."""

import importlib
import sys
from types import ModuleType

import torch

_definitions: list[torch.library.Library] = []  # they hold as long as this lives


def torchvision(module: str = "") -> ModuleType:
    """The package, or its ``module`` such as ``"datasets"``.

    The package on an index is built for CUDA. Where its library cannot be loaded, torchvision fails to import, for want
    of two operators that detection models use and its data sets, transforms and other models do not. Declared here,
    without an implementation, they let it import; calling them still fails.

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
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _definitions.append(library)
    return importlib.import_module(name)
