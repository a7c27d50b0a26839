"""The end of a step: which state follows which, over all that can happen."""

import itertools
from typing import get_args

import pytest

from lockstep.run.loop.step_end import Event, StepEnd

EVENTS = get_args(Event)


def after(*events):
    state = StepEnd.ENDED
    for event in events:
        state = state.after(event)
    return state


def reachable(length):
    """Every sequence of so many events that can happen."""
    for events in itertools.product(EVENTS, repeat=length):
        try:
            yield events, after(*events)
        except KeyError:
            continue


def test_every_state_can_be_reached():
    assert {state for _, state in reachable(3)} == set(StepEnd)


@pytest.mark.parametrize("length", range(6))
def test_what_the_three_questions_say_is_what_has_happened(length):
    for events, state in reachable(length):
        is_to_come = is_compared = is_left = False
        for event in events:
            is_to_come = event == "made" or (is_to_come and event != "ended")
            is_compared = event == "compared" or (is_compared and event != "ended")
            is_left = event == "left" or (is_left and event != "taken_up")
        assert (state.is_to_come, state.is_compared, state.is_left) == (is_to_come, is_compared, is_left), events


@pytest.mark.parametrize(
    ("events", "impossible"),
    [
        (("left",), "made"),
        (("made", "left", "compared"), "made"),
        ((), "compared"),
        (("made", "left", "compared"), "compared"),
        (("made", "compared"), "left"),
    ],
)
def test_no_step_is_made_outside_of_a_loop_and_none_is_compared_twice(events, impossible):
    with pytest.raises(KeyError):
        after(*events).after(impossible)


def test_what_has_ended_or_was_taken_up_stays_so():
    for _, state in reachable(3):
        for event in ("ended", "taken_up"):
            assert state.after(event).after(event) == state.after(event)
