"""A permutation that is computed where it is looked at, and so takes no memory: for epochs too long to be stored.

    place ──► (left, right), with left < a, right < b and a * b just over the length
                left  += mix(right, key 0)  (mod a)
                right += mix(left,  key 1)  (mod b)      each line can be undone, so all of them together are one to one
                ...
          ──► place in a * b; beyond the length: the same again, until it is within

A Feistel network over pairs of digits, walked along its cycles: J. Black and P. Rogaway, "Ciphers with Arbitrary Finite
Domains", CT-RSA 2002, their third method. The numbers are mixed by the finalizer of SplitMix64: G. Steele, D. Lea and
C. Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014, table 3. It is for shuffling, not for secrecy.
"""

from __future__ import annotations

from math import isqrt
from typing import Final

import numpy as np
import torch
from torch import Tensor

from lockstep.seeding import seed_of

_ROUNDS: Final = 8
_U64 = np.uint64


class ComputedPermutation:
    """A permutation of ``range(length)`` that depends on ``seed``, the same on every machine.

    It takes no memory that grows with its length. About 0.06 ms for each part that is looked at, and 0.1 us for each
    place in it.

    Raises:
        ValueError: for a length below 1.
    """

    def __init__(self, length: int, seed: int) -> None:
        if length < 1:
            raise ValueError(f"a permutation of {length}; give at least 1")
        self._length = length
        self._left = isqrt(length - 1) + 1
        self._right = -(-length // self._left)
        self._keys = [_U64(seed_of(seed, "permutation", number)) for number in range(_ROUNDS)]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, places: slice) -> Tensor:
        """What stands at ``places``: int64 on the CPU, one-dimensional."""
        found = np.arange(*places.indices(self._length), dtype=_U64)
        self._walk(found)
        outside = np.flatnonzero(found >= self._length)
        # Few: a * b is within two roots of the length. Each comes back in the end, as its cycle began within.
        while len(outside):
            walked = found[outside]
            self._walk(walked)
            found[outside] = walked
            outside = outside[walked >= self._length]
        return torch.from_numpy(found.astype(np.int64))

    def _walk(self, places: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> None:
        """One step along their cycles in ``a * b``, in place."""
        left, right = np.divmod(places, _U64(self._right))
        for number, key in enumerate(self._keys):
            if number % 2:
                right = (right + _mixed(left, key) % _U64(self._right)) % _U64(self._right)
            else:
                left = (left + _mixed(right, key) % _U64(self._left)) % _U64(self._left)
        np.multiply(left, _U64(self._right), out=places)
        np.add(places, right, out=places)


def _mixed(
    values: np.ndarray[tuple[int], np.dtype[np.uint64]], key: np.uint64
) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """64 bits for each of ``values`` under ``key``; products wrap, as they should."""
    mixed = values * _U64(0x9E3779B97F4A7C15) ^ key
    mixed = (mixed ^ mixed >> _U64(30)) * _U64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ mixed >> _U64(27)) * _U64(0x94D049BB133111EB)
    mixed ^= mixed >> _U64(31)
    return mixed
