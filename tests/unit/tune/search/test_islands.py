"""Islands: who lives where, step by step."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import SettingError
from lockstep.tune.search import Individual, Islands, Move, Residents, plan_emigration, plan_replacement

WORKERS = 5


def evolve(islands, steps, seed):
    """A search of `WORKERS` workers in turns, and its records in their order; losses are drawn."""
    random, residents, records = np.random.default_rng(seed), Residents(), []
    for number in range(steps):
        worker = int(random.integers(WORKERS))
        island = islands.island_of(worker)
        records.append(Individual(number, (float(number),), (random.normal(),), island=island, worker=worker))
        residents.add_individual(records[-1])
        for plan in (
            plan_emigration(islands, residents, worker, WORKERS, random),
            plan_replacement(islands, residents, worker, random),
        ):
            for move in plan:
                records.append(move)
                residents.add_move(move)
    return residents, records


def replayed(records):
    residents = Residents()
    for record in records:
        (residents.add_move if isinstance(record, Move) else residents.add_individual)(record)
    return residents


def oracle(islands, records):
    """Who lives where, by hand: one set for each island, changed record by record in the order of events."""
    living = [set() for _ in range(islands.count)]
    for record in records:
        if isinstance(record, Individual):
            living[record.island].add(record.number)
        elif record.kind == "moved":
            living[record.source].remove(record.number)
            assert record.number not in living[record.target]
            living[record.target].add(record.number)
        elif record.kind == "copied":
            assert record.number in living[record.source]
            assert record.number not in living[record.target], "nobody is sent where it lives"
            living[record.target].add(record.number)
        else:
            assert record.replaced_by in living[record.target]
            living[record.source].remove(record.number)
    return living


any_islands = st.builds(
    Islands,
    sizes=st.sampled_from([(2, 3), (1, 1, 3), (1, 1, 1, 1, 1)]),
    migration=st.sampled_from([0.3, 1.0]),
    pollination=st.booleans(),
    emigrants=st.sampled_from(["best", "worst", "uniform", "tournament"]),
    immigrants=st.sampled_from(["best", "worst", "uniform", "tournament"]),
)


@given(any_islands, st.integers(0, 2**32))
def test_who_lives_where_is_what_happened_step_by_step(islands, seed):
    residents, records = evolve(islands, 60, seed)
    expected = oracle(islands, records)
    assert [{one.number for one in residents.on(island)} for island in range(islands.count)] == expected
    if islands.pollination:
        assert sum(map(len, expected)) >= 60 - sum(isinstance(one, Move) and one.kind == "replaced" for one in records)
    else:
        assert sorted(number for living in expected for number in living) == list(range(60)), (
            "emigrants leave, none is lost"
        )


@given(any_islands, st.integers(0, 2**32), st.randoms(use_true_random=False))
def test_the_order_of_learning_and_a_second_time_change_nothing(islands, seed, shuffler):
    residents, records = evolve(islands, 40, seed)
    shuffled = records + records[::3]
    shuffler.shuffle(shuffled)
    again = replayed(shuffled)
    for island in range(islands.count):
        assert {one.number for one in again.on(island)} == {one.number for one in residents.on(island)}
        for worker in range(WORKERS):
            ours, theirs = (known.entrusted(island, worker) for known in (residents, again))
            assert {one.number for one in ours} == {one.number for one in theirs}
    assert [again.without_place(worker) for worker in range(WORKERS)] == [
        residents.without_place(worker) for worker in range(WORKERS)
    ]


@given(any_islands, st.integers(0, 2**32), st.integers(1, 20))
def test_changes_add_up_to_who_lives_there(islands, seed, every):
    _, records = evolve(islands, 40, seed)
    residents, known = Residents(), set()
    for count, record in enumerate(records):
        (residents.add_move if isinstance(record, Move) else residents.add_individual)(record)
        if count % every == 0:
            came, gone = residents.take_changes(1)
            assert not known & {one.number for one in came}
            known = (known | {one.number for one in came}) - set(gone)
            assert known == {one.number for one in residents.on(1)}


def ladder(residents, losses, island=0, worker=0):
    for number, loss in losses.items():
        residents.add_individual(Individual(number, (0.0,), (loss,), island=island, worker=worker))


def test_true_migration_sends_different_individuals_by_the_topology():
    islands = Islands(sizes=(1, 2, 1), migration=1, pollination=False, topology=((0, 2, 1), (0, 0, 0), (0, 0, 0)))
    residents, random = Residents(), np.random.default_rng(0)
    ladder(residents, {7: 0.3, 8: 0.1})
    assert plan_emigration(islands, residents, 0, 4, random) == (), "three are asked for, two are there"
    ladder(residents, {9: 0.2, 11: 0.4})
    moves = plan_emigration(islands, residents, 0, 4, random)
    assert sorted(move.number for move in moves) == [7, 8, 9], "the best, each once"
    assert sorted(move.target for move in moves) == [1, 1, 2]
    assert all(move.responsible in islands.workers_of(move.target, 4) for move in moves)


def test_only_whom_an_individual_is_entrusted_to_sends_it_on():
    islands = Islands(sizes=(1, 2), migration=1, pollination=False)
    residents, random = Residents(), np.random.default_rng(0)
    ladder(residents, {4: 0.5})
    (move,) = plan_emigration(islands, residents, 0, 3, random)
    residents.add_move(move)
    assert plan_emigration(islands, residents, 0, 3, random) == ()
    other = 3 - move.responsible
    for _ in range(20):  # with a probability of one half
        assert plan_emigration(islands, residents, other, 3, random) == ()
    back = next(found for _ in range(99) if (found := plan_emigration(islands, residents, move.responsible, 3, random)))
    assert (back[0].number, back[0].target, back[0].step) == (4, 0, 1)


def test_pollination_copies_the_best_and_the_worst_gives_place():
    islands, residents, random = Islands(sizes=(1, 1), migration=1), Residents(), np.random.default_rng(0)
    ladder(residents, {0: 0.1, 1: 0.2}, island=0, worker=0)
    ladder(residents, {2: 0.3, 3: 0.4}, island=1, worker=1)
    (copy,) = plan_emigration(islands, residents, 0, 2, random)
    assert (copy.kind, copy.number, copy.target, copy.responsible) == ("copied", 0, 1, 1)
    residents.add_move(copy)
    assert 0 in residents.on(0)
    assert 0 in residents.on(1)
    assert plan_replacement(islands, residents, 0, random) == ()
    (place,) = plan_replacement(islands, residents, 1, random)
    assert (place.number, place.replaced_by) == (3, 0)
    residents.add_move(place)
    assert plan_replacement(islands, residents, 1, random) == ()
    assert {one.number for one in residents.on(1)} == {0, 2}
    (following,) = plan_emigration(islands, residents, 0, 2, random)
    assert following.number == 1, "the best has been there"


def test_an_island_sends_with_its_probability_divided_by_its_workers():
    islands, residents, random = (
        Islands(sizes=(4, 1), migration=0.8, pollination=True),
        Residents(),
        np.random.default_rng(0),
    )
    ladder(residents, {0: 0.1})
    sent = sum(bool(plan_emigration(islands, residents, 0, 5, random)) for _ in range(4000))
    assert sent / 4000 == pytest.approx(0.2, abs=0.02)


@given(st.integers(1, 6), st.integers(1, 20))
def test_every_worker_has_an_island_and_sizes_are_even(count, workers):
    islands = Islands(count)
    sizes = [len(islands.workers_of(island, workers)) for island in range(count)]
    assert sum(sizes) == workers
    assert max(sizes) - min(sizes) <= 1


def test_sizes_are_as_given_and_latecomers_go_round():
    islands = Islands(sizes=(1, 3))
    assert [islands.island_of(worker) for worker in range(7)] == [0, 1, 1, 1, 0, 1, 0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"count": 0}, "at least 1"),
        ({"sizes": (2, 0)}, "at least one worker"),
        ({"count": 3, "sizes": (1, 1)}, "leave count out"),
        ({"migration": 2}, "from 0 to 1"),
        ({"emigrants": "bad"}, "best, worst"),
        ({"count": 2, "algorithms": ("a", "b", "c")}, "one for each"),
        ({"count": 2, "topology": ((0, 1),)}, "2 rows of 2"),
        ({"count": 2, "topology": ((1, 1), (1, 0))}, "0 from an island to itself"),
    ],
)
def test_what_cannot_be_is_said(given, words):
    with pytest.raises(SettingError, match=words):
        Islands(**given)
