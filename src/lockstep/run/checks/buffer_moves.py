"""How the micro-batches of a step move buffers, and whether a step then moves these as one large batch would.

    mean.lerp_(x.mean(0), 0.1)                  all numbers in each micro-batch: the mean of the moves is right
    memory[indices] = features                  other rows in each micro-batch: each would move by a part of its way
    queue = torch.cat([keys, queue])[:1000]     rows move on by the samples of a micro-batch
    place += len(keys)                          moves by the samples of a micro-batch, not of the step
    used += labels.bincount(minlength=10)       so do numbers that count kinds of samples

The last four are told to the user. Torch's own normalisations are left alone.
"""

from __future__ import annotations

from typing import Final

import torch
from torch.nn.modules.batchnorm import _NormBase

from lockstep.batch import MicroBatchPosition
from lockstep.formatting import plural
from lockstep.run.metrics.progress_reporter import RankWarnings
from lockstep.run.state.registered import State
from lockstep.torch_private import own_buffers

_MOST_BYTES: Final = 64 << 20  # of a buffer that is looked at
_WAY_OUT: Final = (
    "Keep it as a tensor, run.keep(name=tensor), and fill it where run.step(loss) returns True, with what run.gather "
    'has from all bodies of the step ("A memory of earlier outputs" in docs/script.md)'
)


class BufferMoves:
    """Looks at the buffers of a run's models in checked steps, on one rank.

    Args:
        state: what the run holds.
        warnings: tells the user.
    """

    def __init__(self, state: State, warnings: RankWarnings) -> None:
        self._state: Final = state
        self._warnings: Final = warnings
        self._before: dict[str, torch.Tensor] = {}
        self._step = -1
        #: The rows of a buffer that an earlier micro-batch of the step has changed.
        self._rows: dict[str, set[int]] = {}

    def begin(self, position: MicroBatchPosition, step: int) -> None:
        """Copy the buffers before the forward pass of a micro-batch in a checked step, which is step ``step``."""
        if step != self._step:
            self._step, self._rows = step, {}
        is_looked_at = position.is_checked and not (position.is_replay or position.is_padding)
        is_part = position.samples < position.step_samples
        self._before = {name: b.clone() for name, b in self._buffers().items()} if is_looked_at and is_part else {}

    def end(self, position: MicroBatchPosition) -> None:
        """Tell the user which buffers a step will not move as one large batch would. On a GPU this waits for them."""
        before, self._before = self._before, {}
        now = self._buffers() if before else {}
        for name, was in before.items():
            if name in now and now[name].shape == was.shape:
                self._look_at(name, was, now[name], position)

    def _buffers(self) -> dict[str, torch.Tensor]:
        return {
            f"{path}.{name}" if path else name: buffer
            for model in self._state.models
            for path, module in model.named_modules()
            if not isinstance(module, _NormBase)
            for name, buffer in own_buffers(module).items()
            if buffer is not None and not buffer.is_meta and buffer.nbytes <= _MOST_BYTES
        }

    def _look_at(self, name: str, was: torch.Tensor, now: torch.Tensor, position: MicroBatchPosition) -> None:
        changed = now != was
        samples, of_step = position.samples, position.step_samples
        if not changed.any():
            return
        if _counts(was, now, samples):
            self._warnings.add(
                f"the buffer {name} moved by {samples}, the samples of a micro-batch: a step moves it by as much, and "
                f"not by its {of_step} samples. A number of samples is counted where run.step(loss) returns True, in a "
                "value of run.keep; a place in a queue goes with the queue",
                about="a buffer that moves by the samples of a micro-batch",
            )
        elif was.numel() > 1 and _moves_on(was, now, samples):
            self._warnings.add(
                f"the rows of the buffer {name} moved on by {plural(samples, 'sample')} in one micro-batch: after a "
                f"step of {of_step} it would hold means over micro-batches, of unrelated rows. {_WAY_OUT}",
                about="a buffer whose rows move on",
            )
        else:
            rows = _changed_rows(changed, samples)
            others = self._rows.setdefault(name, rows)
            if others is not rows and rows and others and others.isdisjoint(rows):
                self._warnings.add(
                    f"each micro-batch of {plural(samples, 'sample')} changed {plural(samples, 'row')} of its own of "
                    f"the buffer {name}: a step moves each by the mean over all micro-batches, a part of its way. "
                    f"{_WAY_OUT}",
                    about="a buffer with rows for samples",
                )


def _counts(was: torch.Tensor, now: torch.Tensor, samples: int) -> bool:
    """Whether a buffer has counted ``samples``, more than 1: in one number, or of each kind for itself."""
    if samples == 1 or was.dtype == torch.bool or was.is_complex():
        return False
    moved = now.double() - was.double()
    return bool((moved.sum() == samples) & (moved >= 0).all() & (moved == moved.round()).all())


def _moves_on(was: torch.Tensor, now: torch.Tensor, rows: int) -> bool:
    """Whether ``now`` is ``was`` with new rows, or columns, at one end, and as many fewer at the other."""
    for dim, size in enumerate(was.shape):
        left = size - rows
        for to, start in ((rows, 0), (0, rows)) if left > rows else ():
            kept = was.narrow(dim, start, left)
            if kept.any() and torch.equal(now.narrow(dim, to, left), kept):
                return True
    return False


def _changed_rows(changed: torch.Tensor, samples: int) -> set[int]:
    """The rows of a matrix that have changed, if these are as many as ``samples`` and others have not; else none."""
    if changed.dim() < 2 or not 1 < samples < len(changed):
        return set()
    rows = changed.flatten(1).any(1).nonzero().flatten().tolist()
    return set(rows) if len(rows) == samples else set()
