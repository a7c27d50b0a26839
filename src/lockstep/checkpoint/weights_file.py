"""The tensors of a trained model in safetensors files, read tensor by tensor, or box by box.

model.safetensors                one file
model.safetensors.index.json     {"weight_map": {"layer.weight": "model-00001-of-00002.safetensors", ...}}
directory/                       with one of the two, as transformers writes it
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch

from lockstep.checkpoint.layout import Box, runs_within
from lockstep.checkpoint.safetensors_file import GREATEST_HEAD, FileTensor, read_head
from lockstep.checkpoint.tensors import content_of
from lockstep.collectives import StoredTensor
from lockstep.errors import SettingError
from lockstep.records import of_kind, open_regular, read_object

_NAMES = ("model.safetensors", "model.safetensors.index.json")


def read_weights(path: Path) -> dict[str, StoredTensor]:
    """The tensors at ``path``, by name; no tensor is read yet.

    Raises:
        SettingError: if no weights are found or readable, or a file is not as long as its head, or the index, says.
    """
    if path.is_dir():
        path = next((path / name for name in _NAMES if (path / name).is_file()), path)
    try:
        if path.name.endswith(".json"):
            names: dict[str, str] = of_kind(
                dict[str, str], read_object(path, GREATEST_HEAD)["weight_map"], "weight_map"
            )
            files = {name: _tensors_of(path.with_name(name)) for name in sorted(set(names.values()))}
            for name, file in names.items():
                if name not in files[file]:
                    raise ValueError(f"{file} has no tensor {name}, though the index says so")
            return {name: files[file][name] for name, file in names.items()}
        if path.suffix.lower() == ".safetensors":
            return _tensors_of(path)
    except (OSError, ValueError, LookupError) as error:
        raise SettingError(f"weights={str(path)!r} cannot be read: {type(error).__name__}: {error}") from error
    raise SettingError(
        f"weights={str(path)!r}: give a .safetensors file, a .safetensors.index.json, or a directory with {_NAMES[0]} "
        f"or {_NAMES[1]}; of another file: model.load_state_dict(torch.load(...)) before run.model(model)"
    )


def checksum_of_first_rows(weights: Mapping[str, StoredTensor]) -> int:
    """A checksum of the names, types and shapes of ``weights`` and of the first row of each tensor, which is read.

    Different weights of the same model have different checksums, unless only later rows differ.
    """
    found = 0
    for name, stored in weights.items():
        found = zlib.crc32(repr((name, stored.dtype, tuple(stored.shape))).encode(), found)
        if stored.numel():
            found = zlib.crc32(content_of(stored.rows(0, 1) if stored.dim() else stored.whole()), found)
    return found


def _tensors_of(path: Path) -> dict[str, StoredTensor]:
    with open_regular(path) as file:
        try:
            length, tensors = read_head(file.read, os.fstat(file.fileno()).st_size)
        except ValueError as error:
            raise ValueError(f"{path.name}: {error}") from error
    return {tensor.name: _stored(path, length + offset, tensor) for offset, tensor in tensors}


def _stored(path: Path, offset: int, tensor: FileTensor) -> StoredTensor:
    dtype: torch.dtype = getattr(torch, tensor.dtype)

    def read(start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        box = torch.empty(shape, dtype=dtype, device="cpu")
        if not box.numel():
            return box
        content = box.reshape(-1).view(torch.uint8).numpy().data
        with path.open("rb", buffering=0) as file:
            whole = Box((0,) * len(tensor.shape), tensor.shape)
            for first, end, place in runs_within(whole, Box(start, shape), dtype.itemsize):
                file.seek(offset + first)
                taken = 0
                while taken < end - first:
                    more = file.readinto(content[place + taken : place + end - first])
                    if not more:
                        raise SettingError(f"weights={str(path)!r} ends within {tensor.name}")
                    taken += more
        return box

    return StoredTensor(tensor.shape, dtype, read)
