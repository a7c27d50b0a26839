"""What is carried from step to step belongs to a place in the step: by hand on one rank, the same bits on any world."""

import functools
import os

import pytest
import torch
from torch import nn

from lockstep.collectives import Group
from lockstep.errors import UsageError
from lockstep.run import Run
from lockstep.testing import state_hash
from worlds import on_world

pytestmark = pytest.mark.together  # what they compute once is computed on one worker

# 4 micro-batches in a step; the last step of an epoch holds 2 + 1 samples: its two places are of other ranks than
# before, and of 3 ranks one has none.
SIZES = {"global_batch": 8, "micro_batch": 2}
STEPS = 3  # of an epoch
X = torch.randn(19, 3, generator=torch.Generator().manual_seed(5))


class Cell(nn.Module):
    """Truncated backpropagation: the hidden state is that of the place, and is learned through for one step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.inner, self.state, self.out = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x, hidden):
        hidden = torch.tanh(self.inner(x.mean(0)) + self.state(hidden))
        return self.out(hidden).square().sum() + self.out(torch.tanh(self.inner(x))).square().mean(), hidden


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


def learn(cell, carry, x):
    """The loss of ``x``; what is carried is nested, and holds a tensor, a number and a word."""
    (hidden, told), seen = carry.get("hidden", ((torch.zeros(4), {"word": ""}), 0))
    loss, hidden = cell(x, hidden)
    carry["hidden"] = ((hidden.detach(), {"word": told["word"] + "a"}), seen + 1)
    return loss


def told(carry):
    (hidden, words), seen = carry["hidden"]
    return state_hash(hidden), words["word"], seen


def trained(strategy, directory=None, until=None, epochs=3, clears="never", **settings):
    """The model in the end, and what was carried at each place that this rank computed, by step and place."""
    os.environ["LOCKSTEP_RESUME"] = str(int(directory is not None))
    seen = {}
    with Run(seed=3, strategy=strategy, checkpoint=directory, **settings) as run:
        cell = Cell()
        model = run.model(cell)
        run.optimizer(sgd(cell.parameters()))
        batches = run.loader((X,), shuffle=False, **SIZES)
        for epoch in run.epochs(epochs):
            if clears == "between" and epoch:
                run.carry.clear()
            for (x,) in run.train(batches):
                step = run.progress.step
                if clears == "within" and step == 2:
                    run.carry.clear()
                loss = learn(model, run.carry, x)
                if run.counts:
                    seen[step, run._train_step.current.position.index] = told(run.carry)
                run.step(loss)
                if run.progress.step == until:
                    break
            if run.progress.step == until:
                break
        return state_hash(cell), seen, {n: p.detach().clone() for n, p in cell.named_parameters()}


@functools.cache
def by_hand(clears, epochs=3):
    cell = Cell()
    optimizer = sgd(cell.parameters())
    places, step = {}, 0
    for epoch in range(epochs):
        if clears == "between" and epoch:
            places = {}
        for batch in X.split(8):
            optimizer.zero_grad()
            for place, x in enumerate(batch.split(2)):
                carried = places.setdefault(place, {})
                if clears == "within" and step == 2:
                    carried.clear()
                (learn(cell, carried, x) * (len(x) / len(batch))).backward()
            optimizer.step()
            step += 1
    return {n: p.detach() for n, p in cell.named_parameters()}


@functools.cache
def alone(clears="never"):
    return trained("none", clears=clears, replay=False)


CLEARS = ("never", "between", "within")


@pytest.mark.parametrize("clears", CLEARS)
def test_on_one_rank_it_is_what_it_is_by_hand(clears):
    _, seen, parameters = alone(clears)
    torch.testing.assert_close(parameters, by_hand(clears), rtol=1e-5, atol=1e-6)
    assert len(seen) == 3 * (4 + 4 + 2)
    # A place is not computed in the short step, and waits.
    assert seen[3, 3][1:] == {"never": ("aaa", 3), "between": ("a", 1), "within": ("aaa", 3)}[clears]
    assert seen[3, 0][1:] == {"never": ("aaaa", 4), "between": ("a", 1), "within": ("aa", 2)}[clears]


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.campaign), 3, 4])
def test_on_any_world_it_follows_the_place(world):
    cases = [("ddp", {"clears": clears}) for clears in CLEARS] + [("zero", {"clears": "never"})] * (world == 3)
    calls = [(functools.partial(trained, **more, replay=world == 3), strategy) for strategy, more in cases]
    for (strategy, more), ranks in zip(cases, on_world(world, calls), strict=True):
        together = {}
        for found in ranks:
            assert isinstance(found, tuple), (strategy, more, found)
            assert found[0] == alone(more["clears"])[0], (strategy, more)
            assert together.keys().isdisjoint(found[1])
            together |= found[1]
        assert together == alone(more["clears"])[1], (strategy, more)
        owners = {(rank, place) for rank, found in enumerate(ranks) for _, place in found[1]}
        assert len(owners) > 4, "no place has moved between ranks"


@pytest.mark.parametrize(
    "legs",
    [
        [(3, "ddp", 2), (1, "none", 4), (2, "zero", None)],  # within an epoch, behind a full step
        [(2, "ddp", 3), (4, "ddp", 6), (1, "none", None)],  # behind the short step, where places wait
    ],
)
def test_it_goes_through_checkpoints_to_other_worlds(tmp_path, legs):
    together = {}
    for world, strategy, until in legs:
        for found in on_world(world, [(trained, strategy, str(tmp_path), until)])[0]:
            assert isinstance(found, tuple), (world, strategy, until, found)
            together |= found[1]
    assert together == alone()[1]
    assert found[0] == alone()[0]


def given_up(strategy):
    """In the second epoch a step is left after its rank's first micro-batch; what it carried is forgotten."""
    with Run(seed=3, strategy=strategy) as run:
        cell = Cell()
        model = run.model(cell)
        run.optimizer(sgd(cell.parameters()))
        batches = run.loader((X,), shuffle=False, **SIZES)
        counts = []
        for epoch in run.epochs(3):
            for (x,) in run.train(batches):
                loss = learn_in_place(model, run.carry, x)
                if epoch == 1 and run.progress.epoch_step == 1:
                    break
                if run.counts:
                    counts.append((run._train_step.current.position.index, run.carry["seen"]["steps"]))
                run.step(loss)
        return state_hash(cell), counts


def learn_in_place(cell, carry, x):
    """What is carried is changed where it lies."""
    seen = carry.setdefault("seen", {"steps": 0, "hidden": torch.zeros(4)})
    seen["steps"] += 1
    loss, hidden = cell(x, seen["hidden"].clone())
    seen["hidden"].copy_(hidden.detach())
    return loss


def test_a_step_that_is_given_up_carries_nothing_on():
    expected, counts = given_up("none")
    for world in (2, 3):
        ranks = on_world(world, [(given_up, "ddp")])[0]
        assert all(isinstance(found, tuple) for found in ranks), ranks
        assert [found[0] for found in ranks] == [expected] * world
        assert sorted(one for found in ranks for one in found[1]) == sorted(counts)


def touch(run):
    with pytest.raises(UsageError) as caught:
        run.carry["hidden"] = 1
    return str(caught.value)


def load(run):
    with pytest.raises(UsageError) as caught:
        run.carry.load({"places": {"0": {"hidden": 1}}})
    return str(caught.value).removeprefix("the checkpoint holds what the script carried. ")


def refused(strategy):
    """Before the loop, in it (on ranks that have a body), and after it."""
    with Run(seed=3, strategy=strategy) as run:
        messages = [touch(run), *([load(run)] if strategy != "none" else [])]
        net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        run.model(net)
        run.optimizer(sgd(net.parameters()))
        for (x,) in run.train(run.loader((X,), shuffle=False, **SIZES)):
            if strategy != "none":
                messages.append(touch(run))
            run.step(lambda out, _: out.square().mean(), x, x)
        return {*messages, touch(run)}


OUTSIDE = "run.carry outside of the loop over run.train(...): there is no micro-batch that it could belong to"
SERVED = (
    "run.carry: under this strategy not every rank has micro-batches of its own; use ddp, zero, or fsdp without tensor="
)


def test_where_there_is_no_place_it_is_refused():
    assert refused("none") == {OUTSIDE}
    strategies = ("parameter-server", "pipeline")
    for ranks in on_world(2, [(refused, strategy) for strategy in strategies]):
        assert ranks == [{SERVED}] * 2


def in_an_evaluation():
    with Run(seed=3) as run:
        net = nn.Linear(3, 1)
        run.model(net)
        for _ in run.evaluate(run.loader((X,), **SIZES)):
            with pytest.raises(UsageError) as caught:
                run.carry["hidden"] = 1
        return str(caught.value)


def test_an_evaluation_has_no_places():
    assert in_an_evaluation() == OUTSIDE


def costs(directory, uses):
    """What ranks tell each other for it, in a run that saves after each epoch."""
    said = []
    os.environ["LOCKSTEP_RESUME"] = "0"

    def heard(call):
        def calls(group, value, what):
            said.extend([what] if "carried" in what else [])
            return call(group, value, what)

        return calls

    Group.gather_objects, Group.sum_int = heard(Group.gather_objects), heard(Group.sum_int)
    with Run(seed=3, checkpoint=directory, save_every="1 epoch") as run:
        cell = Cell()
        model = run.model(cell)
        run.optimizer(sgd(cell.parameters()))
        for _ in run.epochs(2):
            for (x,) in run.train(run.loader((X,), shuffle=False, **SIZES)):
                run.step(learn(model, run.carry if uses else {}, x))
    return said


def test_unused_it_costs_nothing_but_a_word_at_saves(tmp_path):
    for said in on_world(2, [(costs, str(tmp_path / "unused"), False)])[0]:
        assert said == ["whether something is carried"] * 2
    # In use: to the short step and back; and what is saved.
    at_save = ["whether something is carried", "what is carried"]
    move = ["what is carried to a step of another size"]
    for said in on_world(2, [(costs, str(tmp_path / "used"), True)])[0]:
        assert said == [*move, *at_save, *move, *move, *at_save]
