"""What the loop's body adds up in variables of the script, and appends to its lists.

    before a replay     running 2.1     a list of 3
    after it            running 2.8     a list of 4     put back: on one rank they are those of a plain loop

So is every variable of the script's functions that are running: each is bound to what it was bound to. On several ranks
each adds up over its own micro-batches, which is said: no other rank has it, and no checkpoint.
"""

from __future__ import annotations

import dis
import sys
from functools import cache
from types import CodeType, FrameType
from typing import Any, Final

import numpy as np
import torch

from lockstep.run.metrics.progress_reporter import ProgressReporter
from lockstep.run.source.reachable import script_frames, set_variables, variables_of

_NUMBERS: Final = (int, float, np.number)


class ScriptSums:
    """Keeps replays out of them.

    Args:
        reporter: says once that each rank adds up over its own micro-batches; None on one rank.
    """

    def __init__(self, reporter: ProgressReporter | None) -> None:
        self._reporter = reporter
        self._before: list[tuple[FrameType, dict[str, Any]]] = []
        self._sums: list[tuple[torch.Tensor, torch.Tensor]] = []  # of one number, in which the body adds; and a copy
        self._lists: list[tuple[list[Any], int]] = []

    def begin_replay(self) -> None:
        """A replay is about to be handed out: what the script's functions that are running hold."""
        if self._before:
            return
        for frame in script_frames(sys._getframe()):
            variables, names = variables_of(frame), _augmented(frame.f_code)
            self._before.append((frame, variables))
            # Of variables only: of an object that has one, all must be as it was, or nothing.
            self._lists += [(value, len(value)) for value in variables.values() if type(value) is list]
            tensors = [value for name, value in variables.items() if name in names and _is_sum(value)]
            self._sums += [(value, value.clone()) for value in tensors]

    def end_replays(self) -> None:
        """Something else is about to be handed out: what replays have changed is put back, if there were some."""
        names = []
        sums = {id(value): value for value, was in self._sums if not torch.equal(value, was)}
        for frame, before in self._before:
            now = variables_of(frame)
            changed = {name: value for name, value in before.items() if name in now and now[name] is not value}
            added = _augmented(frame.f_code)
            names += [name for name, value in changed.items() if name in added and isinstance(value, _NUMBERS)]
            names += [name for name, value in before.items() if id(value) in sums]
            if changed:
                set_variables(frame, changed)
        for value, was in self._sums:
            value.copy_(was)
        for each, length in self._lists:
            del each[length:]
        self.forget()
        if names and self._reporter is not None:
            self._reporter.say(
                f"the loop's body adds up {', '.join(names[:4])}: each rank over its own micro-batches alone, and in "
                "no checkpoint; run.measure(...) gives means over all ranks"
            )
            self._reporter = None

    def forget(self) -> None:
        """The loop is left, in a replay perhaps: what its body has done stays, as it was done once."""
        self._before, self._sums, self._lists = [], [], []


def _is_sum(value: object) -> bool:
    return type(value) is torch.Tensor and value.numel() == 1 and not value.requires_grad


@cache
def _augmented(code: CodeType) -> frozenset[str]:
    """The variables that ``code`` changes by ``+=`` and its like."""
    names = set()
    is_augmented = False
    for step in dis.get_instructions(code):
        if step.opname == "BINARY_OP":
            is_augmented = step.argrepr.endswith("=")
        elif step.opname.startswith("STORE_"):
            if is_augmented and step.opname in ("STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF"):
                names.add(step.argval)
            is_augmented = False
    return frozenset(names)
