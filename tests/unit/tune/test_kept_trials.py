"""Which trials keep their checkpoints, in whatever order trials end."""

from hypothesis import given
from hypothesis import strategies as st

from lockstep.tune.results.result import rank_of
from lockstep.tune.search.pareto import front_of
from lockstep.tune.workers.search_worker import KeptTrials
from made_trials import trial

LOSSES = st.integers(1, 2).flatmap(
    lambda size: st.lists(st.tuples(*[st.integers(0, 4).map(float)] * size), max_size=20)
)


@given(losses=LOSSES, most=st.integers(0, 4), data=st.data())
def test_the_best_and_the_front_are_kept_and_all_others_are_dropped_once(losses, most, data):
    violations = data.draw(st.lists(st.sampled_from([0.0, 0.0, 1.0]), min_size=len(losses), max_size=len(losses)))
    trials = [trial(n, [one[0]], losses=one, violation=violations[n]) for n, one in enumerate(losses)]
    kept = KeptTrials(most, len(losses[0]) if losses else 1)
    ever, gone, needed, ended = set(), set(), data.draw(st.sets(st.integers(0, 20))), []
    for one in data.draw(st.permutations(trials)):
        kept.add([one])
        ended.append(one)
        expected = {best.number for best in sorted(ended, key=rank_of)[:most]}
        feasible = [other for other in ended if not other.violation]
        if most and len(one.losses) > 1:
            expected |= {feasible[index].number for index in front_of([other.losses for other in feasible])}
        assert {other.number for other in ended if other.number in kept} == expected
        ever |= expected
        now = kept.take_dropped(needed)
        assert not now & (gone | needed | expected)
        gone |= now
    gone |= kept.take_dropped(set())
    assert gone == {number for number in ever if number not in kept}
