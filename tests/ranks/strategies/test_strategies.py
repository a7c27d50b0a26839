"""What strategies promise beside the bits, which tests/promises/test_transparency.py sees to."""

import copy
import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from lockstep.batch import BatchPlan, MicroBatchPosition
from lockstep.collectives import single_rank_group
from lockstep.errors import MismatchError, SettingError, UsageError
from lockstep.run import Run
from lockstep.strategies import ParameterSet, StrategyContext, open_strategy
from lockstep.strategies.parts.gradient_accumulation import TreeGradientAccumulator
from lockstep.strategies.replicated.single_process import SingleProcess
from lockstep.testing import state_hash
from worlds import error_of, on_world


def one_rank(name="ddp"):
    return open_strategy(name, StrategyContext(single_rank_group(), BatchPlan(8, 1, 1).run))


def test_one_rank_alone_needs_no_strategy():
    assert {type(one_rank(name)) for name in ("none", "ddp")} == {SingleProcess}
    model = nn.Linear(2, 2)
    assert one_rank().setup_model(model, find_unused_parameters=False) is model


def test_an_unknown_strategy_is_refused():
    with pytest.raises(SettingError, match=r"strategy='dpp': did you mean dp\? give one of none, "):
        one_rank("dpp")


class Counting(nn.Module):
    """Buffers that the forward pass moves: a running mean by hand, a count, and one that stays."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("mean", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("passes", torch.tensor(0))
        self.register_buffer("fixed", torch.tensor([3.0]))

    def forward(self, x):
        if self.training:
            self.mean.add_(0.5 * (x.mean().double() - self.mean))
            self.passes += 1
        return x * self.weight


def turns(of):
    return [MicroBatchPosition(index, of, index == of - 1) for index in range(of)]


def test_buffers_become_the_mean_over_the_step_and_counts_count_steps():
    strategy, model = one_rank(), Counting()
    strategy.setup_model(model, find_unused_parameters=False)
    mean = 0.0
    for values in ([1.0, 2.0, 3.0, 6.0], [5.0], [-1.0, 0.0, 1.5]):
        for position, value in zip(turns(len(values)), values, strict=True):
            strategy.begin_micro_batch(position)
            model(torch.tensor([value]))
            strategy.end_micro_batch(position)
        mean += sum(0.5 * (value - mean) for value in values) / len(values)
        torch.testing.assert_close(model.mean, torch.tensor([mean], dtype=torch.float64))
    assert model.passes == 3
    assert model.fixed == 3


def test_a_step_that_is_given_up_leaves_no_trace_in_buffers():
    strategy, model = one_rank(), Counting()
    strategy.setup_model(model, find_unused_parameters=False)
    model.mean.fill_(4.0)
    strategy.resync()  # as after a checkpoint was loaded
    before = state_hash(model)
    for given_up_after in (0, 2):
        for position in turns(4)[:given_up_after]:
            strategy.begin_micro_batch(position)
            model(torch.tensor([9.0]))
            strategy.end_micro_batch(position)
        strategy.begin_micro_batch(turns(4)[given_up_after])
        model(torch.tensor([9.0]))
        strategy.discard_step()
        assert state_hash(model) == before


def test_a_target_reaches_only_its_own_parameters():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    ParameterSet(tuple(second.parameters()), everything=False).backward(second(first(torch.ones(2))).sum(), None)
    assert first.weight.grad is None
    assert second.weight.grad is not None


# ---- on ranks --------------------------------------------------------------------------------------------------------


def train(run, model, data=None, optimizer=None):
    run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    batches = run.loader(torch.arange(24.0).view(12, 2) if data is None else data, global_batch=8, micro_batch=2)
    for _ in run.epochs(1):
        for batch in run.train(batches):
            run.step(model(batch).square().mean())


def begins_as_rank_0():
    with Run() as run:
        torch.manual_seed(run.rank)
        model = run.model(nn.Linear(2, 2))
        assert type(model) is nn.Linear
        return state_hash(model)


def buffers_in_step():
    with Run() as run:
        net = Counting()
        train(run, run.model(net))
        return state_hash(net), int(net.passes)


class Assigning(nn.Module):
    """Its buffer is another tensor after each forward pass; a second one is only read."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("table", torch.zeros(2))

    def forward(self, x):
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        return self.linear(x) * self.table


def buffers_assigned_and_filled():
    """The buffers are filled after the model was given to the run, as with what was trained elsewhere."""
    with Run() as run:
        net = Assigning()
        model = run.model(net)
        net.load_state_dict(net.state_dict() | {"mean": torch.full((2,), 64.0), "table": torch.tensor([1.0, 2.0])})
        train(run, model, torch.arange(16.0).view(8, 2))
        return state_hash(net), net.mean.tolist(), net.table.tolist()


def test_a_buffer_that_changes_its_shape_is_refused():
    strategy, model = one_rank(), Assigning()
    strategy.setup_model(model, find_unused_parameters=False)
    model.mean = torch.zeros(3, 2)
    with pytest.raises(UsageError, match=r"the buffer mean of Assigning changed its shape from \(2,\) to \(3, 2\): "):
        strategy.end_micro_batch(MicroBatchPosition(0, 1, True))


def other_model():
    with Run() as run:
        return error_of(MismatchError, run.model, nn.Linear(2, 2 + run.rank // 2))


def the_users_own():
    """What comes back is the module that was given: methods, names and copies are those of one rank."""
    with Run() as run:
        net = nn.Sequential(nn.Linear(2, 2))
        model = run.model(net)
        averaged = torch.optim.swa_utils.AveragedModel(model)
        train(run, model, torch.ones(8, 2))
        assert model is net
        assert sorted(model.state_dict()) == ["0.bias", "0.weight"]
        return state_hash(copy.deepcopy(model)), state_hash(model), model[0].in_features, int(averaged.n_averaged)


class Forgetful(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.forgotten = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.used(x)


def unused():
    with Run() as run:
        return error_of(UsageError, train, run, run.model(Forgetful()))


def nothing_to_train():
    """A frozen model beside the trained one, such as the network of a perceptual loss."""
    with Run() as run:
        frozen = run.model(nn.Linear(2, 2).requires_grad_(False))
        model = run.model(nn.Linear(2, 2))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in run.train(run.loader(torch.ones(8, 2), global_batch=8, micro_batch=2)):
            run.step(F.mse_loss(frozen(model(batch)), batch))
        return state_hash(model)


def accumulates():
    """In which steps gradients are exchanged; some ranks have two micro-batches in each."""
    with Run() as run:
        begun = []
        exchange = run._context.strategy._all_reduce
        begin = exchange.begin
        exchange.begin = lambda *sums: (begun.append(run.progress.step), begin(*sums))
        train(run, run.model(nn.Linear(2, 2)), torch.ones(24, 2))
        return begun


def groups_of_ones_own():
    """The script has process groups of its own, and uses them between forward and backward passes."""
    with Run() as run:
        pairs = [dist.new_group(pair) for pair in ([0, 1], [1, 2])]
        model = run.model(nn.Linear(2, 2))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        sums = []
        for batch in run.train(run.loader(torch.arange(24.0).view(12, 2), global_batch=6, micro_batch=2)):
            loss = model(batch).square().mean()
            for ranks, pair in zip(([0, 1], [1, 2]), pairs, strict=True):
                if run.rank in ranks:
                    mine = torch.tensor(float(run.rank))
                    dist.all_reduce(mine, group=pair)
                    sums.append(mine.item())
            run.step(loss)
        return state_hash(model), sorted(set(sums))


def pendings():
    gc.collect()
    return sum(type(each) is TreeGradientAccumulator for each in gc.get_objects())


def forgets_what_it_has_summed():
    """How many lists of gradients are held after each micro-batch: none, once their sum is there."""
    data = torch.randn(24, 4), torch.randn(24, 2)
    with Run(seed=1, strategy="ddp", replay=False) as run:
        model = run.model(nn.Linear(4, 2))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches = run.loader(data, global_batch=12, micro_batch=2)
        before, held = pendings(), []
        for _ in run.epochs(1):
            for x, y in run.train(batches):
                run.step(F.mse_loss(model(x), y))
                held.append(pendings() - before)
        return held


def none_on_many():
    return error_of(SettingError, Run, strategy="none")


def test_on_three_ranks():
    cases = (
        begins_as_rank_0,
        buffers_in_step,
        buffers_assigned_and_filled,
        other_model,
        the_users_own,
        nothing_to_train,
        unused,
        accumulates,
        groups_of_ones_own,
        forgets_what_it_has_summed,
        none_on_many,
    )
    results = dict(zip(cases, on_world(3, [(case,) for case in cases]), strict=True))
    assert len(set(results[begins_as_rank_0])) == 1
    assert len(set(results[the_users_own])) == 1
    copied, trained, *rest = results[the_users_own][0]
    assert (copied, rest) == (trained, [2, 0])
    assert set(results[buffers_in_step]) == {(results[buffers_in_step][0][0], 2)}
    assert results[buffers_assigned_and_filled] == [buffers_assigned_and_filled()] * 3
    assert results[buffers_assigned_and_filled][0][1:] == ([35.5, 36.0], [1.0, 2.0])  # 64 / 2 + the mean / 2
    assert len(set(results[nothing_to_train])) == 1
    assert results[accumulates] == [[0, 1, 2]] * 3
    assert len({trained for trained, _ in results[groups_of_ones_own]}) == 1
    assert [sums for _, sums in results[groups_of_ones_own]] == [[1.0], [1.0, 3.0], [3.0]]
    assert results[forgets_what_it_has_summed] == [[1, 0, 1, 0]] * 3
    for says, case in [
        ("the model's parameters and buffers differs between ranks: rank 2: ", other_model),
        ("2 of 4 parameters had no part in the loss: forgotten.weight, forgotten.bias. ", unused),
        ("strategy='none' is for one rank, and there are 3; use 'ddp' or start one rank", none_on_many),
    ]:
        for message in results[case]:
            assert message.startswith(says), message
    assert "find_unused_parameters=True" in results[unused][0]
