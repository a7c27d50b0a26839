"""Files of trained models, as one file or a directory that other programs load, written whole or not at all.

model.safetensors   one tensor after the other, so that no more than one is in memory at once
model.pt            the result of torch.save of a state_dict; loads with weights_only=True
directory/          model.safetensors beside config.json, if the model has one; for from_pretrained
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from lockstep.checkpoint.safetensors_file import FileTensor, has_type, head_of
from lockstep.errors import SettingError
from lockstep.small_files import replace_text, replacement

_MODEL = "model.safetensors"
#: Required by transformers.
_METADATA = {"format": "pt"}
#: The counter of `torch.optim.swa_utils.AveragedModel` beside its averaged model, and the prefix of that model.
_COUNT, _AVERAGED = "n_averaged", "module."
_SAFETENSORS, _TORCH = (".safetensors",), (".pt", ".pth", ".bin")


@dataclass(frozen=True, slots=True)
class SavedModel:
    """The properties of a model beside its tensors."""

    class_name: str
    #: files of a directory without tensors, such as ``config.json``: each name with its text
    files: Mapping[str, str]

    @classmethod
    def of(cls, model: object) -> SavedModel:
        """The properties of ``model``; for a model of the transformers library also its configuration."""
        files = {}
        # `fully_shard` gives a module a class of its own, below the user's.
        kinds = (kind for kind in type(model).__mro__ if not kind.__module__.startswith("torch.distributed"))
        name = next(kinds).__name__
        for attribute, file in (("config", "config.json"), ("generation_config", "generation_config.json")):
            config = getattr(model, attribute, None)
            to_text = getattr(type(config), "to_json_string", None)
            if to_text is not None:
                values = json.loads(to_text(config))
                if attribute == "config":
                    values["architectures"] = [name]
                files[file] = json.dumps(values, indent=2) + "\n"
        return cls(name, files)

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> SavedModel:
        """The `SavedModel` of a ``tree`` from `tree`."""
        return cls(tree["class"], tree["files"])

    def tree(self) -> dict[str, object]:
        """The properties as plain values."""
        return {"class": self.class_name, "files": dict(self.files)}


def averaged_state(state: Mapping[str, object]) -> Mapping[str, object]:
    """The state of the averaged model, if ``state`` is of an `AveragedModel`; any other state unchanged."""
    if _COUNT in state and all(key == _COUNT or key.startswith(_AVERAGED) for key in state):
        return {key.removeprefix(_AVERAGED): value for key, value in state.items() if key != _COUNT}
    return state


def file_kind(out: Path) -> str:
    """The kind of file to be written at ``out``, by its name: ``safetensors``, ``torch`` or ``directory``.

    Raises:
        SettingError: if a file or directory of another kind exists at ``out``.
    """
    suffix = out.suffix.lower()
    kind = "safetensors" if suffix in _SAFETENSORS else "torch" if suffix in _TORCH else "directory"
    if kind == "directory" and out.is_file():
        raise SettingError(f"{out} is a file: give a name that ends in .safetensors or .pt, or a directory")
    if kind != "directory" and out.is_dir():
        raise SettingError(f"{out} is a directory: give it another name than one that ends in {suffix}")
    return kind


def check_writable(out: Path, tensors: Iterable[tuple[str, str]], others: Sequence[str]) -> str:
    """The kind of file that ``out`` will be, after a check that it can hold the state.

    Args:
        out: path of a file or directory.
        tensors: of the state: name and type.
        others: names of values that are no tensors.

    Raises:
        SettingError: if not.
    """
    kind = file_kind(out)
    if kind != "torch":
        odd = [*others, *(name for name, dtype in tensors if not has_type(dtype))]
        if odd:
            raise SettingError(
                f"{odd[0]} cannot be stored in a safetensors file ({len(odd)} such in all); write {out.stem}.pt"
            )
    return kind


class SafetensorsWriter:
    """Writes one file, tensor by tensor; an older file is replaced when all tensors are written.

    To be used in a ``with`` statement; if left by an error, no file is left behind.

    Args:
        path: of the file; missing directories are made.
        tensors: all that will be written, in this order.
    """

    def __init__(self, path: Path, tensors: Sequence[FileTensor]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._tensors = tensors
        self._open = contextlib.ExitStack()

    def __enter__(self) -> SafetensorsWriter:
        beside = self._open.enter_context(replacement(self._path, durable=True))
        self._file = self._open.enter_context(beside.open("wb"))
        self._file.write(head_of(self._tensors, _METADATA))
        return self

    def write(self, content: memoryview) -> None:
        """Write the bytes of the next tensor."""
        self._file.write(content)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)


def tensors_file(out: Path) -> Path:
    """The file that holds the tensors of the directory ``out``."""
    return out / _MODEL


def write_beside(directory: Path, files: Mapping[str, str]) -> None:
    """Write texts into ``directory``, each file replaced in one act."""
    for name, text in files.items():
        replace_text(directory / name, text, durable=True)
