"""A script in plain torch, without `Run`: what it does is written down where it calls torch.

    DataLoader        each batch            Tensor.backward    the loss
    Optimizer.step    gradients before it, parameters and state after it; a step is one of the first optimizer's
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from lockstep.launch_contract import EXIT_OK
from lockstep.run import Play
from lockstep.transcript import MICRO_BATCH, PLAN, STATE, TranscriptRequest, line_of


class PlainRecorder:
    """Within its context, torch's calls are written down; after the steps that are asked for the script ends."""

    def __init__(self, request: TranscriptRequest) -> None:
        self._request: Final = request
        self._file: Final = request.file(0).open("w", encoding="utf-8")
        self._step = 0
        self._first: torch.optim.Optimizer | None = None  # whose steps are counted
        self._play = Play({})
        self._counted: Counter[str] = Counter()
        self._saved = False  # whether the script has called torch.save

    def __enter__(self) -> Self:
        plain_iter, plain_backward = DataLoader.__iter__, torch.Tensor.backward
        recorder = self

        def batches(loader: DataLoader[Any]) -> Iterator[Any]:
            for batch in plain_iter(loader):
                recorder._play.note_all(recorder._name("batch"), batch)
                yield batch

        def backward(loss: torch.Tensor, *args: Any, **options: Any) -> None:
            recorder._play.note(recorder._name("the loss"), loss)
            plain_backward(loss, *args, **options)

        DataLoader.__iter__ = batches  # type: ignore[method-assign, assignment] - torch has no hook for batches
        torch.Tensor.backward = backward  # type: ignore[method-assign, assignment] - nor for a loss
        register_optimizer_step_pre_hook(self._before)
        register_optimizer_step_post_hook(self._after)
        self._file.write(f"{line_of(PLAN, 0, 0, {})}\n")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _before(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._first is None:
            self._first = optimizer
            self._note_state(optimizer)
        play = self._play
        play.note("the random numbers drawn from torch", torch.get_rng_state())
        play.note("the random numbers drawn from NumPy", repr(np.random.get_state(legacy=False)).encode().hex())
        play.note("the random numbers drawn from Python", repr(random.getstate()))
        for number, parameter in enumerate(_parameters(optimizer)):
            if parameter.grad is not None:
                play.note(f"the gradient of parameter {number} {tuple(parameter.shape)}", parameter.grad)

    def _after(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if optimizer is not self._first:
            return
        self._write(MICRO_BATCH, self._play.notes())
        self._play = Play({})
        self._counted.clear()
        self._step += 1
        self._note_state(optimizer)
        if self._step >= self._request.steps:
            raise SystemExit(EXIT_OK)

    def _note_state(self, optimizer: torch.optim.Optimizer) -> None:
        play = Play({})
        for number, parameter in enumerate(_parameters(optimizer)):
            play.note(f"state.models.0.parameter {number} {tuple(parameter.shape)}", parameter)
            play.note_all(f"state.optimizers.0.parameter {number}", dict(optimizer.state[parameter]))
        for number, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                if isinstance(value, bool | int | float | str):
                    play.note(f"state.optimizers.0.param_groups.{number}.{name}", value)
        self._write(STATE, play.notes())

    def _name(self, what: str) -> str:
        self._counted[what] += 1
        return f"{what}{f' {self._counted[what]}' if self._counted[what] > 1 else ''}"

    def _write(self, kind: str, notes: Mapping[str, tuple[object, object]]) -> None:
        texts = {name: (str(mark), "" if value is None else str(value)[:60]) for name, (mark, value) in notes.items()}
        self._file.write(f"{line_of(kind, self._step, 0, texts)}\n")
        self._file.flush()


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]
