"""The state between a step and its end, while the script is in the rest of the body, or has left the loop.

           made              ended
ENDED ------------> BODY ----------------> ENDED      where a resume goes on
  |                   |
  | left              | left
  v                   v       compared
LEFT <-- ended -- LEFT_BODY ----------> LEFT_COMPARED     a resume cannot be brought behind a break
  |                   |                       |
  | taken_up          | taken_up              | taken_up     the next pass, or the outer loop's next turn
  v                   v                       v
ENDED               BODY                  COMPARED -- ended --> ENDED
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Final, Literal

Event = Literal["made", "left", "compared", "taken_up", "ended"]


class StepEnd(Enum):
    """The state of the last step's end."""

    ENDED = auto()  #: the step has ended, or there was none
    BODY = auto()  #: a step was made, and the body of the loop goes on
    COMPARED = auto()  #: ranks were compared after the step, where the loop was left; saving and stopping are to come
    LEFT = auto()  #: the loop was left by ``break``, and the step before it has ended
    LEFT_BODY = auto()  #: the loop was left by ``break`` in the body in which a step was made
    LEFT_COMPARED = auto()  #: as ``LEFT_BODY``, and ranks were compared

    @property
    def is_to_come(self) -> bool:
        """Whether a step was made that has not ended."""
        return self not in (StepEnd.ENDED, StepEnd.LEFT)

    @property
    def is_compared(self) -> bool:
        """Whether a step has not ended, after which ranks were compared already."""
        return self in (StepEnd.COMPARED, StepEnd.LEFT_COMPARED)

    @property
    def is_left(self) -> bool:
        """Whether the loop was left by ``break``, and the script is not yet where a resume can go on."""
        return self in (StepEnd.LEFT, StepEnd.LEFT_BODY, StepEnd.LEFT_COMPARED)

    def after(self, event: Event) -> StepEnd:
        """The state after ``event``, which may be this state.

        Raises:
            KeyError: for an event that cannot happen in this state.
        """
        return _AFTER[event][self]


#: An event cannot happen in a state that is missing in its row.
_AFTER: Final[Mapping[Event, Mapping[StepEnd, StepEnd]]] = {
    "made": {StepEnd.ENDED: StepEnd.BODY, StepEnd.BODY: StepEnd.BODY},
    "left": {
        StepEnd.ENDED: StepEnd.LEFT,
        StepEnd.BODY: StepEnd.LEFT_BODY,
        StepEnd.LEFT: StepEnd.LEFT,
        StepEnd.LEFT_BODY: StepEnd.LEFT_BODY,
    },
    "compared": {StepEnd.BODY: StepEnd.COMPARED, StepEnd.LEFT_BODY: StepEnd.LEFT_COMPARED},
    "taken_up": {
        StepEnd.ENDED: StepEnd.ENDED,
        StepEnd.BODY: StepEnd.BODY,
        StepEnd.COMPARED: StepEnd.COMPARED,
        StepEnd.LEFT: StepEnd.ENDED,
        StepEnd.LEFT_BODY: StepEnd.BODY,
        StepEnd.LEFT_COMPARED: StepEnd.COMPARED,
    },
    "ended": {
        StepEnd.ENDED: StepEnd.ENDED,
        StepEnd.BODY: StepEnd.ENDED,
        StepEnd.COMPARED: StepEnd.ENDED,
        StepEnd.LEFT: StepEnd.LEFT,
        StepEnd.LEFT_BODY: StepEnd.LEFT,
        StepEnd.LEFT_COMPARED: StepEnd.LEFT,
    },
}
