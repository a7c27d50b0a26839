"""The numbers that a script logs and that must be equal on all ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import numpy as np
import torch

#: Names of values that each rank measures of itself, such as time and memory.
_OF_RANK: Final = re.compile(
    r"(^|_)(time|wall|clock|s|ms|secs?|seconds?|minutes?|hours?|elapsed|took|duration|wait|latency|eta|"
    r"speed|throughput|fps|its?|tps|"
    r"[kmg]i?b|bytes|vram|ram|rss|cpu|gpu|cuda|util|utili[sz]ation|power|watts?|pid|host|local|date|timestamp)(_|$)|"
    r"^((my|local|global|node)_)?rank$|^((max|peak|used|free)_)*mem(ory)?(_(used|free|allocated|reserved|peak|max))*$",
    re.IGNORECASE,
)


def is_of_rank(name: str) -> bool:
    """Whether a value of this ``name`` is a rank's own, as ``memory`` or ``local_meter.sum``."""
    *owners, last = name.split(".")
    return _OF_RANK.search(last) is not None or any("local" in owner.split("_") for owner in owners)


def common_numbers(values: Mapping[str, object]) -> dict[str, int | float]:
    """The numbers among the script's logged ``values`` that must be equal on all ranks, by name."""
    found: dict[str, int | float] = {}
    for name, value in values.items():
        number = value.item() if isinstance(value, torch.Tensor | np.generic) and not value.ndim else value
        if isinstance(number, int | float) and not is_of_rank(name):
            found[name] = number
    return found
