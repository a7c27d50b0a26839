"""A trained model out of a checkpoint: into a file that other programs load, or into memory.

checkpoint of any strategy, on any number of ranks  ──►  one tensor at a time  ──►  model.safetensors, or a directory
                                                    ──►  all of one model      ──►  model.pt, or {name: tensor}
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.checkpoint import (
    CheckpointReader,
    FileTensor,
    SafetensorsWriter,
    SavedModel,
    TensorRecord,
    averaged_state,
    check_writable,
    tensors_file,
    write_beside,
)
from lockstep.errors import CheckpointError, DamagedCheckpoint, SettingError
from lockstep.saved_run.located import NEWEST, RunPath, checkpoints_of, open_checkpoint, way_out

if TYPE_CHECKING:
    from lockstep.checkpoint import Tensors


@dataclass(frozen=True, slots=True)
class Exported:
    """A model that was written."""

    out: Path
    step: int  #: after which it was saved
    model: str
    tensors: int
    size_bytes: int  #: of all tensors
    with_config: bool  #: whether what `from_pretrained` needs beside the tensors was written, too


def export(run: RunPath, out: RunPath, *, step: int | str = NEWEST, model: str | None = None) -> Exported:
    """Write a model of a run to ``out``. What was there before is replaced once all is written.

    A ``.safetensors`` file, or a directory with one, takes the memory of one tensor; a ``.pt`` file that of the model.

    Args:
        run: run directory, directory of checkpoints, or one checkpoint.
        out: a path that ends in ``.safetensors`` or ``.pt``, or a directory, for ``from_pretrained``.
        step: a number, ``newest`` or ``best``.
        model: its number, its class, or the name under which it is kept; None: the only one.

    Raises:
        SettingError: if there is no such checkpoint or model, or ``out`` cannot hold it.
        DamagedCheckpoint: if the checkpoint is not what was committed; nothing is written then.
    """
    checkpoint = open_checkpoint(run, step)
    chosen, path = choose_model(checkpoint, model), Path(out)
    kind = check_writable(path, [(name, t.dtype) for name, t in chosen.tensors.items()], [*chosen.others])
    try:
        if kind == "torch":
            # Late, for it needs torch.
            from lockstep.checkpoint import write_torch_file

            write_torch_file(path, _load(checkpoint, chosen))
        else:
            _write_safetensors(tensors_file(path) if kind == "directory" else path, checkpoint, chosen)
            if kind == "directory":
                write_beside(path, chosen.about.files)
    except DamagedCheckpoint as error:
        raise _with_way_out(error, run, checkpoint) from error
    lengths = [_length(tensor) for tensor in chosen.tensors.values()]
    with_config = kind == "directory" and bool(chosen.about.files)
    return Exported(path, checkpoint.manifest.step, chosen.name, len(lengths), sum(lengths), with_config)


def load(run: str | os.PathLike[str], step: int | str = NEWEST, model: str | None = None) -> Tensors:
    """The tensors of a model that a run has saved, by their names in ``state_dict()``: plain ones, on the CPU.

    No rank is started and torch.distributed is not used, so it works anywhere, and on each rank by itself. Only this
    model is read and compared with its checksums, nothing of the optimizer.

    Args:
        run: run directory, directory of checkpoints, or one checkpoint.
        step: a number, ``"newest"`` or ``"best"``, by the metric of ``Run(best=...)``.
        model: its number, its class, or the name under which it is kept; None: the only one.

    Raises:
        SettingError: if there is no such checkpoint or model.
        DamagedCheckpoint: if the checkpoint is not what was committed.
    """
    checkpoint = open_checkpoint(run, step)
    try:
        return _load(checkpoint, choose_model(checkpoint, model))
    except DamagedCheckpoint as error:
        raise _with_way_out(error, run, checkpoint) from error


def _load(checkpoint: CheckpointReader, model: ModelState) -> dict[str, Any]:
    # Late, for it needs torch.
    from lockstep.checkpoint import tensor_of

    tensors: Mapping[str, Any] = {name: tensor_of(record, checkpoint) for name, record in model.tensors.items()}
    return {**tensors, **model.others}


def _write_safetensors(path: Path, checkpoint: CheckpointReader, model: ModelState) -> None:
    # The widest elements first, so that each tensor can be mapped into memory as it is.
    order = sorted(model.tensors.items(), key=lambda named: -_element(named[1]))
    head = [FileTensor(name, tensor.dtype, tensor.shape, _length(tensor)) for name, tensor in order]
    with SafetensorsWriter(path, head) as file:
        for _, tensor in order:
            file.write(memoryview(checkpoint.content(tensor)))


def _length(tensor: TensorRecord) -> int:
    return sum(piece.length for piece in tensor.pieces)


def _element(tensor: TensorRecord) -> int:
    """Bytes of one element; 0, where there is none."""
    elements = 1
    for size in tensor.shape:
        elements *= size
    return _length(tensor) // max(1, elements)


def _with_way_out(error: DamagedCheckpoint, run: RunPath, checkpoint: CheckpointReader) -> DamagedCheckpoint:
    found = checkpoints_of(run)
    (damaged,) = (one for one in found if one.path == checkpoint.path)
    return DamagedCheckpoint(f"{error}. {way_out(damaged, found)}")


@dataclass(frozen=True, slots=True)
class ModelState:
    """One model of a checkpoint."""

    name: str
    about: SavedModel
    tensors: Mapping[str, TensorRecord]  #: by their names in ``state_dict()``
    others: Mapping[str, Any]  #: what else is in it


def choose_model(checkpoint: CheckpointReader, name: str | None) -> ModelState:
    """The model of that number, class or name under which it is kept; None: the only one.

    Raises:
        SettingError: if there are several and none is named, or there is none of that name.
        CheckpointError: for a checkpoint that is none of a run's.
    """
    models = _models_of(checkpoint)
    if name is None and len(models) == 1:
        return models[0]
    if name is None:
        trained = [model for model in models if model.name.isdigit()]
        if len(trained) == 1:
            return trained[0]
        raise SettingError(f"the run has several models: say --model with one of {_names(models)}")
    chosen = [m for m in models if m.name == name] or [m for m in models if m.about.class_name == name]
    if len(chosen) == 1:
        return chosen[0]
    several = f"{len(chosen)} models are a {name}" if chosen else f"the run has no model {name}"
    raise SettingError(f"--model {name}: {several}; it has {_names(models)}")


def _models_of(checkpoint: CheckpointReader) -> list[ModelState]:
    tree = checkpoint.tree
    try:
        states, about = tree["models"], [SavedModel.from_tree(each) for each in tree["about_models"]]
        kept = {name: tree["kept"][name] for name in tree["kept_transient"]}  # those that are modules
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{checkpoint.path} holds no model of a run: no {error} in it") from error
    models = [
        _model_state(str(number), known, state) for number, (known, state) in enumerate(zip(about, states, strict=True))
    ]
    return models + [_model_state(name, _about_kept(about), averaged_state(state)) for name, state in kept.items()]


def _model_state(name: str, about: SavedModel, state: Mapping[str, object]) -> ModelState:
    tensors = {key: value for key, value in state.items() if isinstance(value, TensorRecord)}
    return ModelState(name, about, tensors, {key: value for key, value in state.items() if key not in tensors})


def _about_kept(about: list[SavedModel]) -> SavedModel:
    """What is known of a kept module: where there is one model, it is most likely an average of it."""
    return SavedModel("", about[0].files if len(about) == 1 else {})


def _names(models: list[ModelState]) -> str:
    return ", ".join(m.name + (f" ({m.about.class_name})" if m.about.class_name else "") for m in models)
