"""Loops of many shapes: the same on any world, and after a kill anywhere on another one."""

import functools
import os
import signal

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from campaign_marks import IN_CAMPAIGN
from lockstep.launch_contract import RESUME
from lockstep.run import Run
from lockstep.testing import state_hash
from metric_lines import metric_lines
from worlds import on_world

pytestmark = pytest.mark.together  # what they compute once is computed on one worker

X = torch.sin(torch.arange(76.0)).view(38, 2)
SIZES = {"global_batch": 8, "micro_batch": 2}  # 5 steps an epoch, the last one of 6 samples in 3 micro-batches


class Die(Exception):
    """What ends a leg of a run, as a kill does: nothing is saved on the way out."""


class Training:
    """A model and its data; ``end`` is the step in whose body the run dies, or is asked to stop."""

    def __init__(self, run, end):
        self.run, self.end = run, end
        run.keep(evaluations=0)
        self.module = nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 1))
        self.model = run.model(self.module)
        self.optimizer = run.optimizer(torch.optim.AdamW(self.model.parameters(), lr=0.05))
        self.batches = run.loader(X, **SIZES)
        self.others = run.loader(X[:22] * 2, global_batch=12, micro_batch=4)
        self.held_out = run.loader(X[:9], shuffle=False, **SIZES)

    def step(self, batch, scale=1.0):
        done = self.run.step((self.model(batch) * scale - 1).square().mean())
        if done and self.end == ("die", self.run.progress.step):
            self.run._context.checkpointer._checkpoints.wait()  # else it were up to chance what is saved by now
            raise Die
        if done and self.end == ("stop", self.run.progress.step):
            os.kill(os.getpid(), signal.SIGTERM)
        return done

    def evaluate(self, loader=None):
        for batch in self.run.evaluate(loader or self.held_out):
            noise = torch.rand(len(batch))  # as where a model draws in evaluation
            self.run.measure(held=self.model(batch).squeeze(1), noise=noise)
        self.run.log(held=self.run.metrics["held"], noise=self.run.metrics["noise"])
        self.run.kept.evaluations += 1
        if self.end == ("evaluated", self.run.kept.evaluations):
            self.run._context.checkpointer._checkpoints.wait()
            raise Die


def stretches(t):
    for step in t.run.steps(13, every=4):
        assert step % 4 == 0
        for batch in t.run.train(t.batches):
            t.step(batch)
        t.run.log(begun=step, loss=t.run.metrics["loss"])
        t.evaluate()


def stretches_without_end(t):
    for _ in t.run.steps(12):
        for batch in t.run.train(t.batches):
            if t.step(batch) and t.run.progress.step % 5 == 0:
                t.evaluate(t.batches)  # the loader that it is in


def chunks(t):
    for _ in t.run.epochs(3):
        done = False
        while not done:
            done = True
            for batch in t.run.train(t.batches):
                if t.step(batch) and t.run.progress.step % 2 == 0:
                    done = False
                    break
            t.evaluate()


def in_the_body(t):
    for epoch in t.run.epochs(2):
        for batch in t.run.train(t.batches):
            if t.step(batch) and t.run.progress.step % 2 == 0:
                t.evaluate()
            t.run.measure(after=batch[:, 0])
        t.run.log(epoch=epoch, loss=t.run.metrics["loss"], after=t.run.metrics["after"])
        t.evaluate()


def in_turn(t):
    for _ in t.run.epochs(2):
        for batch in t.run.train(t.batches):
            t.step(batch)
        t.evaluate()
        for batch in t.run.train(t.others):
            t.step(batch, 2.0)
        t.run.log(loss=t.run.metrics["loss"])
        for batch in t.run.train(t.batches):
            t.step(batch, 0.5)
        t.evaluate()


def curriculum(t):
    for epoch in t.run.epochs(3):
        for batch in t.run.train(t.others if epoch else t.batches):
            t.step(batch)
        t.run.log(epoch=epoch, loss=t.run.metrics["loss"])


def two_parts(t):
    """The same loader in two loops whose bodies differ: the first is left by break."""
    for _ in t.run.epochs(2):
        for batch in t.run.train(t.batches):
            if t.step(batch, 3.0) and t.run.progress.epoch_step == 2:
                break
        t.evaluate()
        for batch in t.run.train(t.batches):
            t.step(batch)
        t.run.log(loss=t.run.metrics["loss"])


def alternating(t):
    """Several steps on one loader for each step on another one, until the steps are done."""
    for _ in t.run.steps(12, every=6):
        over = False
        while not over:
            for batch in t.run.train(t.batches):
                if t.step(batch):
                    break
            for batch in t.run.train(t.others):
                if t.step(batch, 2.0) and t.run.progress.step % 3 == 0:
                    break
            over = t.run.progress.step % 6 == 0
        t.evaluate()


def together(t):
    unlabelled = t.run.loader(X[:20] + 1, global_batch=4, micro_batch=1, drop_last=True)
    labelled = t.run.loader(X[:32], **SIZES)
    for epoch in t.run.epochs(2):
        for batch, other in t.run.train(labelled, unlabelled):
            t.step(torch.cat([batch, other]))
        t.run.log(epoch=epoch, loss=t.run.metrics["loss"])
    for _ in t.run.steps(18, every=5):
        for batch, other in t.run.train(labelled, unlabelled):
            t.step(torch.cat([batch, other]))
        t.run.log(loss=t.run.metrics["loss"])


class Endless(IterableDataset):
    """A stream without end; with ``strided``, each rank reads its own samples only."""

    def __init__(self, strided):
        if strided:
            self.stride = self._stride

    def __iter__(self):
        return self._stride(0, 1)

    def _stride(self, start, step):
        while True:
            yield X[start % 38] + start // 38
            start += step


def streams(t):
    one, other = (t.run.loader(Endless(strided), **SIZES) for strided in (False, True))
    for begun in t.run.steps(9, every=3):
        for batch in t.run.train(other if begun == 3 else one):
            t.step(batch)
        t.evaluate()


def by_next(t):
    def forever():
        while True:
            yield from t.run.train(t.batches)

    batches = forever()
    for _ in t.run.steps(12, every=6):
        over = False
        while not over:
            over = t.step(next(batches)) and t.run.progress.step % 6 == 0
        t.evaluate()


def opened_inside(t):
    for _ in t.run.steps(8, every=3):
        for batch in t.run.train(t.run.loader(X, **SIZES)):
            t.step(batch)
    for _ in t.run.epochs(t.run.progress.epoch + 1):
        for batch in t.run.train(t.run.loader(X[:20], **SIZES)):
            t.step(batch)


def stops_early(t):
    stopper = t.run.early_stopping("held", patience=2)
    for _ in t.run.epochs(40):
        for batch in t.run.train(t.batches):
            t.step(batch)
        t.evaluate()
        if stopper.should_stop():
            break


def stops_in_the_body(t):
    stopper = t.run.early_stopping("held", patience=2, mode="max", min_delta=0.5)
    for _ in t.run.steps(40):
        for batch in t.run.train(t.batches):
            if t.step(batch) and t.run.progress.step % 3 == 0:
                t.evaluate()
                if stopper.should_stop():
                    break
        if stopper.stopped:
            break


SHAPES = [
    stretches,
    stretches_without_end,
    chunks,
    in_the_body,
    in_turn,
    curriculum,
    two_parts,
    alternating,
    together,
    streams,
    by_next,
    opened_inside,
    stops_early,
    stops_in_the_body,
]


def leg(shape, directory, end=None, *, replay=True):
    """One leg of a run, that goes on where the one before ended; None if it did not come to the end."""
    os.environ[RESUME] = "1"
    try:
        save_every = "1 step" if end else None  # what goes on to the end need not be found by another leg
        with Run(seed=3, checkpoint=directory, save_every=save_every, keep=2, replay=replay) as run:
            training = Training(run, end)
            shape(training)
        return (
            state_hash(training.module, training.optimizer),
            run.progress,
            {name: value for name, value in run.metrics.items() if name != "loss"},
        )
    except Die:
        return None
    except SystemExit as stop:
        return None if stop.code == 75 else stop
    finally:
        del os.environ[RESUME]


#: On how many ranks each leg runs, and in which step it dies or is asked to stop: a stop on one rank is obeyed at once.
LEGS = [(2, ("die", 3)), (1, ("stop", 4)), (3, ("die", 6)), (2, None)]
if not IN_CAMPAIGN:
    LEGS = [*LEGS[:2], LEGS[-1]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What one rank makes of each shape in one go, and the record of it."""
    directories = {shape: tmp_path_factory.mktemp(shape.__name__) for shape in SHAPES}
    alone = functools.partial(leg, replay=False)
    results = on_world(1, [(alone, shape, directory) for shape, directory in directories.items()])
    return {shape: (alone, metric_lines(directories[shape])) for shape, (alone,) in zip(SHAPES, results, strict=True)}


@pytest.mark.campaign
def test_a_loop_is_the_same_on_any_world(whole, tmp_path):
    calls = [(leg, shape, tmp_path / shape.__name__) for shape in SHAPES]
    for shape, ranks in zip(SHAPES, on_world(3, calls), strict=True):
        assert ranks == [whole[shape][0]] * 3, shape
        assert metric_lines(tmp_path / shape.__name__) == whole[shape][1], shape


def test_a_loop_is_the_same_whatever_ended_it_on_the_way(whole, tmp_path):
    for world, end in LEGS:
        calls = [(leg, shape, tmp_path / shape.__name__, end) for shape in SHAPES]
        for shape, ranks in zip(SHAPES, on_world(world, calls), strict=True):
            assert ranks == [None if end else whole[shape][0]] * world, shape
    for shape in SHAPES:
        assert metric_lines(tmp_path / shape.__name__) == whole[shape][1], shape


#: A second pass over the same loader in one epoch, and an evaluation that follows one in the last step's body.
DEEP_LEGS = [(in_turn, ("die", 9)), (in_the_body, ("evaluated", 7))]


def drawn():
    """The samples of two passes over one loader in one epoch, and what is drawn in the last body and after it."""
    with Run(seed=3, replay=False) as run:
        model = run.model(nn.Linear(2, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches, passes, draws = run.loader(torch.arange(16.0).view(8, 2), global_batch=4, micro_batch=1), [], []
        for _ in run.epochs(1):
            for _ in range(2):
                samples = []
                for batch in run.train(batches):
                    samples.append((run.progress.step, run.micro_batch.index, batch[0, 0].item()))
                    if run.step(model(batch).mean()) and run.progress.step % 2 == 0:
                        for part in run.evaluate(batches):
                            run.measure(held=part[:, 0])
                        draws.append(torch.rand(()).item())
                passes.append([number for *_, number in sorted(one for part in run.gather(samples) for one in part)])
                draws.append(torch.rand(()).item())
        return passes, draws


@pytest.mark.campaign
def test_deep_in_a_turn_a_resume_finds_its_pass_and_its_evaluation(whole, tmp_path):
    calls = []
    for shape, end in DEEP_LEGS:
        calls += [(leg, shape, tmp_path / shape.__name__, end), (leg, shape, tmp_path / shape.__name__)]
    results = on_world(2, [*calls, (drawn,)])
    for number, (shape, _) in enumerate(DEEP_LEGS):
        assert results[2 * number : 2 * number + 2] == [[None] * 2, [whole[shape][0]] * 2], shape
        assert metric_lines(tmp_path / shape.__name__) == whole[shape][1], shape
    (passes, draws), other = results[-1]
    assert passes[0] != passes[1], "another order"
    assert sorted(passes[0]) == sorted(passes[1]) == [0, 2, 4, 6, 8, 10, 12, 14]
    assert other == (passes, draws), "drawn alike on all ranks"
    assert len(set(draws)) == len(draws), "and not once more when the loop is left"


def test_each_pass_over_a_loader_has_an_order_of_its_own():
    orders = []
    with Run(seed=0, replay=False) as run:
        model = run.model(nn.Linear(1, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches = run.loader(torch.arange(16.0).view(16, 1), global_batch=4)
        for _ in run.epochs(2):
            for _ in range(2):
                orders.append([])
                for batch in run.train(batches):
                    orders[-1] += batch.flatten().tolist()
                    run.step(model(batch).square().mean())
    assert [sorted(order) for order in orders] == [list(range(16))] * 4
    assert len(set(map(tuple, orders))) == 4


def drawn_around_evaluations():
    """What a script draws before and after evaluations that draw, in a body and between two passes."""
    drawn = []
    with Run(seed=0, replay=False) as run:
        model = run.model(nn.Linear(2, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches, held_out = run.loader(X[:16], **SIZES), run.loader(X[:9], shuffle=False, **SIZES)

        def evaluate():
            drawn.append(float(torch.rand(())))
            for batch in run.evaluate(held_out):
                run.measure(noise=torch.rand(len(batch)))
            drawn.append(float(torch.rand(())))

        for _ in run.epochs(2):
            for batch in run.train(batches):
                if run.step(model(batch).square().mean()):
                    evaluate()
            evaluate()
    return drawn


def test_draws_after_an_evaluation_are_new_ones_and_the_same_on_any_world():
    ((alone,),), (of_three,) = on_world(1, [(drawn_around_evaluations,)]), on_world(3, [(drawn_around_evaluations,)])
    assert of_three == [alone] * 3
    assert len(set(alone)) == len(alone) == 12
