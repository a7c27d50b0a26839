"""Random numbers that depend on what is computed, never on who computes it."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

_BLOCK = 624  #: how many numbers a Mersenne Twister makes at a time


def seed_of(*key: int | str) -> int:
    """A seed of 63 bits for ``key``, such as ``(7, "sample", epoch, index)``: always the same, on every machine."""
    text = "/".join(map(repr, key)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def seed_generators(seed: int) -> None:
    """From here on the global generators of torch, Python and NumPy continue from ``seed``; about 7 us.

    Those of the GPUs too, once CUDA is in use. `torch.manual_seed` would do the same in 110 us, since it asks every
    kind of device that torch knows of.
    """
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    if torch.cuda.is_initialized():
        for generator in torch.cuda.default_generators:
            generator.manual_seed(seed)


def drawn_states() -> dict[str, str]:
    """A short text for the state of each global generator on the CPU from which numbers were drawn since it was seeded.

    By its name. A generator that begins seeds itself, differently in each process. About 0.2 ms.
    """
    fresh, current = torch.Generator(), torch.default_generator.get_state()
    fresh.manual_seed(torch.initial_seed())
    python, twister = random.getstate(), np.random.get_state(legacy=False)["state"]
    position = twister["pos"]
    states = {
        "torch": None if torch.equal(fresh.get_state(), current) else current.numpy().tobytes(),
        # Both stand at the end of a block until the first number is drawn.
        "random": None if python[1][-1] == _BLOCK and python[2] is None else repr(python).encode(),
        "numpy.random": None if position >= _BLOCK - 1 else twister["key"].tobytes() + bytes([position % 256]),
    }
    return {name: hashlib.blake2b(state, digest_size=8).hexdigest() for name, state in states.items() if state}


class GeneratorStates(NamedTuple):
    """Where the global generators on the CPU are."""

    torch: Tensor
    python: tuple[Any, ...]
    numpy: dict[str, Any]


def generator_states() -> GeneratorStates:
    """Of the global generators of torch, Python and NumPy on the CPU."""
    return GeneratorStates(torch.default_generator.get_state(), random.getstate(), np.random.get_state(legacy=False))


def set_generator_states(states: GeneratorStates) -> None:
    """From here on the global generators on the CPU continue from ``states``; both together take about 50 us."""
    torch.default_generator.set_state(states.torch)
    random.setstate(states.python)
    np.random.set_state(states.numpy)


def drawn_by_script() -> dict[str, str]:
    """`drawn_states`, before a run has seeded the generators, without a number that an import of ``rich`` draws.

    Other packages, such as scikit-learn, load it.
    """
    states = drawn_states()
    if "rich.style" in sys.modules and random.getstate()[1][-1] == 1:
        states.pop("random", None)
    return states


@contextmanager
def seeded_generators(seed: int) -> Iterator[None]:
    """Within, the global generators continue from ``seed``; afterwards they go on from where they were."""
    before = generator_states()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices):
            seed_generators(seed)
            yield
    finally:
        set_generator_states(before)
