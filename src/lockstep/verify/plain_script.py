"""A script in plain torch, without `Run`: what it does is written down where it calls torch.

DataLoader            each batch
Tensor.backward       the loss
Optimizer.step        gradients before it, parameters and state after it; steps of the first optimizer are counted
torch.save, load      go to a directory of its own, so that files of the user stay as they are
"""

from __future__ import annotations

import os
import signal
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from lockstep.launch_contract import EXIT_OK
from lockstep.run import Play
from lockstep.transcript import ABOUT, MICRO_BATCH, STATE, STOPPED, TranscriptRequest, line_of

SAVED, LOADED = "saved", "loaded"  #: what it says of a run in which the script has called torch's functions


class PlainRecorder:
    """Within its context, torch's calls are written down; after the steps that are asked for the script ends."""

    def __init__(self, request: TranscriptRequest) -> None:
        self._request: Final = request
        self._file: Final = request.file(0).open("w", encoding="utf-8")
        self._saves: Final = Path(request.directory).parent / "saved"
        self._has_saved = False
        self._step = 0
        self._first: torch.optim.Optimizer | None = None  # whose steps are counted
        self._play = Play()
        self._counted: Counter[str] = Counter()

    def __enter__(self) -> Self:
        plain_iter: Callable[[DataLoader[Any]], Iterator[Any]] = DataLoader.__iter__
        plain_backward: Callable[..., None] = torch.Tensor.backward
        recorder = self

        def batches(loader: DataLoader[Any]) -> Iterator[object]:
            for batch in plain_iter(loader):
                recorder._play.note_all(recorder._name("batch"), batch)
                yield batch

        def backward(loss: torch.Tensor, *args: object, **options: object) -> None:
            recorder._play.note(recorder._name("the loss"), loss)
            plain_backward(loss, *args, **options)

        # Torch has hooks for optimizers, and none for the rest.
        for owner, name, watched in (
            (DataLoader, "__iter__", batches),
            (torch.Tensor, "backward", backward),
            (torch, "save", partial(self._save, torch.save)),
            (torch, "load", partial(self._load, torch.load)),
            *((Path, name, self._found(getattr(Path, name))) for name in ("exists", "is_file")),
            *((os.path, name, self._found(getattr(os.path, name))) for name in ("exists", "isfile")),
        ):
            setattr(owner, name, watched)
        register_optimizer_step_pre_hook(self._before)
        register_optimizer_step_post_hook(self._after)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    # ---- its steps -----------------------------------------------------------------------------------------------

    def _before(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._first is None:
            self._first = optimizer
            self._note_state(optimizer)
        for number, parameter in enumerate(_parameters(optimizer)):
            if parameter.grad is not None:
                self._play.note(f"the gradient of parameter {number} {tuple(parameter.shape)}", parameter.grad)

    def _after(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if optimizer is not self._first:
            return
        self._write(MICRO_BATCH, self._play.notes())
        self._play = Play()
        self._counted.clear()
        self._step += 1
        self._note_state(optimizer)
        if self._request.kill_after is not None and self._has_saved and self._step > self._request.kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._step >= self._request.steps:
            self._tell(STOPPED)
            raise SystemExit(EXIT_OK)

    def _note_state(self, optimizer: torch.optim.Optimizer) -> None:
        play = Play()
        for number, parameter in enumerate(_parameters(optimizer)):
            play.note(f"state.models.0.parameter {number} {tuple(parameter.shape)}", parameter)
            play.note_all(f"state.optimizers.0.parameter {number}", dict(optimizer.state[parameter]))
        for number, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                if isinstance(value, bool | int | float | str):
                    play.note(f"state.optimizers.0.param_groups.{number}.{name}", value)
        self._write(STATE, play.notes())

    # ---- its checkpoints -----------------------------------------------------------------------------------------

    def _save(self, plain: Callable[..., None], value: object, file: object, *args: object, **options: object) -> None:
        if not isinstance(file, str | os.PathLike):
            plain(value, file, *args, **options)
            return
        self._saves.mkdir(exist_ok=True)
        plain(value, self._place_of(file), *args, **options)
        self._has_saved = True
        self._tell(SAVED)

    def _load(self, plain: Callable[..., Any], file: object, *args: object, **options: object) -> Any:
        if isinstance(file, str | os.PathLike) and os.access(self._place_of(file), os.R_OK):
            self._tell(LOADED)
            file = self._place_of(file)
        return plain(file, *args, **options)

    def _found(self, plain: Callable[..., bool]) -> Callable[..., bool]:
        """A function in the place of one that tells whether a file is there: what was saved is."""

        def found(path: Any, *args: Any, **options: Any) -> bool:
            is_path = isinstance(path, str | os.PathLike)
            return plain(path, *args, **options) or (is_path and os.access(self._place_of(path), os.R_OK))

        return found

    def _place_of(self, file: str | os.PathLike[str]) -> str:
        """Where a file of the script's is instead."""
        path = os.path.abspath(os.fspath(file))
        return os.path.join(self._saves, f"{zlib.crc32(path.encode()):08x}-{os.path.basename(path)}")

    # ---- what it writes ------------------------------------------------------------------------------------------

    def _tell(self, what: str) -> None:
        self._file.write(f"{line_of(ABOUT, 0, 0, {what: ('True', '')})}\n")
        self._file.flush()

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
