"""What `train` and `evaluate` hand out: lazy, of a known length, closed when it is left; and in which order."""

import gc
import os

import pytest
import torch
from torch.utils.data import IterableDataset
from tqdm import tqdm

from lockstep.errors import UsageError
from lockstep.run import Run
from worlds import on_world

X = torch.arange(38.0).view(38, 1)
SIZES = {"global_batch": 8, "micro_batch": 2}  # 5 steps, the last one of 6 samples in 3 micro-batches


class Stream(IterableDataset):
    def __iter__(self):
        return iter(X)


@pytest.fixture(autouse=True)
def no_thread_of_tqdm(monkeypatch):
    monkeypatch.setattr(tqdm, "monitor_interval", 0)


def open_run(run, data=X, **options):
    model = run.model(torch.nn.Linear(1, 1))
    run.optimizer(torch.optim.SGD(model.parameters(), lr=1e-5))
    return model, run.loader(data, workers=0, **SIZES, **options)


def test_a_pass_knows_its_length_before_it_begins_and_on_the_way():
    with Run() as run:
        model, batches = open_run(run)
        for _ in run.epochs(2):
            assert len(batches) == 5
            for pass_, size in ((run.evaluate(batches), 19), (run.train(batches), 19)):
                assert len(pass_) == size
                assert iter(pass_) is pass_
                seen = 0
                for batch in pass_:
                    assert len(pass_) == size
                    seen += 1
                    if model.training:
                        run.step(model(batch).square().mean())
                assert seen == size


def test_the_rest_of_an_epoch_is_shorter(tmp_path, monkeypatch):
    def train(until):
        with Run(checkpoint=tmp_path) as run:
            model, batches = open_run(run)
            next(run.epochs(1))
            pass_ = run.train(batches)
            length, seen = len(pass_), 0
            for batch in pass_:
                run.step(model(batch).square().mean())
                seen += 1
                if run.progress.step == until:
                    break
            return length, len(pass_), seen

    assert train(until=2) == (19, 19, 8)
    monkeypatch.setenv("LOCKSTEP_RESUME", "1")
    assert train(until=None) == (11, 11, 11)


def test_a_progress_bar_takes_the_length_and_gives_the_same_batches(capsys):
    with Run() as run:
        model, batches = open_run(run)
        for _ in run.epochs(1):
            for batch in tqdm(run.train(batches)):
                run.step(model(batch).square().mean())
            for batch in tqdm(run.evaluate(batches)):
                run.measure(mean=batch)
        assert run.metrics["mean"] == X.mean().item()
    said = capsys.readouterr().err
    assert "21it" in said, "two are computed twice, and counted"
    assert said.count("19/19") == 1


def test_nothing_begins_before_the_first_is_asked_for():
    with Run() as run:
        model, batches = open_run(run)
        model.eval()
        for start in (run.train, run.evaluate):
            assert len(start(batches)) == 19
            start([])  # what is no loader is found when it is asked for a batch
            assert not model.training
        for start in (run.train, run.evaluate):
            with pytest.raises(UsageError, match=r"give what run.loader\(dataset, global_batch=...\) returned"):
                next(start([]))
            with pytest.raises(UsageError, match=r"give what run.loader\(dataset, global_batch=...\) returned"):
                len(start([]))


@pytest.mark.parametrize("how", ["break", "close"])
def test_a_pass_that_is_left_is_closed_at_once(how):
    with Run() as run:
        model, batches = open_run(run)
        gc.disable()
        try:
            for _ in run.epochs(1):
                for _ in run.evaluate(batches):
                    assert not model.training
                    break
                assert model.training, "the modes are as they were before"
                pass_ = run.train(batches)
                run.step(model(next(pass_)).square().mean())
                if how == "break":
                    del pass_
                else:
                    pass_.close()
                with pytest.raises(UsageError, match="outside of"):
                    run.measure(x=1.0)
        finally:
            gc.enable()


def test_a_process_that_is_forked_in_the_body_and_comes_back_to_the_loop_is_ended(capfd):
    ends = []
    with Run() as run:
        model, batches = open_run(run)
        for _ in run.epochs(1):
            for batch in run.train(batches):
                if run.step(model(batch).square().mean()) and run.progress.step == 2:
                    if child := os.fork():
                        ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
                    else:
                        ends.append("of the child")
                elif "of the child" in ends:
                    os._exit(9)
        assert run.progress.step == 5
    assert ends == [1]
    assert "has come back to the loop and is ended: it is no rank" in capfd.readouterr().err


def test_a_pass_over_a_stream_says_why_it_has_no_length():
    with Run() as run:
        _, batches = open_run(run, Stream())
        for start in (run.train, run.evaluate):
            with pytest.raises(TypeError, match=r"number of micro-batches.*an iterable data set.*__len__"):
                len(start(batches))
        with pytest.raises(TypeError, match=r"len\(loader\).*Stream is an iterable data set"):
            len(batches)
        assert len(list(run.evaluate(batches))) == 20
        assert sum(len(batch) for batch in tqdm(run.evaluate(batches), disable=True)) == 38


def predict(strategy, samples, workers):
    """The data of an evaluation, put together as a user would, and the lengths on this rank."""
    with Run(strategy=strategy, replay=False) as run:
        model, batches = open_run(run, X)
        held_out = run.loader(list(X[:samples]), **SIZES, shuffle=False, workers=workers, collate_fn=torch.stack)
        for _ in run.epochs(1):
            mine, passed, pass_ = [], 0, run.evaluate(held_out)
            for batch in pass_:
                model(batch)
                passed += 1
                if run.counts:
                    mine.append(batch)
            assert len(pass_) == passed
            told = [x for part in run.gather(mine) for batch in part for x in batch.flatten().tolist()]
            for batch in run.train(batches):
                run.step(model(batch).square().mean())
        return told, passed, len(batches), len(held_out)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_gathered_predictions_are_in_the_data_sets_order_on_any_number_of_ranks(strategy):
    calls = [(predict, strategy, samples, workers) for samples, workers in ((38, 0), (30, 2), (3, 0))]
    lengths = {1: ([19], [15], [2]), 2: ([9, 10], [7, 8], [1, 1]), 3: ([6, 6, 7], [5, 5, 5], [0, 1, 1])}
    for size, expected in lengths.items():
        for ranks, (_, _, samples, _), own in zip(on_world(size, calls), calls, expected, strict=True):
            same = (list(range(samples)), 5, -(-samples // 8))
            assert [(told, steps, held_out) for told, _, steps, held_out in ranks] == [same] * size
            # Where ranks meet in the forward pass, all compute as many as the one with the most.
            assert [passed for _, passed, _, _ in ranks] == ([max(own)] * size if strategy == "fsdp" else own)
