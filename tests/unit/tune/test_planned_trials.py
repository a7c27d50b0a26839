"""Trials that are bound to their numbers: each once, whatever several workers want at the same time."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import SettingError
from lockstep.tune.record.planned_trials import PlannedTrials
from lockstep.tune.record.trial_claims import TrialClaims

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("claim"), st.integers(1, 3)),
        st.tuples(st.just("enqueue"), st.integers(1, 3)),
        st.tuples(st.just("repeat"), st.lists(st.tuples(st.integers(0, 2), st.integers(1, 2)), unique=True)),
    ),
    max_size=12,
)


@given(steps=STEPS, least=st.integers(0, 3))
def test_each_is_bound_once_and_never_to_what_is_claimed(tmp_path_factory, steps, least):
    directory, enqueued, wanted, bound = tmp_path_factory.mktemp("search"), [], set(), {}
    with contextlib.closing(TrialClaims(directory)) as claims, contextlib.closing(TrialClaims(directory)) as others:
        workers = PlannedTrials(directory, claims), PlannedTrials(directory, others)
        for index, (what, given_) in enumerate(steps):
            planned = workers[index % 2]
            if what == "claim":
                for _ in range(given_):
                    number = claims.claim(0, 10**6)
                    bound[number] = planned.by_number().get(number)
            elif what == "enqueue":
                new = [{"x": len(enqueued) + place} for place in range(given_)]
                enqueued += new
                assert min(planned.enqueue(new, least, again=True)) >= max(claims.count(), least)
            else:
                wanted |= set(given_)
                for worker in workers:  # both may see at a time what is to be repeated
                    worker.repeat(given_, least)
        found = list(workers[0].by_number().values())
        assert workers[1].by_number() == workers[0].by_number()
    assert [one.params for one in found if one.repeats is None] == enqueued
    assert sorted((one.repeats, one.repeat) for one in found if one.repeats is not None) == sorted(wanted)
    # What a worker has claimed stays what it was.
    assert all(workers[0].by_number().get(number) == before for number, before in bound.items())


def test_what_is_damaged_is_said(tmp_path):
    (tmp_path / "planned.json").write_text('[{"number": "3"}]')
    with (
        contextlib.closing(TrialClaims(tmp_path)) as claims,
        pytest.raises(SettingError, match=r"planned.json is damaged"),
    ):
        PlannedTrials(tmp_path, claims).by_number()


def test_what_was_enqueued_before_is_not_enqueued_again(tmp_path):
    with contextlib.closing(TrialClaims(tmp_path)) as claims:
        planned = PlannedTrials(tmp_path, claims)
        assert planned.enqueue([{"x": 1}, {"x": 1}], 0, again=False) == (0, 1)
        assert planned.enqueue([{"x": 1}, {"x": 2}, {"x": 1}, {"x": 1}], 0, again=False) == (2, 3)
        assert [one.params["x"] for one in planned.by_number().values()] == [1, 1, 2, 1]
