"""Training with samplers and batch samplers: as by hand in plain torch, and the same bits on any world, resumed too."""

import functools
import os
import shutil

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from campaign_marks import IN_CAMPAIGN
from lockstep.errors import CheckpointError, DataError, MismatchError, PlanError, UsageError
from lockstep.run import Run
from lockstep.seeding import seed_of
from lockstep.testing import state_hash
from worlds import on_world

pytestmark = pytest.mark.together  # what they compute once is computed on one worker

#: Beside all ways under ddp: where an epoch has batches of many lengths, other divisions show most.
MORE = {"zero": ("varying",), "parameter-server": ("varying",)}

N = 30
SEED = 3
X = torch.randn(N, 4, generator=torch.Generator().manual_seed(5))
Y = X.sum(1, keepdim=True).sin()
DATA = TensorDataset(X, Y)


class Varying:
    """Batches of one length each, as a bucketing sampler makes them: 1 to 9 samples, drawn with repetition."""

    def __init__(self):
        self.generator = torch.Generator()

    def __iter__(self):
        for size in (7, 1, 9, 4, 2):
            yield torch.randint(N, (size,), generator=self.generator).tolist()

    def __len__(self):
        return 5


def growing(epoch, generator):
    return torch.randperm(N, generator=generator)[: 10 + 5 * epoch]


def weighted():
    return WeightedRandomSampler(torch.arange(1.0, N + 1), 20)


#: What is given to `run.loader`, and by hand the batches of an epoch, under torch's seed for its order.
WAYS = {
    "weighted": (
        lambda: {"sampler": weighted(), "global_batch": 8, "micro_batch": 2},
        lambda epoch: BatchSampler(weighted(), 8, False),
    ),
    "varying": (
        lambda: {"batch_sampler": Varying(), "micro_batch": 2},
        lambda epoch: drawn_by_hand(Varying(), epoch),
    ),
    "growing": (
        lambda: {"order": growing, "global_batch": 8, "micro_batch": 2},
        lambda epoch: BatchSampler(growing(epoch, seeded(epoch)).tolist(), 8, False),
    ),
}


def seeded(epoch):
    return torch.Generator().manual_seed(seed_of(SEED, "order", epoch))


def drawn_by_hand(sampler, epoch):
    sampler.generator = seeded(epoch)
    return sampler


def network():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


@functools.cache
def by_hand(way):
    model = network()
    optimizer = sgd(model.parameters())
    for epoch in range(3):
        torch.manual_seed(seed_of(SEED, "order", epoch))
        for batch in list(WAYS[way][1](epoch)):
            optimizer.zero_grad()
            (model(X[batch]) - Y[batch]).square().mean().backward()
            optimizer.step()
    return [p.detach() for p in model.parameters()]


class Crash(Exception):
    """Something that ends a rank in the middle of an epoch."""


def trained(way, strategy="ddp", directory=None, crash_at=None):
    """Bits and values of the model in the end, and the metrics of each epoch that was finished here."""
    os.environ["LOCKSTEP_RESUME"] = str(int(directory is not None))
    metrics = []
    try:
        save_every = None if crash_at is None else "1 step"
        replay = strategy != "none"
        with Run(seed=SEED, strategy=strategy, checkpoint=directory, save_every=save_every, replay=replay) as run:
            model = run.model(network())
            run.optimizer(sgd(model.parameters()))
            batches = run.loader(DATA, **WAYS[way][0]())
            for _ in run.epochs(3):
                pass_ = run.train(batches)
                length, seen = len(pass_), 0
                for x, y in pass_:
                    seen += 1
                    run.step((model(x) - y).square().mean())
                    if run.progress.step == crash_at:
                        raise Crash
                assert seen == length
                if way == "growing" and run.progress.epoch == 2:
                    assert run._context.position.length.steps_per_epoch is None, "the total is not known"
                metrics.append(run.metrics["loss"])
            return run.gather(state_hash(model.state_dict())), [p.detach().clone() for p in model.parameters()], metrics
    except Crash:
        return None


@functools.cache
def alone(way):
    return trained(way, "none")


@pytest.mark.parametrize("way", WAYS)
def test_on_one_rank_it_is_what_it_is_by_hand(way):
    for ours, theirs in zip(alone(way)[1], by_hand(way), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def resumed(way, source, directory, strategy="ddp"):
    shutil.copytree(source, directory, dirs_exist_ok=True)
    return trained(way, strategy, directory)


def same_as_alone(found, way):
    hashes, _, metrics = found
    (expected,), _, all_metrics = alone(way)
    assert set(hashes) == {expected}
    assert metrics == all_metrics[len(all_metrics) - len(metrics) :]


def test_the_same_bits_on_any_world_and_after_a_crash_on_another(tmp_path):
    crashes = {"weighted": 6, "varying": 9, "growing": 7}  # within the second or third epoch
    dirs = {way: str(tmp_path / way) for way in WAYS}
    more = {"zero": WAYS, "parameter-server": ("varying", "weighted")} if IN_CAMPAIGN else MORE
    calls = [(trained, way, "ddp") for way in WAYS]
    calls += [(trained, way, strategy) for strategy, ways in more.items() for way in ways]
    calls += [(trained, way, "ddp", dirs[way], step) for way, step in crashes.items()]
    for (_, way, *rest), results in zip(calls, on_world(3, calls), strict=True):
        for result in results:
            if len(rest) > 1:
                assert result is None, result
            else:
                assert not isinstance(result, str), result
                same_as_alone(result, way)
    calls = [(resumed, way, dirs[way], f"{dirs[way]}-2") for way in WAYS]
    calls += [(trained, way) for way in WAYS] if IN_CAMPAIGN else []
    for (_, way, *_), results in zip(calls, on_world(2, calls), strict=True):
        for result in results:
            assert not isinstance(result, str), result
            same_as_alone(result, way)
    for way in WAYS:
        found = resumed(way, dirs[way], f"{dirs[way]}-1", "none")
        assert len(found[2]) < 3, "it started over"
        same_as_alone(found, way)


# ---- what ranks and resumes must share --------------------------------------------------------------------------


def told(kind, function, *args, **options):
    try:
        function(*args, **options)
    except kind as error:
        return str(error)
    return "nothing was raised"


def synchronised():
    with Run(sync_batchnorm=True) as run:
        run.model(nn.BatchNorm1d(4))
        batches = run.loader(DATA, batch_sampler=[[1, 2, 3], [3, 4]], micro_batch=1)
        return told(UsageError, next, run.train(batches))


def order_by_rank():
    with Run() as run:
        order = [(i + run.rank // 2) % N for i in range(N)]
        return told(MismatchError, run.loader, DATA, global_batch=8, sampler=order)


def evaluated_by_few(strategy="ddp"):
    """An evaluation of two micro-batches, on three ranks; the same loader is refused for training."""
    with Run(strategy=strategy) as run:
        model = run.model(nn.Linear(4, 1))
        run.optimizer(sgd(model.parameters()))
        held_out = run.loader(DATA, global_batch=4, micro_batch=2, sampler=[5, 6, 7, 8])
        few_batches = run.loader(DATA, micro_batch=2, batch_sampler=[[4, 3, 2], [1]])
        found = []
        for loader in (held_out, few_batches):
            mine = []
            for x, y in run.evaluate(loader):
                model(x)
                run.measure(sine=y)
                if run.counts:
                    mine += y[:, 0].tolist()
            found.append(([v for part in run.gather(mine) for v in part], run.metrics["sine"]))
        batches = run.loader(DATA, micro_batch=2, batch_sampler=[[1, 2, 3, 4], [5]])
        return found, told(PlanError, next, run.train(held_out)), told(PlanError, next, run.train(batches))


def test_ranks_must_draw_one_order_and_may_share_out_less_than_one_micro_batch_each():
    calls = [(synchronised,), (order_by_rank,), (evaluated_by_few,), (evaluated_by_few, "fsdp")]
    norms, orders, *evaluations = on_world(3, calls)
    for message in norms:
        assert "in every step, and step 1 of epoch 0 holds 2 micro-batches for 3 ranks: give batches" in message
    for message in orders:
        assert message.startswith("rank 2 would visit the samples of epoch 0 in another order than rank 0: a sampler")
    for results in evaluations:
        for found, few, few_batches in results:
            for (values, mean), rows in zip(found, ([5, 6, 7, 8], [4, 3, 2, 1]), strict=True):
                assert values == Y[rows, 0].tolist()
                assert mean == pytest.approx(Y[rows].mean().item(), abs=1e-6)
            assert few.startswith("3 ranks for 2 micro-batches (global_batch=4, micro_batch=2): some ranks would have")
            assert few_batches.startswith("3 ranks for 2 micro-batches (the largest batch is of 4, micro_batch=2)")


def test_an_epoch_cannot_go_on_in_another_order(tmp_path, monkeypatch):
    weights = torch.ones(N)

    def train(crash_at):
        try:
            with Run(seed=SEED, checkpoint=tmp_path, save_every="1 steps") as run:
                model = run.model(network())
                run.optimizer(sgd(model.parameters()))
                batches = run.loader(DATA, sampler=WeightedRandomSampler(weights, 20), global_batch=4, micro_batch=2)
                for _ in run.epochs(2):
                    for x, y in run.train(batches):
                        run.step((model(x) - y).square().mean())
                        if run.progress.step == crash_at:
                            raise Crash
        except Crash:
            pass

    train(3)
    monkeypatch.setenv("LOCKSTEP_RESUME", "1")
    weights[:20] = 0
    with pytest.raises(CheckpointError, match=r"taken within epoch 0, whose order of samples has changed.*keep"):
        train(None)
    weights[:20] = 1
    train(None)


# ---- arguments of torch's loader --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, r"run.loader\(dataset, global_batch=...\): say how many samples a step holds"),
        ({"batch_size": 4}, "it is called global_batch here"),
        ({"num_workers": 4, "global_batch": 4}, "it is called workers here"),
        ({"generator": torch.Generator(), "global_batch": 4}, r"depends on Run\(seed=...\) and the epoch"),
        ({"persistent_workers": True, "global_batch": 4}, "live through all epochs"),
        ({"multiprocessing_context": "fork", "global_batch": 4}, "set_start_method"),
        ({"in_order": False, "global_batch": 4}, "always kept"),
        ({"pin_memory_device": "cuda", "global_batch": 4}, "leave it out"),
        ({"globl_batch": 4}, "there is no such argument; did you mean global_batch"),
        ({"colate_fn": list}, "did you mean collate_fn"),
        ({"prefetch_factor": 0, "global_batch": 4}, "give at least 1"),
        ({"batch_sampler": [[1]], "global_batch": 4}, "each batch is one step, so leave global_batch out"),
        ({"batch_sampler": [[1]], "drop_last": True}, "leave drop_last out"),
        ({"dataset": DataLoader(DATA, 4), "global_batch": 4}, "the DataLoader says it already"),
        ({"dataset": DataLoader(DATA, batch_size=None)}, "it makes no batches"),
    ],
)
def test_an_argument_that_is_none_is_refused_with_a_way_out(options, says):
    with Run() as run, pytest.raises(UsageError, match=says):
        run.loader(options.pop("dataset", DATA), **options)


class Rows:
    """A data set with an index, read in loader processes."""

    def __len__(self):
        return N

    def __getitem__(self, index):
        return float(index) + marks[0]


marks = [0.0]


def mark(worker_id):
    marks[0] = 100.0


def test_hints_for_loader_processes_are_taken():
    with Run() as run:
        run.model(nn.Linear(1, 1))
        options = {"worker_init_fn": mark, "prefetch_factor": 3, "timeout": 30.0, "pin_memory": True}
        loader = run.loader(Rows(), global_batch=10, micro_batch=5, shuffle=False, workers=1, **options)
        assert (loader.prefetch_factor, loader.timeout, loader.pin_memory) == (3, 30.0, False)
        assert [x for batch in run.evaluate(loader) for x in batch.tolist()] == [100.0 + i for i in range(N)]


def steps_of(run, loader):
    return [x[:, 0].tolist() for x, *_ in run.evaluate(loader)]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"batch_size": 8}, {"global_batch": 8, "shuffle": False}),
        ({"batch_size": 8, "shuffle": True, "drop_last": True}, {"global_batch": 8, "drop_last": True}),
        (
            {"batch_size": 8, "sampler": RandomSampler(DATA, replacement=True)},
            {"global_batch": 8, "sampler": RandomSampler(DATA, replacement=True)},
        ),
        (
            {"batch_size": 8, "sampler": RandomSampler(DATA, num_samples=11)},
            {"global_batch": 8, "sampler": RandomSampler(DATA, num_samples=11)},
        ),
        (
            {"batch_size": 2, "sampler": SubsetRandomSampler([1, 2, 3])},
            {"global_batch": 2, "sampler": SubsetRandomSampler([1, 2, 3])},
        ),
        (
            {"batch_sampler": BatchSampler(SequentialSampler(DATA), 7, True)},
            {"batch_sampler": BatchSampler(SequentialSampler(DATA), 7, True)},
        ),
    ],
)
def test_a_loader_of_torchs_is_taken_apart(theirs, ours):
    with Run() as run:
        run.model(nn.Linear(1, 1))
        taken = run.loader(DataLoader(DATA, collate_fn=collate, **theirs), micro_batch=2)
        assert steps_of(run, taken) == steps_of(run, run.loader(DATA, collate_fn=collate, micro_batch=2, **ours))


def collate(samples):
    return [torch.stack(column) for column in zip(*samples, strict=True)]


def test_a_loader_of_torchs_over_a_stream_is_taken_apart():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(X[:7])

    with Run() as run:
        run.model(nn.Linear(1, 1))
        rows = [row for batch in run.evaluate(run.loader(DataLoader(Stream(), 4), micro_batch=1)) for row in batch]
        assert sorted(row[0].item() for row in rows) == sorted(X[:7, 0].tolist())


def test_more_indices_than_a_rank_can_hold_are_refused_before_they_are_read():
    data = TensorDataset(torch.zeros(8, 1))
    sampler = torch.utils.data.RandomSampler(data, replacement=True, num_samples=int(1e10))
    says = r"RandomSampler names 10 000 000 000 indices, .*order=.*run\.steps"
    with Run() as run, pytest.raises(DataError, match=says):
        run.loader(data, global_batch=4, sampler=sampler)
