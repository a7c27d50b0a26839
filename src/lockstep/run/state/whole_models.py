"""Whole models, gathered from all ranks, in the leader's memory or in a file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import nn

from lockstep.checkpoint import (
    FileTensor,
    SafetensorsWriter,
    SavedModel,
    StateTree,
    averaged_state,
    check_writable,
    content_of,
    in_file,
    tensors_file,
    write_beside,
    write_torch_file,
)
from lockstep.collectives import TensorShard, gather_on_leader
from lockstep.errors import CheckpointError, SettingError, UsageError
from lockstep.run.loop.train_step import TrainStep
from lockstep.run.setup.run_context import RunContext
from lockstep.run.state.snapshot import RunSnapshot


class WholeModels:
    """Gathers the models and kept modules of a run on the leader."""

    def __init__(self, context: RunContext, train_step: TrainStep, snapshot: RunSnapshot) -> None:
        self._context: Final = context
        self._state: Final = context.state
        self._train_step: Final = train_step
        self._snapshot: Final = snapshot

    def state_dict(self, model: nn.Module) -> StateTree:
        """The whole state of ``model`` on the leader, as copies on the CPU; empty on other ranks. Collective."""
        state = self._parts(model, "state_dict")
        items = gather_on_leader(self._context.group, state)
        return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in items}

    def save(self, model: nn.Module, path: str | os.PathLike[str]) -> None:
        """Write the whole ``model`` to ``path``; the leader writes, one tensor at a time but for ``.pt``. Collective.

        Raises:
            SettingError: on all ranks, if the file cannot be written or cannot hold such a model.
        """
        if self._context.measure is not None:
            return  # a measured run saves nothing: a model after a few steps must not replace a trained one
        parts, group, out = self._parts(model, "save"), self._context.group, Path(path)
        # The widest elements first, so that each tensor is aligned and can be mapped into memory.
        state = dict(sorted(parts.items(), key=lambda named: -_spec(*named).element))
        specs = [_spec(name, value) for name, value in state.items()]
        kind, refused = "", ""
        if group.leads:
            try:
                others = [spec.name for spec in specs if not spec.element]
                kind = check_writable(out, [(s.name, s.tensor.dtype) for s in specs if s.element], others)
            except (SettingError, OSError) as error:
                refused = str(error)
        if refused := group.broadcast_object(refused, "whether a model can be written"):
            raise SettingError(refused)
        items = gather_on_leader(group, state)
        failed = ""
        try:
            if kind == "torch":
                whole = dict(items)
                write_torch_file(out, {name: whole[name] for name in parts})
            elif kind:
                with SafetensorsWriter(
                    tensors_file(out) if kind == "directory" else out, [s.tensor for s in specs]
                ) as f:
                    for _, value in items:
                        f.write(content_of(value))
            if kind == "directory":
                averages = isinstance(model, torch.optim.swa_utils.AveragedModel)
                write_beside(out, SavedModel.of(model.module if averages else model).files)
        except OSError as error:
            failed = f"{type(error).__name__}: {error}"
        for _ in items:  # other ranks send the rest, which the leader must receive and drop
            pass
        if failed := group.broadcast_object(failed, "how the writing of a model ended"):
            raise CheckpointError(f"{out} was not written: {failed}; what was there before still is")

    def _parts(self, model: nn.Module, method: str) -> StateTree:
        """The state of ``model``, with a `TensorShard` for each divided tensor. Collective.

        Raises:
            UsageError: for a model that the run does not know, or in the middle of a step.
            MismatchError: if the script has made the models of ranks different since the last step.
        """
        self._train_step.require_all_ranks(method)
        self._snapshot.compare_models()
        strategy = self._context.strategy
        if any(model is known for known in self._state.models):
            return strategy.state_layout.model_state(model)
        kept = [name for name, value in self._state.kept.items() if value is model]
        if not kept:
            raise UsageError(
                f"run.{method}({type(model).__name__}): it is no model of this run; give one that run.model(...) "
                "returned, or one that is kept by run.keep(name=model)"
            )
        state = dict(averaged_state(model.state_dict()))
        odd = [name for name, value in state.items() if isinstance(value, torch.Tensor) and not _is_plain(value)]
        if odd:
            raise UsageError(
                f"run.{method}({kept[0]}): this rank holds only a part of {odd[0]}; keep a copy that is whole, under "
                "strategy ddp or zero"
            )
        return state


@dataclass(frozen=True, slots=True)
class _Spec:
    """An item of a state."""

    name: str
    tensor: FileTensor
    element: int  #: bytes of an element; 0: the item is no tensor


def _spec(name: str, value: object) -> _Spec:
    if isinstance(value, torch.Tensor | TensorShard):
        return _Spec(name, in_file(name, value.dtype, tuple(value.shape)), value.dtype.itemsize)
    return _Spec(name, FileTensor(name, "", (), 0), 0)


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) and not tensor.is_meta
