"""Which trials were an improvement, in whatever order they are read."""

import math

from hypothesis import given
from hypothesis import strategies as st

from lockstep.tune.record.trial_history import Improvements
from made_trials import trial

LOSSES = st.lists(st.sampled_from([3.0, 2.0, 1.99, 1.0, -1.0, math.nan]), max_size=20)


def ended(losses):
    """Trials that have ended in this order; NaN: it has failed."""
    return [trial(n, [], "failed") if math.isnan(loss) else trial(n, [loss]) for n, loss in enumerate(losses)]


def expected(losses, least):
    best, since, longest = None, 0, 0
    for loss in losses:
        if not math.isnan(loss) and (best is None or best - loss > least * abs(best)):
            best, since = loss, 0
        else:
            since += 1
        longest = max(longest, since)
    return best, since, longest


@given(losses=LOSSES, least=st.sampled_from([0.0, 0.01, 0.5]), data=st.data())
def test_the_order_in_which_trials_are_read_changes_nothing(losses, least, data):
    improvements = Improvements(least)
    waiting = data.draw(st.permutations(ended(losses)))
    while waiting:
        count = data.draw(st.integers(1, len(waiting)))
        improvements.add(waiting[:count])
        waiting = waiting[count:]
        improvements.newest  # noqa: B018 - what was computed before all had come is computed anew
    newest = improvements.newest
    best = None if newest.best is None else newest.best.loss
    assert (best, newest.since, newest.longest) == expected(losses, least)


def test_a_whole_training_is_better_than_one_that_was_cut_short():
    improvements = Improvements()
    improvements.add([trial(0, [1.0], "stopped"), trial(1, [2.0]), trial(2, [0.5], "stopped"), trial(3, [1.5])])
    assert improvements.newest.best.number == 3
    assert improvements.newest.before.number == 1
