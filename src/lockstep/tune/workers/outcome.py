"""How an objective ended on one rank: with losses, or with the reason why there are none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self, SupportsFloat

from lockstep.heartbeat import user_frame
from lockstep.peer_failure import is_peer_failure
from lockstep.records import JsonRecord


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What an objective returns for a trial with constraints.

    Args:
        losses: one number, or one for each objective; they are minimised.
        violation: by how much the constraints are violated; 0, or less, if they are satisfied.
    """

    losses: float | Sequence[float]
    violation: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome(JsonRecord):
    """How a trial ended on one rank.

    ``interrupted``: the trial is to be resumed; ``lost``: another rank has failed, and this one only lost its peer.
    """

    state: Literal["done", "stopped", "failed", "lost", "interrupted"]
    losses: tuple[float, ...] = ()
    violation: float | None = None  #: of the constraints; None: unknown
    reason: str = ""
    place: str = ""  #: of a failure: file and line
    returned: bool = False  #: the objective returned, whatever: this rank is in step with others that did

    @classmethod
    def of_result(cls, value: object, objectives: int) -> Self:
        """The outcome of an objective that returned ``value``; of several ranks, the leader's counts."""
        violation = 0.0
        if isinstance(value, Evaluated):
            violation, value = value.violation, value.losses
        values = value if isinstance(value, tuple | list) else (value,)
        try:
            losses = tuple(_number(one) for one in values)
            violation = _number(violation)
        except TypeError:
            return cls._useless(f"{_short(value)}, which is not a number")
        if len(losses) != objectives:
            given = f"{len(losses)} losses" if len(losses) != 1 else "one loss"
            return cls._useless(f"{given}, and the search has objectives={objectives}")
        if bad := [loss for loss in losses if not math.isfinite(loss)]:
            return cls._useless(f"{bad[0]}")
        if math.isnan(violation):
            return cls._useless("a violation of nan")
        return cls("done", losses, max(0.0, violation), returned=True)

    @classmethod
    def _useless(cls, what: str) -> Self:
        return cls("failed", reason=f"the objective returned {what}", returned=True)

    @classmethod
    def of_error(cls, error: BaseException) -> Self:
        """The outcome of an objective that raised ``error``."""
        file, line = user_frame(error)
        message = str(error).strip().splitlines()
        said = type(error).__name__ + (f": {message[0]}" if message else "")
        place = f"{file.rpartition('/')[2]}:{line}"
        return cls("lost" if is_peer_failure(error) else "failed", reason=f"{said} ({place})", place=place)


def _number(value: object) -> float:
    # A tensor or an array of one number is a number, a text is none.
    if isinstance(value, str | bytes) or not isinstance(value, SupportsFloat):
        raise TypeError
    try:
        return float(value)
    except (ValueError, RuntimeError, OverflowError):
        raise TypeError from None


def _short(value: object) -> str:
    text = repr(value).splitlines()[0] if repr(value) else "nothing"
    return text if len(text) <= 60 else f"{text[:57]}..."
