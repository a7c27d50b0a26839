"""Ranks that step by themselves and are averaged now and then."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from local_loops import MICRO_BATCHES, Loop, Net, adamw, batch, ends, met, plain_sgd, sgd, unlike
from lockstep.batch import BatchPlan
from lockstep.collectives import single_rank_group
from lockstep.errors import SettingError
from lockstep.strategies import StrategyContext, open_strategy
from lockstep.testing import state_hash
from worlds import on_world

MAKES = {"sgd": sgd, "plain_sgd": plain_sgd, "adamw": adamw}
STEPS = (4, 4, 2, 4, 1, 4, 3, 4)  # micro-batches of each: some steps are short, and leave ranks with none


# ---- one rank --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["local-sgd", "local-sgd:period=2,warmup=3", "local-sgd:period=1,moments=average"])
@pytest.mark.parametrize("make", [sgd, adamw])
def test_one_rank_is_none_to_the_bit(word, make):
    loops = [Loop(single_rank_group(), w, make) for w in (word, "none")]
    for loop in loops:
        for micro_batches in STEPS:
            loop.step(micro_batches)
        loop.step(counts=[5, 1, 3, 2])
    assert loops[0].hash() == loops[1].hash()


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("local-sgd:period=0", "period=0, warmup=0, node_period=0; give a period from 1"),
        ("local-sgd:warmup=-1", "warmup=-1"),
        ("local-sgd:period=8,node_period=3", "node_period=3 does not divide period=8; .* such as period=9"),
        ("local-sgd:moments=mean", "moments='mean'; give keep or average"),
        ("local-sgd:period=often", "period='often'; give a whole number"),
    ],
)
def test_bad_options_are_refused(word, says):
    with pytest.raises(SettingError, match=says):
        Loop(single_rank_group(), word)


def test_fp16_and_layers_that_meet_are_refused():
    terms = StrategyContext(single_rank_group(), BatchPlan(4, 1, 1).run, dtype=torch.float16)
    with pytest.raises(SettingError, match=r"strategy local-sgd with precision='fp16': .* use precision='bf16'"):
        open_strategy("local-sgd", terms)
    with pytest.raises(SettingError, match="sync_batchnorm needs all ranks in each forward"):
        Loop(single_rank_group(), "local-sgd", net=lambda: nn.SyncBatchNorm(3))


# ---- on ranks: each case is run on all of them, in one world ---------------------------------------------------------


def by_hand(ranks, period, steps, make):
    """The same training in one process, with nothing of Lockstep: the parameters at the end of each step, by rank."""
    torch.manual_seed(0)
    nets = [Net() for _ in range(ranks)]
    for net in nets[1:]:
        net.load_state_dict(nets[0].state_dict())
    optimizers = [make(net.parameters()) for net in nets]
    plan, seen = BatchPlan(MICRO_BATCHES, 1, ranks), []
    for step in range(steps):
        for rank, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            run = plan.run(rank)
            optimizer.zero_grad()
            for m in run:
                inputs, outputs = batch(step, m)
                (F.mse_loss(net(inputs), outputs) / len(run)).backward()
            optimizer.step()
        if (step + 1) % period == 0:
            with torch.no_grad():
                for same in zip(*(net.parameters() for net in nets), strict=True):
                    mean = torch.stack(same).mean(0)
                    for parameter in same:
                        parameter.copy_(mean)
        seen.append([torch.cat([p.detach().reshape(-1) for p in net.parameters() if p.requires_grad]) for net in nets])
    return seen


def trained_beside_one_by_hand(make):
    """Of each step the greatest difference from the same training by hand, and how far ranks lie apart."""
    with met() as group:
        loop, seen = Loop(group, "local-sgd:period=3", MAKES[make], seed=group.rank), []
        for expected in by_hand(group.size, 3, 7, MAKES[make]):
            loop.step()
            seen.append((float((loop.parameters() - expected[group.rank]).abs().max()), unlike(loop)))
        return seen


def meets_at_the_end_of_each_period():
    with met() as group:
        loop, hashes = Loop(group, "local-sgd:period=3"), []
        # As a script fills in what was trained elsewhere. A mean of equal numbers may differ from them in the last bit.
        loop.net.table.copy_(torch.tensor([0.3, 0.9]))
        loop.strategy.resync()
        for step in range(6):
            loop.step()
            hashes.append(state_hash(loop.net))
            if not step:
                moved = loop.strategy.state_dict()["replicas"]["moved"]
        still = [t for place, t in enumerate(loop.strategy._replicas._untrained) if place not in moved]
        assert [t is loop.net.table for t in still] == [True]
        return hashes, float(loop.norms[-1])


def beside_ddp(word, make, steps):
    """The greatest difference from ``ddp``; in parameters, and in buffers."""
    with met() as group:
        loops = [Loop(group, w, MAKES[make]) for w in (word, "ddp")]
        for loop in loops:
            loop.steps(steps)
        far = float((loops[0].parameters() - loops[1].parameters()).abs().max())
        return far, loops[0].hash() == loops[1].hash(), unlike(loops[0])


def resumed(word, make, after, evaluating=False, lengths=STEPS):
    """Whether a run that was saved after so many steps, and gone on with by new objects, ends in the same bits."""
    # While it warms up it is ddp, which does not keep in step what a forward pass does to a parameter.
    net = functools.partial(Net, follows="warmup" not in word)
    with met() as group:
        loop = Loop(group, word, MAKES[make], net=net)
        for place, micro_batches in enumerate(lengths):
            if place == after:
                tree, apart, before = loop.save(), unlike(loop), loop.hash()
                assert loop.hash() == before, "saving has changed what is trained"
            if evaluating:
                with loop.strategy.evaluating():
                    assert unlike(loop) == 0
            loop.step(micro_batches)
        other = Loop(group, word, MAKES[make], seed=99, net=net).load(tree)
        assert other.hash() == before
        for micro_batches in lengths[after:]:
            other.step(micro_batches)
        plain = Loop(group, word, MAKES[make], net=net)
        for micro_batches in lengths:
            plain.step(micro_batches)
        return loop.hash() == other.hash() == plain.hash(), apart, loop.said + other.said


def sees_the_mean_and_goes_on():
    """What an evaluation, a checkpoint and the end of training see, beside the mean of what ranks hold."""
    with met() as group:
        loop = Loop(group, "local-sgd:period=3").steps(5)
        states = group.gather_objects(loop.net.state_dict(), "states")
        mean = {
            name: torch.stack([s[name] for s in states]).amax(0)
            if not value.is_floating_point()
            else torch.stack([s[name] for s in states]).mean(0)
            for name, value in states[0].items()
        }
        saved, before = loop.save(), loop.hash()
        with loop.strategy.evaluating():
            evaluated = {name: value.clone() for name, value in loop.net.state_dict().items()}
        same_again = loop.hash() == before
        momenta = group.gather_objects(loop.optimizer.state_dict()["state"][1]["momentum_buffer"], "momentum")
        torch.testing.assert_close(
            saved["optimizer"]["state"][1]["momentum_buffer"], torch.stack(momenta).mean(0), rtol=0, atol=1e-7
        )
        loop.strategy.finish_training()
        for found in (saved["model"], evaluated, loop.net.state_dict()):
            torch.testing.assert_close(dict(found), mean, rtol=0, atol=1e-6)
        settled = state_hash(loop.net)
        loop.strategy.finish_training()
        assert state_hash(loop.net) == settled
        assert state_hash(loop.save()["model"]) == settled
        return same_again, state_hash(saved["model"]), settled, state_hash(evaluated)


def a_rank_without_samples_makes_no_step():
    with met() as group:
        loop = Loop(group, "local-sgd:period=9", adamw)
        before = loop.parameters()
        loop.step(1)  # of one micro-batch: it is the last rank's
        moved, held, norm = not torch.equal(before, loop.parameters()), len(loop.optimizer.state), loop.norms[0]
        first = loop.save()["optimizer"]["state"]
        last = group.gather_objects(loop.optimizer.state_dict()["state"], "the last rank's")[-1]
        assert state_hash(first) == state_hash(last), "the mean is over those that have stepped"
        tree = loop.steps(1).save()
        counts = {int(s["step"]) for s in tree["optimizer"]["state"].values()}
        return moved, held, norm > 0, counts, int(loop.net.seen), int(tree["model"]["seen"])


def clips_and_counts_by_itself():
    with met() as group:
        loop = Loop(group, "local-sgd:period=9", plain_sgd)
        counts = [1, 5, 2, 0]
        start = [p.detach().clone() for p in loop.target.parameters]
        torch.manual_seed(0)
        reference = Net()
        loop.step(counts=counts)
        run = loop.plan.run(group.rank)
        total = sum(counts[m] for m in run)
        for m in run:
            inputs, outputs = batch(0, m)
            (F.mse_loss(reference(inputs), outputs) * (counts[m] / max(total, 1))).backward()
        gradients = [p.grad for p in reference.parameters() if p.requires_grad]
        moved = [p.detach() - s for p, s in zip(loop.target.parameters, start, strict=True)]
        torch.testing.assert_close(moved, [-0.2 * g for g in gradients], rtol=1e-4, atol=1e-6)
        return loop.norms[0], float(torch.stack([g.norm() for g in gradients]).norm())


def saved_for_elsewhere():
    with met() as group:
        return Loop(group, "local-sgd:period=3").steps(4).save()


def goes_on_from(tree, word, same_strategy):
    """From a checkpoint of another world or strategy: the model at the beginning, and what was said."""
    with met() as group:
        loop = Loop(group, word, seed=7).load(tree, same_strategy=same_strategy)
        begins = state_hash(loop.net) == state_hash(dict(tree["model"]))
        state = loop.optimizer.state_dict()["state"]
        momenta = all(
            torch.equal(v["momentum_buffer"], tree["optimizer"]["state"][k]["momentum_buffer"])
            for k, v in state.items()
        )
        loop.steps(3)
        return begins, momenta, loop.said, unlike(loop)


def averages_moments(word, make):
    with met() as group:
        loop = Loop(group, word, MAKES[make]).steps(4)
        apart = group.gather_objects(state_hash(loop.optimizer), "before")
        loop.steps(2)
        return len(set(apart)), len(set(group.gather_objects(state_hash(loop.optimizer), "after")))


def meets_within_nodes():
    with met(nodes=2) as group:
        loop, seen = Loop(group, "local-sgd:period=4,node_period=2"), []
        for _ in range(4):
            loop.step()
            seen.append(state_hash(loop.net))
        group.barrier("all are through")  # none may hang up before
        loop.strategy.close()
        return seen


def other_models():
    with met() as group:
        try:
            Loop(group, "local-sgd", net=lambda: nn.Linear(2, 2 + group.rank))
        except Exception as error:  # noqa: BLE001 - the test reads it
            return f"{type(error).__name__}: {error}"


def test_on_two_ranks():
    cases = [
        *((trained_beside_one_by_hand, make) for make in MAKES),
        (beside_ddp, "local-sgd:period=1", "plain_sgd", 6),
        (beside_ddp, "local-sgd:period=4,warmup=6", "sgd", 6),
        (beside_ddp, "local-sgd:period=4,warmup=6", "sgd", 7),
        (sees_the_mean_and_goes_on,),
        (resumed, "local-sgd:period=3", "adamw", 4),
        (clips_and_counts_by_itself,),
        (averages_moments, "local-sgd:period=3", "adamw"),
        (averages_moments, "local-sgd:period=3,moments=average", "adamw"),
        (averages_moments, "local-sgd:period=3,moments=average", "sgd"),
        (other_models,),
        (saved_for_elsewhere,),
        *((ends, "local-sgd:period=4,warmup=2", 7, nodes) for nodes in (None, 2)),
    ]
    results = on_world(2, cases)
    assert results[14] == results[15]
    assert results[14][0] != results[14][1]
    for ranks in results[:3]:
        for seen in ranks:
            assert not isinstance(seen, str), seen
            assert max(far for far, _ in seen) < 1e-5
            assert [apart > 1e-3 for _, apart in seen] == [True, True, False] * 2 + [True]
            assert seen[2][1] == seen[5][1] == 0
    (near, _, _), (_, same, _), (_, differs, apart) = (ranks[0] for ranks in results[3:6])
    assert near < 1e-6
    assert same
    assert not differs
    assert apart > 1e-3
    assert {r[0] for r in results[6]} == {True}, results[6]
    assert len({r[1:] for r in results[6]}) == 1
    assert results[6][0][1] == results[6][0][2] == results[6][0][3]
    assert results[7] == [(True, results[7][0][1], [])] * 2, results[7]
    assert results[7][0][1] > 1e-3
    norms = results[8]
    for norm, expected in norms:
        assert norm == pytest.approx(expected, rel=1e-4)
    assert norms[0][0] != norms[1][0]
    assert results[9] == [(2, 2)] * 2
    assert results[10] == results[11] == [(2, 1)] * 2
    for message in results[12]:
        assert message.startswith("MismatchError: the model's parameters and buffers differs between ranks"), message
    saved = results[13][0]
    assert state_hash(saved["model"]) == state_hash(results[13][1]["model"])

    told = ["the checkpoint was saved by 2 ranks that stepped by themselves: all 3 start at their mean"]
    elsewhere = on_world(
        3,
        [
            (goes_on_from, saved, "local-sgd:period=3", True),
            (goes_on_from, saved, "local-sgd:period=3", False),
            (goes_on_from, saved, "ddp", False),
        ],
    )
    for ranks, said in zip(elsewhere, (told, [], []), strict=True):
        assert [r[:3] for r in ranks] == [(True, True, said)] * 3, ranks
    assert elsewhere[0][0][3] > 1e-3
    assert elsewhere[1][0][3] == elsewhere[2][0][3] == 0  # the third step of the period, which started over; and ddp


def test_on_three_ranks():
    cases = [
        (meets_at_the_end_of_each_period,),
        (a_rank_without_samples_makes_no_step,),
        *((resumed, "local-sgd:period=3", make, after) for make, after in (("sgd", 1), ("adamw", 3), ("adamw", 5))),
        (resumed, "local-sgd:period=5,warmup=4", "sgd", 2),
        (resumed, "local-sgd:period=5,warmup=4", "adamw", 6),
        (resumed, "local-sgd:period=3,moments=average", "adamw", 4, True),
        (resumed, "local-sgd:period=9", "adamw", 1, False, (1, *STEPS)),  # saved when two ranks had not stepped yet
    ]
    hashes, empty, *others = on_world(3, cases)
    for rank in hashes:
        assert not isinstance(rank, str), rank
    for step in range(6):
        assert len({steps[step] for steps, _ in hashes}) == (1 if step % 3 == 2 else 3)
    assert len({norm for _, norm in hashes}) == 3
    assert empty == [(False, 0, False, {2}, 3, 6), (False, 0, False, {2}, 3, 6), (True, 6, True, {2}, 6, 6)]
    for ranks in others:
        assert [r[0] for r in ranks] == [True] * 3, ranks
        assert [r[2] for r in ranks] == [[]] * 3
    assert [ranks[0][1] > 1e-3 for ranks in others] == [True, False, True, False, True, True, True]


def test_within_nodes():
    (seen,) = on_world(4, [(meets_within_nodes,)])
    for step, groups in enumerate([4, 2, 4, 1]):
        assert len({hashes[step] for hashes in seen}) == groups, (step, seen)
    assert seen[0][1] == seen[1][1]
    assert seen[2][1] == seen[3][1]
