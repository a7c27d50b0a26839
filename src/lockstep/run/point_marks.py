"""Cheap marks by which one sees that the script has changed its state since the last step's body was over.

    the body of step 3001    if run.progress.step == 3000: lower the learning rate     made once more after a resume
                             run.step(loss)

They are taken after each step, so they look at no tensor's values and at no long list from its beginning: options of
optimizers, how often each tensor was changed in place, and what is kept, as far as it can be seen at a glance.
"""

from __future__ import annotations

import itertools
from typing import Any, Final

import torch
from torch import nn

from lockstep.run.kept import PlainValue, Stateful
from lockstep.run.state import State

_GLANCE: Final = 4  # values of a list or dict, the newest ones
_DEPTH: Final = 3  # of lists within lists


def point_marks(state: State) -> object:
    """Compares as another value where something has changed; some microseconds, and some for each ten parameters."""
    return (
        [[_options(group) for group in optimizer.param_groups] for optimizer in state.optimizers],
        [p._version for parameters in state.parameters for p in parameters],
        {name: _of_kept(value) for name, value in state.kept.items()},
    )


def _options(group: dict[str, Any]) -> list[object]:
    return [_of(value, _DEPTH) for name, value in group.items() if name != "params"]


def _of_kept(value: Stateful) -> object:
    if isinstance(value, PlainValue):
        return _of(value.value, _DEPTH)
    if isinstance(value, nn.Module):  # such as an average of the weights: all of it is changed, or nothing
        first = next(itertools.chain(value.parameters(), value.buffers()), None)
        return None if first is None else _of(first, 0)
    # What it says of itself may be a copy of much.
    held = getattr(value, "__dict__", {})
    return _of({name: one for name, one in held.items() if _is_plain(one)}, _DEPTH)


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str | list | tuple | dict | torch.Tensor)


def _of(value: object, depth: int) -> object:
    if isinstance(value, torch.Tensor):
        return id(value), 0 if value.is_inference() else value._version
    if isinstance(value, float):
        return repr(value)  # one that is not a number is equal to itself then
    if isinstance(value, dict) and depth:
        newest = itertools.islice(reversed(value.items()), _GLANCE)
        return len(value), [(key, _of(held, depth - 1)) for key, held in newest]
    if isinstance(value, list | tuple) and depth:
        return len(value), [_of(held, depth - 1) for held in value[-_GLANCE:]]
    return value if isinstance(value, bool | int | str | bytes | None) else id(value)
