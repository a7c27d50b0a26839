"""Checksums of a few samples, to compare the data of all ranks, and the data of a resumed run with that of before.

A script makes its data set on each rank separately. A data set that is drawn at random without a seed, such as a split
into training and test, has equal length on every rank but different samples.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np
import torch

from lockstep.data.indexed.sampling import Sample

_LOOKED_AT: Final = 1024  # elements of an array, text or list that its checksum covers, evenly spread


class SeenSamples(NamedTuple):
    """The indices and a checksum of some samples of a data set at one time."""

    indices: list[int]
    checksum: int  #: of their contents


class SeenBatch(list[int]):
    """Checksums of samples, which a loader process returns in place of a batch when samples are to be compared."""


def checksum(sample: Sample) -> int:
    """A number, equal for equal samples in every process and hardly ever for others; takes some microseconds.

    The checksum covers numbers, text, dense arrays, and lists, tuples and mappings of these; of an absolute path, only
    the name of the file.
    """
    return _checksum(sample, 1)


def _checksum(value: object, so_far: int) -> int:
    match value:
        case torch.Tensor() if value.layout is not torch.strided or value.is_nested:
            return so_far
        case torch.Tensor():
            plain = value.detach().reshape(-1)[:: _spread(value.numel())].cpu().resolve_conj().contiguous()
            return zlib.crc32(plain.view(torch.uint8).numpy().tobytes(), so_far)
        case np.ndarray() if value.dtype.hasobject:  # its bytes are addresses
            return _checksum(value.reshape(-1)[:: _spread(value.size)].tolist(), so_far)
        case np.ndarray():
            return zlib.crc32(value.reshape(-1)[:: _spread(value.size)].tobytes(), so_far)
        case bytes():
            return zlib.crc32(value[:: _spread(len(value))], so_far)
        case str():
            if os.path.isabs(value):  # where a file lies may differ between hosts, and between jobs
                value = os.path.basename(value)
            return zlib.crc32(value[:: _spread(len(value))].encode(errors="surrogatepass"), so_far)
        case None | bool() | int() | float() | np.generic():
            return zlib.crc32(str(value).encode(), so_far)
        case Mapping():
            for key, part in value.items():
                so_far = _checksum(part, _checksum(key, so_far))
            return so_far
        case list() | tuple():
            for part in value[:: _spread(len(value))]:
                so_far = _checksum(part, so_far)
            return so_far
        case _ if hasattr(type(value), "__array_interface__"):  # such as an image of Pillow's
            return _checksum(np.asarray(value), so_far)
        case _:
            return so_far


def _spread(length: int) -> int:
    return -(-length // _LOOKED_AT) or 1
