"""Ranks that step by themselves for long, and an outer optimizer that steps by how far they got."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from local_loops import Loop, adamw, ends, met, plain_sgd, sgd, unlike
from lockstep.batch import BatchPlan
from lockstep.collectives import single_rank_group
from lockstep.errors import SettingError
from lockstep.strategies import StrategyContext, open_strategy
from lockstep.strategies.local.diloco import OuterOptimizer, Schedule
from lockstep.strategies.local.flat_ranges import by_dtype, cut, gather, scatter, sizes_of
from lockstep.testing import state_hash
from worlds import on_world

MAKES = {"sgd": sgd, "plain_sgd": plain_sgd, "adamw": adamw}


# ---- plans -----------------------------------------------------------------------------------------------------------


@st.composite
def schedules(draw):
    period = draw(st.integers(1, 60))
    fragments = draw(st.integers(1, period))
    return Schedule(period, fragments, draw(st.integers(0, period // fragments - 1)))


@given(schedules(), st.integers(0, 5))
def test_each_fragment_begins_once_a_period_and_is_applied_before_the_next_begins(schedule, periods):
    first = periods * schedule.period + 1
    steps = range(first, first + schedule.period)
    begun = [f for step in steps if (f := schedule.begins(step)) is not None]
    assert begun == list(range(schedule.fragments))
    assert schedule.begins(steps[-1]) == schedule.fragments - 1

    under_way = None
    for step in range(1, 3 * schedule.period + 1):
        beginning = schedule.begins(step)
        if beginning is not None:
            assert under_way is None
            under_way, began = beginning, step
        applied = schedule.applies(step)
        if applied is not None:
            assert (applied, step) == (under_way, began + schedule.overlap)
            under_way = None


@given(st.lists(st.integers(0, 30), max_size=8), st.integers(1, 9))
def test_a_cut_covers_each_element_once_in_even_ranges(sizes, ranges):
    cuts = cut(sizes, ranges)
    covered = [(p.index, i) for pieces in cuts for p in pieces for i in range(p.first, p.end)]
    assert covered == [(place, i) for place, size in enumerate(sizes) for i in range(size)]
    lengths = [sum(p.end - p.first for p in pieces) for pieces in cuts]
    assert len(cuts) == ranges
    assert max(lengths) - min(lengths) <= 1


@given(st.integers(1, 7))
def test_what_is_gathered_can_be_scattered_whatever_lies_where(ranges):
    tensors = [
        torch.randn(3, 4).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(4, 6)[:, 1:3],
        torch.tensor(2.5),
        torch.randn(3, dtype=torch.complex64),
        torch.randn(0),
        torch.randn(7, dtype=torch.float64),
    ]
    copies = [torch.zeros_like(t) for t in tensors]
    copies[2] = torch.zeros(4, 6)[:, 1:3]
    kinds = by_dtype([torch.view_as_real(t) if t.is_complex() else t for t in tensors])
    for places in kinds:
        mine, theirs = [tensors[p] for p in places], [copies[p] for p in places]
        for pieces in cut(sizes_of(mine), ranges):
            scatter(theirs, pieces, gather(mine, pieces, torch.device("cpu")))
    for tensor, copy in zip(tensors, copies, strict=True):
        assert torch.equal(tensor, copy)


# ---- one rank --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("fragments", [1, 3])
def test_the_outer_optimizer_is_torchs_nesterov(momentum, fragments):
    parameters = [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(5).double()), nn.Parameter(torch.randn(2))]
    starts = [nn.Parameter(p.detach().clone()) for p in parameters]
    reference = torch.optim.SGD(starts, lr=0.7, momentum=momentum, nesterov=momentum > 0)
    outer = OuterOptimizer(0.7, momentum, fragments)
    outer.add_parameters(parameters)
    for _ in range(3):
        for parameter, start in zip(parameters, starts, strict=True):
            with torch.no_grad():
                parameter.add_(torch.randn_like(parameter))
            start.grad = start.detach() - parameter.detach()
        reference.step()
        for fragment in range(fragments):
            outer.step(fragment, outer.pseudo_gradient(fragment), 0.0)
        for parameter, start in zip(parameters, starts, strict=True):
            assert torch.equal(parameter, start)


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("diloco:period=0", "period=0, .*; give a period from 1, and from 1 to 1 fragments"),
        ("diloco:period=4,fragments=5", "give a period from 1, and from 1 to 4 fragments"),
        ("diloco:period=9,fragments=2,overlap=4", "begins every 4 steps, .*; give an overlap from 0 to 3"),
        ("diloco:outer_lr=0", "outer_lr=0, outer_momentum=0.9, mix=0.5; give an outer_lr above 0"),
        ("diloco:outer_momentum=1", "from 0 to below 1"),
        ("diloco:wire=fp8", "wire='fp8'; give one of fp32, bf16, fp16"),
    ],
)
def test_bad_options_are_refused(word, says):
    with pytest.raises(SettingError, match=says):
        Loop(single_rank_group(), word)


def test_fp16_is_refused():
    with pytest.raises(SettingError, match="use precision='bf16'"):
        open_strategy("diloco", StrategyContext(single_rank_group(), BatchPlan(4, 1, 1).run, dtype=torch.float16))


def test_on_one_rank_the_outer_optimizer_works_alone():
    word = "diloco:period=3,outer_lr=1,outer_momentum=0,fragments=3"
    torch.testing.assert_close(
        Loop(single_rank_group(), word).steps(9).parameters(),
        Loop(single_rank_group(), "none").steps(9).parameters(),
        rtol=0,
        atol=1e-5,
    )
    assert not torch.equal(
        Loop(single_rank_group(), "diloco:period=3").steps(3).parameters(),
        Loop(single_rank_group(), "none").steps(3).parameters(),
    )


@pytest.mark.parametrize("steps", [0, 2, 3])
def test_what_a_script_fills_in_is_where_the_outer_optimizer_starts(steps):
    """As with weights that were trained elsewhere; else it would count the jump as progress. Not within a period."""
    loop = Loop(single_rank_group(), "diloco:period=3,outer_momentum=0").steps(steps)
    before = loop.strategy.state_dict()["outer"]["start"]
    before = torch.cat([s.reshape(-1) for s in before])
    loop.net.load_state_dict({name: torch.full_like(value, 5) for name, value in loop.net.state_dict().items()})
    loop.strategy.resync()
    after = torch.cat([s.reshape(-1) for s in loop.strategy.state_dict()["outer"]["start"]])
    assert torch.equal(after, before if steps == 2 else torch.full_like(before, 5))


# ---- on ranks --------------------------------------------------------------------------------------------------------


def beside_local_sgd(word, steps):
    with met() as group:
        loops = [Loop(group, w).steps(steps) for w in (word, "local-sgd:period=3")]
        for ours, theirs in zip(*(loop.net.buffers() for loop in loops), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
        return float((loops[0].parameters() - loops[1].parameters()).abs().max()), unlike(loops[0])


def through_periods(word, steps):
    """After each step, how far ranks lie apart, and which of their buffers and of their fragments are the same."""
    with met() as group:
        loop, seen = Loop(group, word), []
        for _ in range(steps):
            loop.step()
            buffers = group.gather_objects(state_hash(dict(loop.net.named_buffers()), loop.net.teacher), "buffers")
            seen.append((unlike(loop), len(set(buffers))))
        return seen, state_hash(loop.strategy.state_dict()["outer"])


def resumed(word, make, after, looks=False):
    """Whether a run that was saved after so many steps, and gone on with by new objects, ends in the same bits."""
    with met() as group:
        loop, other = Loop(group, word, MAKES[make]), Loop(group, word, MAKES[make], seed=99)
        loop.steps(after)
        before = loop.hash()
        tree = loop.save()
        assert loop.hash() == before, "saving has changed what is trained"
        other.load(tree)
        assert other.hash() == before
        apart = unlike(loop)
        for one in (loop, other):
            one.step(2)  # leaves a rank of three without a sample
            for _ in range(7):
                if looks:
                    with one.strategy.evaluating():
                        assert unlike(one) == 0
                    one.strategy.resync()  # as at the beginning of an epoch
                one.step()
        plain = Loop(group, word, MAKES[make]).steps(after)
        plain.step(2)
        plain.steps(7)
        under_way = bool(tree["strategy"]["arrived"])
        same = loop.hash() == other.hash() == plain.hash()
        ends = [state_hash(one.save()) for one in (loop, other, plain)]
        return same and len(set(ends)) == 1, apart, under_way, loop.said + other.said


def saved_for_elsewhere(word, steps):
    with met() as group:
        return Loop(group, word).steps(steps).save()


def goes_on_from(tree, word, same_strategy):
    with met() as group:
        loop = Loop(group, word, seed=7).load(tree, same_strategy=same_strategy)
        begins = state_hash(loop.net) == state_hash(dict(tree["model"]))
        outer = loop.strategy.state_dict()["outer"]
        saved = tree["strategy"]["outer"]
        kept = state_hash(outer) == state_hash(saved)
        rests = all(not v.any() for v in outer["velocity"]) and all(
            torch.equal(s, p) for s, p in zip(outer["start"], loop.target.parameters, strict=True)
        )
        loop.steps(8)
        return begins, kept, rests, loop.said


def settles(word):
    with met() as group:
        loop = Loop(group, word).steps(7)
        assert unlike(loop) > 1e-3
        expected = loop.save()["model"]
        loop.strategy.finish_training()
        assert state_hash(dict(loop.net.state_dict())) == state_hash(dict(expected))
        outer = loop.strategy.state_dict()["outer"]
        assert all(torch.equal(s, p) for s, p in zip(outer["start"], loop.target.parameters, strict=True))
        loop.steps(3)  # and may go on
        return True


def through_wires(steps):
    with met() as group:
        loops = [Loop(group, f"diloco:period=2,wire={wire}", plain_sgd) for wire in ("fp32", "bf16", "fp16")]
        begin = loops[0].parameters()
        found = [loop.steps(steps).parameters() for loop in loops]
        return [float((other - found[0]).norm() / (found[0] - begin).norm()) for other in found]


RESUMED = [
    ("diloco:period=4", "adamw", 6),
    ("diloco:period=4", "sgd", 8),
    ("diloco:period=4,fragments=3", "sgd", 5),
    ("diloco:period=5,overlap=3", "sgd", 6),
    ("diloco:period=6,fragments=2,overlap=2,mix=0,wire=bf16", "adamw", 4),
    ("diloco:period=6,fragments=2,overlap=2", "sgd", 7, True),
]


def test_on_two_ranks():
    alike = "diloco:period=3,outer_lr=1,outer_momentum=0"
    whole, flight = "diloco:period=4", "diloco:period=4,overlap=2"
    near, far, wires, saved, in_flight, shared, sockets, *others = on_world(
        2,
        [
            (beside_local_sgd, alike, 6),
            (beside_local_sgd, alike, 8),
            (through_wires, 8),
            (saved_for_elsewhere, whole, 6),
            (saved_for_elsewhere, flight, 5),
            *((ends, "diloco:period=4,fragments=2,overlap=1,wire=bf16", 9, nodes) for nodes in (None, 2)),
            *((resumed, *case) for case in RESUMED[3:5]),
        ],
    )
    assert shared == sockets
    for away, apart in near:
        assert away < 1e-5
        assert apart == 0
    for away, apart in far:
        assert away < 1e-5
        assert apart > 1e-3
    for same, bf16, fp16 in wires:
        assert same == 0
        assert 0 < fp16 < bf16 < 0.02
    check_resumed(RESUMED[3:5], others)
    assert in_flight[0]["strategy"]["arrived"]

    told = "the checkpoint was saved by 2 ranks that stepped by themselves: all 3 start at their mean"
    dropped = "the exchange under way when the run was saved is dropped, for its schedule was another"
    tree, flying = saved[0], in_flight[0]
    elsewhere = on_world(
        3,
        [
            (goes_on_from, tree, whole, True),
            (goes_on_from, tree, whole, False),
            (goes_on_from, flying, flight, True),
            (goes_on_from, flying, "diloco:period=4,fragments=2", True),
        ],
    )
    for ranks, kept, said in zip(elsewhere, (1, 0, 1, 1), ([told], [], [told], [told, dropped]), strict=True):
        assert ranks == [(True, bool(kept), not kept, said)] * 3


@pytest.mark.campaign
def test_on_three_ranks():
    parts, mixed, restarted, settled, shared, sockets, *others = on_world(
        3,
        [
            (through_periods, "diloco:period=4,fragments=2", 8),
            (through_periods, "diloco:period=4,overlap=2", 8),
            (through_periods, "diloco:period=4,overlap=2,mix=0", 8),
            (settles, "diloco:period=6,fragments=2,overlap=2"),
            *((ends, "diloco:period=4,fragments=2,overlap=1", 9, nodes) for nodes in (None, 3)),
            *((resumed, *case) for case in RESUMED),
        ],
    )
    for seen in (parts, mixed, restarted):
        assert all(not isinstance(rank, str) for rank in seen), seen
        assert seen[0] == seen[1] == seen[2]  # the outer optimizer is the same on all ranks
        assert [buffers for _, buffers in seen[0][0]] == [3, 3, 3, 1] * 2
    assert all(apart > 1e-3 for apart, _ in parts[0][0])
    assert all(apart > 1e-3 for apart, _ in mixed[0][0])
    assert [apart > 0 for apart, _ in restarted[0][0]] == [True] * 5 + [False] + [True] * 2
    assert settled == [True] * 3
    assert shared == sockets
    check_resumed(RESUMED, others)


def check_resumed(cases, results):
    for case, ranks in zip(cases, results, strict=True):
        for rank in ranks:
            assert not isinstance(rank, str), rank
        assert [(same, said) for same, _, _, said in ranks] == [(True, [])] * len(ranks), case
    assert [ranks[0][1] > 1e-3 for ranks in results] == [case[2] != 8 for case in cases]
    assert [ranks[0][2] for ranks in results] == ["overlap" in case[0] for case in cases]
