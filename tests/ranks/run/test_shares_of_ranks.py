"""A rank's share is never shown as the whole: what is gathered, logged and weighed is that of all ranks."""

import os

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, default_collate

from lockstep.batch import MicroBatchPosition
from lockstep.errors import MismatchError, UsageError
from lockstep.run import Run
from lockstep.run.batches.micro_batches import LeftOutSamples
from lockstep.run.loop.rank_operations import in_order
from worlds import error_of, on_world

X = torch.randn(22, 3, generator=torch.Generator().manual_seed(5))
SIZES = {"global_batch": 8, "micro_batch": 2}  # the last step has 3 micro-batches


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("LOCKSTEP_RESUME", "0")


# ---- gather ----------------------------------------------------------------------------------------------------------


def gathered(strategy, asks, each=1):
    """What `Run.gather` gives of the samples of each step, put together, where `Run.step` has returned True."""
    with Run(strategy=strategy) as run:
        model = run.model(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches, found, told = run.loader((X,), shuffle=False, **SIZES), [], []
        for _ in run.epochs(2):
            for (x,) in run.train(batches):
                if not asks or run.counts:
                    found.extend([x] * each)
                if run.step(model(x).square().mean()):
                    parts = run.gather(found)
                    assert len(parts) == run.world_size
                    told.append(torch.cat([one for part in parts for one in part]))
                    found.clear()
        return told


@pytest.mark.parametrize(
    ("world", "strategies"),
    [
        (1, ["none"]),
        (2, ["ddp"]),
        pytest.param(2, ["zero:stage=2", "fsdp"], marks=pytest.mark.campaign),
        (3, ["zero", "fsdp"]),
        (4, ["hsdp:shard=2"]),
    ],
)
def test_gather_gives_the_order_of_micro_batches_on_any_world(world, strategies):
    calls = [(gathered, strategy, asks, each) for strategy in strategies for asks, each in ((True, 2), (False, 1))]
    for (_, _, _, each), results in zip(calls, on_world(world, calls), strict=True):
        for told in results:
            whole = torch.cat([x for part in X.split(2) for x in [part] * each])
            assert isinstance(told, list), told
            assert torch.equal(torch.cat(told), torch.cat([whole, whole]))


def gathered_numbers(strategy, asks):
    """What `Run.gather` gives of numbers of the micro-batches, and of other numbers."""
    with Run(strategy=strategy) as run:
        model = run.model(nn.Linear(3, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        own, floats, told, others = {}, [], [], []
        for _ in run.epochs(2):
            for (x,) in run.train(run.loader((X,), shuffle=False, **SIZES)):
                if not asks or run.counts:
                    own.setdefault("sums", []).append(x.sum())
                    floats.append(x[0, 0].item())
                if run.step(model(x).square().mean()):
                    told += [[one.item() for part in run.gather(own["sums"]) for one in part]]
                    both = run.gather((own["sums"], floats))
                    assert [sums for sums, _ in both] == run.gather(own["sums"])
                    assert [part["own"] for part in run.gather({"own": floats, "rank": run.rank})] == run.gather(floats)
                    told += [[one for _, part in both for one in part]]
                    others.append([part[0] for part in run.gather([float(run.rank), 0.5])])
                    own["sums"].clear()
                    floats = []
        return told, others


@pytest.mark.parametrize(
    ("world", "strategy"),
    [(2, "ddp"), pytest.param(2, "fsdp", marks=pytest.mark.campaign), (3, "fsdp"), (4, "hsdp:shard=2")],
)
def test_numbers_come_in_the_order_of_micro_batches_too(world, strategy):
    parts = X.split(2)
    steps = [parts[first : first + 4] for first in range(0, 11, 4)] * 2
    whole = [[f(x) for x in step] for step in steps for f in (lambda x: x.sum().item(), lambda x: x[0, 0].item())]
    for results in on_world(world, [(gathered_numbers, strategy, asks) for asks in (True, False)]):
        for told, others in results:
            assert told == whole
            assert others == [[float(rank) for rank in range(world)]] * len(steps)


def gathers_others():
    """Lists that hold no samples of micro-batches stay as they are, also in steps with padding."""
    with Run(strategy="fsdp") as run:
        model = run.model(nn.Linear(3, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        told = []
        for _ in run.epochs(1):
            for (x,) in run.train(run.loader((X,), **SIZES)):
                if run.step(model(x).square().mean()):
                    told.append(run.gather([run.rank, torch.zeros(5)]))
        return [[part[0] for part in parts] for parts in told]


def gathered_of_all_bodies(micro_batch):
    """The same, where the script asks for counts as well, in steps that replay."""
    with Run(check_every=1) as run:
        model = run.model(nn.Linear(3, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        found, told, seen = [], [], 0
        for (x,) in run.train(run.loader((X,), shuffle=False, global_batch=8, micro_batch=micro_batch)):
            seen += len(x) * run.counts
            found.append(x)
            if run.step(model(x).square().mean()):
                told += [one for part in run.gather(found) for one in part]
                found.clear()
        return torch.cat(told)


@pytest.mark.parametrize("world", [1, 3])
def test_what_a_replay_appends_is_not_gathered(world):
    for ranks in on_world(world, [(gathered_of_all_bodies, 2)] + [(gathered_of_all_bodies, 8)] * (world == 1)):
        assert all(torch.equal(told, X) for told in ranks)


def predicts():
    """Predictions of an evaluation in the body, each as long as a micro-batch of the step, and samples of the step."""
    with Run() as run:
        model = run.model(nn.Linear(3, 2))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        held_out, told, found = run.loader((X[:10],), shuffle=False, **SIZES), [], []
        for (x,) in run.train(run.loader((X,), shuffle=False, **SIZES)):
            found.append(x)
            if run.step(model(x).square().mean()):
                rows = []
                for (seen,) in run.evaluate(held_out):
                    model(seen)
                    rows.extend(seen[:, :2])
                parts = [run.gather(rows), run.gather(found)]
                told.append([torch.cat([one for rank in part for one in rank]) for part in parts])
                found.clear()
        return told


@pytest.mark.parametrize("world", [1, 3])
def test_what_an_evaluation_in_the_body_gave_is_no_part_of_the_step(world):
    for told in on_world(world, [(predicts,)])[0]:
        assert all(torch.equal(rows, X[:10, :2].flatten()) for rows, _ in told)
        assert torch.equal(torch.cat([found for _, found in told]), X)


def test_other_lists_come_by_rank():
    assert on_world(3, [(gathers_others,)]) == [[[[0, 1, 2]] * 3] * 3]
    assert in_order([([5, 6], [0, 2]), ([7, 8], [1, None])], 3) == [[5], [7, 6]]
    assert in_order([([5, 6], [0, 1]), ([7], [2])], 3) == [[5, 6], [7]], "as they are, whatever the division"


# ---- log -------------------------------------------------------------------------------------------------------------


def logs(how):
    with Run() as run:
        model = run.model(nn.Linear(3, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches = run.loader((X,), **SIZES)
        for epoch in run.epochs(3):
            for number, (x,) in enumerate(run.train(batches)):
                run.step(model(x).square().mean())
                if how == "within" and number % 3 == 0:
                    run.log(now=x.sum().item())
            share = float(run.rank)
            if how == "share":
                run.log(train_loss=torch.tensor(share))
            elif (how == "late" and epoch == 2) or (how == "leader" and run.leads):
                run.log(train_loss=share)
            elif how == "time":
                run.log(seconds=share, samples_per_s=share, epoch=epoch, lr=0.1, nothing=float("nan"))
            elif how == "sum":
                run.log(train_loss=run.sum(share))
        return run.progress.step


def test_what_ranks_log_differently_is_refused_unless_it_is_of_one_rank():
    hows = ("share", "late", "within", "leader", "time", "sum")
    for how, results in zip(hows, on_world(2, [(logs, how) for how in hows]), strict=True):
        if how in ("share", "late"):
            step = 3 if how == "share" else 9
            text = f"run.log(train_loss=...) after step {step}: it is 0 on rank 0 and 1 on rank 1"
            assert all(MismatchError.__name__ in result for result in results)
            assert all(text in result for result in results), results
        else:
            assert results == [9, 9], results


# ---- samples that are left out ---------------------------------------------------------------------------------------


class Unreadable(Dataset):
    """Of the samples, some cannot be read."""

    def __init__(self, lost):
        self.lost = lost

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return None if index in self.lost else (X[index], X[index].sum())


def without_none(samples):
    return default_collate([sample for sample in samples if sample is not None])


def trained(lost, counts):
    with Run() as run:
        model = run.model(nn.Linear(3, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches = run.loader(Unreadable(lost), shuffle=False, collate_fn=without_none, **SIZES)
        for _ in run.epochs(1):
            for x, y in run.train(batches):
                run.step(F.mse_loss(model(x)[:, 0], y), count=len(x) if counts else None)
        return run.progress.step


def test_samples_that_a_collate_function_leaves_out_need_a_count():
    for lost in ({1}, {9}):
        told = error_of(UsageError, trained, lost, False)
        assert "a micro-batch of 2 samples have 1 rows, and those of another one of 2 have 2" in told
        assert trained(lost, True) == 3, "as the error says"
    assert trained((), False) == 3


def odd(*batches):
    """Whether one of ``batches``, each with its number of samples, has lost some."""
    left_out = LeftOutSamples()
    for samples, data in batches:
        left_out.note(MicroBatchPosition(0, 1, last=True, samples=samples), data)
        try:
            left_out.refuse()
        except UsageError:
            return True
    return False


class Graph:
    """Nobody knows its rows."""


def test_rows_that_are_no_samples_are_left_alone():
    assert odd((4, torch.ones(4, 2)), (4, torch.ones(3, 2)))
    assert odd((4, {"x": [torch.ones(3)], "text": ["a"]}), (4, {"x": [torch.ones(4)], "text": ["a"]}))
    assert not odd((4, torch.ones(4, 2)), (3, torch.ones(3, 2))), "a short step"
    assert not odd((4, torch.ones(2, 5)), (2, torch.ones(1, 5))), "pairs"
    assert not odd((4, (torch.ones(3, 4), torch.ones(3, 4))), (2, (torch.ones(3, 2), torch.ones(3, 2)))), "time first"
    assert not odd((4, (torch.ones(9, 2), torch.ones(3))), (4, (torch.ones(7, 2), torch.ones(2)))), "nodes and graphs"
    assert not odd((4, (Graph(), torch.ones(4))), (4, (Graph(), torch.ones(3))))
    assert not odd((4, torch.ones(9, 2)), (4, torch.ones(3, 2))), "flattened"
    assert not odd((4, [torch.tensor(1.0)]), (4, "text"))
    words = nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(1)])
    assert not odd((2, words), (2, nn.utils.rnn.pack_sequence([torch.ones(1), torch.ones(1)])))


# ---- losses of several optimizers ------------------------------------------------------------------------------------


def test_each_loss_has_a_name_of_its_own(tmp_path):
    os.environ.pop("LOCKSTEP_STRATEGY", None)
    with Run(best="min loss_1", checkpoint=str(tmp_path)) as run:
        first, second = run.model(nn.Linear(3, 1)), run.model(nn.Linear(3, 1))
        optimizers = [run.optimizer(torch.optim.SGD(model.parameters(), lr=0.0)) for model in (first, second)]
        seen = []
        for _ in run.epochs(1):
            for (x,) in run.train(run.loader((X,), **SIZES)):
                run.step(first(x).mean() * 0 + 1, optimizer=optimizers[0])
                run.step(second(x).mean() * 0 + 3, optimizer=optimizers[1])
                if not seen:
                    with pytest.raises(UsageError, match="measures its loss under that name"):
                        run.measure(loss_0=1.0)
                    seen.append(1)
        assert run.metrics == {"loss_0": 1.0, "loss_1": 3.0}
        for _ in run.epochs(2):
            for (x,) in run.train(run.loader((X,), **SIZES)):
                run.step(first(x).mean() * 0 + second(x).mean() * 0 + 5, optimizer=optimizers)
        assert run.metrics["loss"] == 5.0


def together(where, name):
    """A call of ``run.NAME``, in whose place of the script all ranks are together, or not."""
    with Run(replay=False) as run:
        model = run.model(nn.Linear(2, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches = run.loader(torch.ones(12, 2), global_batch=6, micro_batch=2)

        def call(here):
            if here == where:
                getattr(run, name)(*() if name == "barrier" else (1.0,))

        call("before")
        for batch in run.train(batches):
            call("body")
            if run.step(model(batch).mean()):
                call("step")
                for _ in run.evaluate(batches):
                    call("evaluation in a body")
                call("after it")
        for _ in run.evaluate(batches):
            call("evaluation")
        call("after")
    return "went on"


@pytest.mark.parametrize("world", [1, 2])
def test_ranks_meet_where_all_of_them_come_equally_often(world):
    names = ("sum", "mean", "gather", "broadcast", "barrier")
    good, bad = ("before", "step", "after it", "after"), ("body", "evaluation in a body", "evaluation")
    calls = [(together, where, names[(number + world) % len(names)]) for number, where in enumerate((*good, *bad))]
    for (_, where, name), found in zip(calls, on_world(world, calls), strict=True):
        place = "the middle of a step" if where == "body" else "the body of run.evaluate(...)"
        for said in found:
            assert said == "went on" if where in good else f"run.{name}(...) in {place}" in said, (where, said)
