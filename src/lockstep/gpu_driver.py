"""What NVIDIA's libraries say of themselves and of the GPUs of this machine, without touching a GPU."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_NOT_INITIALIZED = 3  #: of CUDA, where nothing has started its driver

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


def has_started_cuda() -> bool:
    """Whether CUDA is started in this process, by torch, by another library, or by a mere look for GPUs.

    A copy of such a process sees no GPU. That its device is open says nothing: the management library opens it, too.
    """
    count = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:  # this process has not loaded it
        return False
    return bool(driver.cuDeviceGetCount(ctypes.byref(count)) != _NOT_INITIALIZED)
