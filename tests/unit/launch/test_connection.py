"""How a node loses the coordinator: over all courses of silence, states only get worse until the coordinator speaks."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.launch.rendezvous.connection import Connection, next_connection
from lockstep.launch.rendezvous.plan import ElasticLimits
from lockstep.launch.timeouts import NodeTimeouts

ELASTIC = ElasticLimits(max_changes=3, lost_after_s=40.0, suspect_after_s=5.0)
FIXED = ElasticLimits(max_changes=0, lost_after_s=40.0, suspect_after_s=5.0)
LEAVES_S = NodeTimeouts(40.0).leave_after_s
ORDER = list(Connection)


@pytest.mark.parametrize("now", Connection)
@pytest.mark.parametrize(
    ("limits", "silent_s", "holds_state", "then"),
    [
        (ELASTIC, 4.9, True, Connection.CONNECTED),
        (ELASTIC, 4.9, False, Connection.CONNECTED),
        (ELASTIC, 5.0, True, Connection.WAITING),
        (ELASTIC, 5.0, False, Connection.CUT_OFF),
        (ELASTIC, LEAVES_S - 0.1, True, Connection.WAITING),
        (ELASTIC, LEAVES_S, True, Connection.LEAVING),
        (FIXED, LEAVES_S, True, Connection.WAITING),
        (ELASTIC, 39.9, True, Connection.LEAVING),
        (ELASTIC, 40.0, True, Connection.CUT_OFF),
        (FIXED, 40.0, True, Connection.CUT_OFF),
    ],
)
def test_the_state_follows_from_the_silence(now, limits, silent_s, holds_state, then):
    if now is Connection.CUT_OFF and then is not Connection.CONNECTED:
        then = Connection.CUT_OFF  # the ranks are ended already
    assert next_connection(now, silent_s, limits, holds_state=holds_state) is then


@given(st.lists(st.floats(0.0, 60.0), min_size=1, max_size=30), st.sampled_from([ELASTIC, FIXED]), st.booleans())
def test_while_the_silence_grows_no_state_is_taken_back(silences, limits, holds_state):
    states = list(
        itertools.accumulate(
            sorted(silences),
            lambda now, silent_s: next_connection(now, silent_s, limits, holds_state=holds_state),
            initial=Connection.CONNECTED,
        )
    )
    places = [ORDER.index(state) for state in states]
    assert places == sorted(places)
    assert next_connection(states[-1], 0.0, limits, holds_state=holds_state) is Connection.CONNECTED
