"""What NVIDIA's driver says of the GPUs of this machine: without torch, and without touching a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# One of them is there where NVIDIA's driver is: on Linux, in WSL, and on Jetson boards.
_DRIVER = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-ctrl-gpu", "/dev/nvgpu")


def ask_driver(ask: Callable[[object], T], otherwise: T) -> T:
    """What NVIDIA's management library is asked for; ``otherwise`` without a driver, or where it refuses."""
    if not any(map(os.path.exists, _DRIVER)):
        return otherwise
    # Late: it takes tens of milliseconds, and only machines with a GPU need it.
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            return ask(pynvml)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return otherwise
