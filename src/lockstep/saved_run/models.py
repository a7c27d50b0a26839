"""Which model of a checkpoint is meant, and what it consists of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.checkpoint import CheckpointReader, SavedModel, TensorRecord, averaged_state
from lockstep.errors import CheckpointError, SettingError


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


def _model_state(name: str, about: SavedModel, state: Mapping[str, Any]) -> ModelState:
    tensors = {key: value for key, value in state.items() if isinstance(value, TensorRecord)}
    return ModelState(name, about, tensors, {key: value for key, value in state.items() if key not in tensors})


def _about_kept(about: list[SavedModel]) -> SavedModel:
    """What is known of a kept module: where there is one model, it is most likely an average of it."""
    return SavedModel("", about[0].files if len(about) == 1 else {})


def _names(models: list[ModelState]) -> str:
    return ", ".join(m.name + (f" ({m.about.class_name})" if m.about.class_name else "") for m in models)
