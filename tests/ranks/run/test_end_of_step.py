"""A step ends where the loop's body ends: what the body does after run.step belongs to it, and is saved."""

import copy
import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from campaign_marks import IN_CAMPAIGN
from lockstep.checkpoint import list_checkpoints, load_tree
from lockstep.errors import UsageError
from lockstep.launch_contract import RESUME
from lockstep.run import Run
from lockstep.testing import run_each, run_ranks, state_hash
from metric_lines import metric_lines
from waiting import wait_until
from worlds import on_world, trying_few

pytestmark = pytest.mark.together  # what they compute once is computed on one worker

X = torch.sin(torch.arange(76.0)).view(38, 2)
SIZES = {"global_batch": 8, "micro_batch": 2}  # 5 steps an epoch, the last one of 6 samples in 3 micro-batches
STEPS = 5
RARELY = "100 steps"  # saves what goes on to the end


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")


class Counter:
    """Something of the user's that is kept."""

    def __init__(self):
        self.n = 0

    def state_dict(self):
        return {"n": self.n}

    def load_state_dict(self, state):
        self.n = state["n"]


def net():
    return nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))


# ---- run.step tells it once ------------------------------------------------------------------------------------------


def told_by(strategy):
    """The step that each True of `Run.step` belongs to, and how many micro-batches this rank had."""
    with Run(strategy=strategy, replay=False) as run:
        model = run.model(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)))
        run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
        batches, done, bodies = run.loader(X, **SIZES), [], 0
        for _ in run.epochs(2):
            for batch in run.train(batches):
                bodies += 1
                if run.step(model(batch).square().mean()):
                    done.append(run.progress.step)
        return done, bodies


def told_by_two(leave_out):
    """For each body: what each call of `Run.step` returned, and which step the body began and ended with."""
    with Run(replay=False) as run:
        first, second = run.model(nn.Linear(2, 1)), run.model(nn.Linear(2, 1))
        one, other = (run.optimizer(torch.optim.SGD(m.parameters(), lr=0.1)) for m in (first, second))
        told = []
        for _ in run.epochs(1):
            for batch in run.train(run.loader(X, **SIZES)):
                began = run.progress.step
                answers = [run.step(first(batch).square().mean(), optimizer=one)]
                if not (leave_out and began % 2):
                    answers.append(run.step(second(batch).square().mean(), optimizer=other))
                told.append((began, answers, run.progress.step))
        return told, run.progress.step


def averaged(strategy):
    with Run(strategy=strategy, replay=strategy == "ddp") as run:
        module = net()
        model = run.model(module)
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        ema = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.7), use_buffers=True)
        run.keep(ema=ema)
        for _ in run.epochs(2):
            for batch in run.train(run.loader(X, **SIZES)):
                if run.step(model(batch).square().mean()):
                    ema.update_parameters(module)
        return state_hash(module), state_hash(ema), int(ema.n_averaged)


def test_a_step_is_told_once_and_averages_are_the_same_on_any_world():
    averages = {}
    # Three ranks have 2, 1 and 1 micro-batches of a step; four have one each, and in the short step one has none.
    for world in (1, 2, 3, 4) if IN_CAMPAIGN else (1, 3, 4):
        calls = [(told_by, s) for s in ("ddp", "zero", "fsdp")]
        calls += [(told_by_two, False), (told_by_two, True), (averaged, "ddp"), (averaged, "zero")]
        *told, both, left_out, ddp, zero = on_world(world, calls)
        for ranks in told:
            assert [done for done, _ in ranks] == [list(range(1, 11))] * world, (world, ranks)
        assert sum(bodies for _, bodies in told[0]) >= 38
        if world == 4:
            assert {bodies for _, bodies in told[2]} == {10}, "the rank without a micro-batch had a padding micro-batch"
        for bodies, steps in both:
            assert steps == STEPS
            done = [after for _, answers, after in bodies if answers[-1]]
            assert done == list(range(1, 6)), "true for the call after which each had its loss"
            assert not any(answers[0] for _, answers, _ in bodies)
        for bodies, steps in left_out:
            assert steps == STEPS
            for began, answers, after in bodies:
                if began % 2:
                    assert (answers, after) == ([False], began), "one is left out: at the end of the body"
                else:
                    assert after == began + answers[-1]
        averages[world] = (ddp, zero)
        assert ddp == zero == [averages[1][0][0]] * world
    assert averages[1][0][0][2] == 10


# ---- what the body does after run.step is saved ----------------------------------------------------------------------


def trained(directory, kill=None, ask=None, epochs=2, save_every="1 step"):
    """Train with everything that scripts do in a body after run.step; all that came of it.

    ``kill`` is the rank that dies and the step at whose very end, ``ask`` likewise is asked to stop.
    """
    with Run(checkpoint=directory, save_every=save_every, keep=20) as run:
        module = net()
        model = run.model(module)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        ema = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.7))
        counter = Counter()
        run.keep(ema=ema, counter=counter)
        batches = run.loader(X, **SIZES)
        held_out = run.loader(X[:20], shuffle=False, **SIZES)
        means = []
        for epoch in run.epochs(epochs):
            for batch in run.train(batches):
                done = run.step(model(batch).square().mean())
                run.measure(big=batch[:, 0] > 0)
                if done:
                    ema.update_parameters(module)
                    counter.n += 1
                    run.log(n=counter.n)
                    if ask == (run.rank, run.progress.step):
                        os.kill(os.getpid(), signal.SIGTERM)
                    if kill == (run.rank, run.progress.step):
                        if "step" in save_every:
                            wait_for_save(directory, run.progress.step - 1)
                        os.kill(os.getpid(), signal.SIGKILL)
            for batch in run.evaluate(held_out):
                run.measure(held=model(batch).squeeze(1))
            means.append(dict(run.metrics))
            run.log(epoch=epoch)
        return state_hash(module, optimizer, ema), counter.n, means[-1]


def wait_for_save(directory, step):
    """Until the checkpoint of ``step`` is there, so that it is known from where the next run goes on."""
    wait_until(lambda: not step or any(saved.step == step for saved in list_checkpoints(directory)))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    directory = tmp_path_factory.mktemp("undisturbed")
    return on_world(1, [(trained, directory, None, None, 2, RARELY)])[0][0], metric_lines(directory)


def test_the_record_of_the_undisturbed_run_is_whole(undisturbed):
    (_, n, means), record = undisturbed
    assert n == 10
    assert set(means) == {"loss", "big", "held"}
    assert [row["n"] for row in record if "n" in row] == list(range(1, 11))
    assert sum("held" in row and "n" not in row for row in record) == 2


@pytest.mark.parametrize(("step", "before", "after"), [(1, 1, 2), (5, 2, 3), (9, 3, 1)])
def test_killed_in_the_body_after_a_step_and_resumed_nothing_is_missing(tmp_path, undisturbed, step, before, after):
    outcomes = run_each(trying_few, before, trained, tmp_path, (before - 1, step))
    assert "killed by SIGKILL" in str(outcomes[before - 1].error), outcomes
    saved = [one.step for one in list_checkpoints(tmp_path)]
    assert max(saved, default=0) == step - 1, "the step whose body was not over is not saved"
    (found,) = on_world(after, [(trained, tmp_path, None, None, 2, RARELY)], env={RESUME: "1"})
    assert found == [undisturbed[0]] * after
    assert metric_lines(tmp_path) == undisturbed[1]


def test_a_stop_is_obeyed_at_the_end_of_the_body(tmp_path, undisturbed):
    outcomes = run_each(trying_few, 1, trained, tmp_path, None, (0, 3), 2, "9 steps")
    assert [o.error.code for o in outcomes] == [75], outcomes
    (saved,) = list_checkpoints(tmp_path)
    tree = load_tree(saved.path)
    assert saved.step == 3
    assert tree["kept"]["counter"] == {"n": 3}
    assert int(tree["kept"]["ema"]["n_averaged"]) == 3
    calls = [(trained, tmp_path, None, None, 2, RARELY)]
    assert on_world(3, calls, env={RESUME: "1"}) == [[undisturbed[0]] * 3]
    assert metric_lines(tmp_path) == undisturbed[1]


# ---- left by break ---------------------------------------------------------------------------------------------------


class Broken:
    """A run whose first epoch is left by break, right after a step."""

    def __init__(self, run, by_hand=True):
        self.run, self.module, self.counter = run, net(), Counter()
        self.model = run.model(self.module)
        self.optimizer = run.optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9))
        run.keep(counter=self.counter)
        self.batches = run.loader(X, **SIZES)

    def until(self, step):
        for batch in self.run.train(self.batches):
            if self.run.step(self.model(batch).square().mean()):
                self.counter.n += 1
                if self.run.progress.step == step:
                    break

    def evaluate(self):
        for batch in self.run.evaluate(self.batches):
            self.run.measure(held=self.model(batch).squeeze(1))

    def hash(self):
        return state_hash(self.module, self.optimizer, self.counter)


def broken_off(directory, save_every):
    with Run(checkpoint=directory, save_every=save_every, keep=20) as run:
        training = Broken(run)
        for epoch in run.epochs(2):
            training.until(3 if epoch == 0 else None)
            if epoch == 0:
                at_break = training.hash()
            training.evaluate()
            if epoch == 0:
                assert training.hash() == at_break
        return at_break, training.hash(), run.progress.step, dict(run.metrics)


def test_left_by_break_right_after_a_step_nothing_is_lost(tmp_path):
    results = {}
    for world in (1, 4):
        (results[world],) = on_world(world, [(broken_off, tmp_path / str(world), "1 step")])
        assert results[world] == [results[1][0]] * world
        by_step = {one.step: load_tree(one.path) for one in list_checkpoints(tmp_path / str(world))}
        assert sorted(by_step) == list(range(1, 9)), "the step that the loop was left in is saved, too"
        for step, tree in by_step.items():
            assert tree["kept"]["counter"]["n"] == step
    assert results[1][0][2] == 8


def asked_and_left(directory, where):
    with Run(checkpoint=directory) as run:
        training = Broken(run)
        for _ in run.epochs(3):
            for batch in run.train(training.batches):
                if run.step(training.model(batch).square().mean()):
                    training.counter.n += 1
                    if run.progress.step == 3:
                        os.kill(os.getpid(), signal.SIGTERM)
                        break
            run.log(after=True)
            if where == "evaluate":
                training.evaluate()
            elif where == "exit":
                break


@pytest.mark.parametrize("where", ["evaluate", "train", "exit"])
def test_a_stop_asked_for_while_the_loop_is_left_is_obeyed_at_the_next_call(tmp_path, where):
    (outcome,) = run_each(asked_and_left, 1, tmp_path, where)
    assert getattr(outcome.error, "code", None) == 75, outcome
    (saved,) = list_checkpoints(tmp_path)
    assert saved.step == 3
    assert load_tree(saved.path)["kept"]["counter"] == {"n": 3}


def test_what_the_body_must_not_do_is_told_at_the_next_call_where_the_loop_was_left():
    with Run() as run:
        training = Broken(run)
        for batch in run.train(training.batches):
            if run.step(training.model(batch).square().mean()):
                training.model(batch)  # moves the statistics of BatchNorm
                break
        with pytest.raises(UsageError, match=r"the buffer 1\.\w+ changed after run\.step"):
            training.evaluate()
        training.evaluate()


def left_with_a_loss_missing():
    """Of two optimizers, one had its loss in the step that the loop is left in."""
    with Run() as run:
        first, second = run.model(nn.Linear(2, 1)), run.model(nn.Linear(2, 1))
        one, other = (run.optimizer(torch.optim.SGD(m.parameters(), lr=0.1)) for m in (first, second))
        for epoch in run.epochs(2):
            for batch in run.train(run.loader(X, **SIZES)):
                run.step(first(batch).square().mean(), optimizer=one)
                if epoch == 0 and run.progress.step == 2:
                    before = state_hash(first, second)
                    break
                run.step(second(batch).square().mean(), optimizer=other)
            if epoch == 0:
                assert (run.progress.step, state_hash(first, second)) == (2, before)
        return run.progress.step, state_hash(first, second)


def left_out():
    """Two optimizers, of which the second has a loss in every other step; how often each schedule stepped."""
    with Run(seed=2) as run:
        first, second = run.model(nn.Linear(2, 1)), run.model(nn.Linear(2, 1))
        one = run.optimizer(torch.optim.SGD(first.parameters(), lr=0.1))
        other = run.optimizer(torch.optim.SGD(second.parameters(), lr=0.1))
        schedules = [run.scheduler(torch.optim.lr_scheduler.ExponentialLR(each, 0.9)) for each in (one, other)]
        for batch in run.train(run.loader(torch.ones(32, 2), global_batch=8, micro_batch=2)):
            both = run.progress.step % 2 == 0
            run.step(first(batch).square().mean(), optimizer=one)
            if both:
                run.step(second(batch).square().mean(), optimizer=other)
        return run.progress.step, [schedule.last_epoch for schedule in schedules]


def test_a_schedule_steps_when_its_optimizer_does():
    for world in (1, 2):
        assert run_ranks(left_out, world) == [(4, [4, 2])] * world


def left_by_break(bodies):
    """Bits after two epochs of four micro-batches a step, of which the first was left after so many micro-batches."""
    with Run(seed=2, replay=False) as run:
        model = run.model(nn.Linear(2, 1))
        optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
        batches = run.loader(torch.sin(torch.arange(32.0)).view(16, 2), global_batch=8, micro_batch=2)
        for epoch in run.epochs(2):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + epoch)
            for body, batch in enumerate(run.train(batches), 1):
                run.step(model(batch).square().mean(), count=3)
                if epoch == 0 and body == bodies:
                    break
        return run.progress.step, state_hash(model, optimizer)


def test_a_step_that_was_left_half_done_leaves_nothing_behind():
    """Neither gradients nor counts of its items, nor the options that its optimizer had."""
    after_a_step, within_the_next = left_by_break(4), left_by_break(6)
    assert after_a_step[0] == 3
    assert within_the_next == after_a_step


def test_a_step_that_was_left_before_each_optimizer_had_its_loss_is_forgotten():
    expected = left_with_a_loss_missing()
    assert expected[0] == 7
    assert on_world(2, [(left_with_a_loss_missing,)]) == [[expected] * 2]


# ---- what would count ranks ------------------------------------------------------------------------------------------


def naive(kind):
    """A body that changes what is kept once a micro-batch; what is said of it, and after how many bodies."""
    bodies = 0
    with Run() as run:
        module = nn.Linear(2, 1)
        model = run.model(module)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        ema, counter, mine = AveragedModel(module), Counter(), copy.deepcopy(module)
        nn.utils.vector_to_parameters(torch.zeros(3), mine.parameters())
        tensor = Counter()
        tensor.n = torch.zeros(3)
        run.keep(ema=ema, counter=counter, mine=mine, tensor=tensor)
        if kind in ("lr", "scheduler"):
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        try:
            for batch in run.train(run.loader(X, **SIZES)):
                bodies += 1
                run.step(model(batch).square().mean())
                if kind == "ema":
                    ema.update_parameters(module)
                elif kind == "data":
                    for average, parameter in zip(mine.parameters(), module.parameters(), strict=True):
                        average.data.mul_(0.9).add_(parameter.data, alpha=0.1)
                elif kind == "counter":
                    counter.n += 1
                elif kind == "replaced":
                    tensor.n = tensor.n * 0.9 + 1
                elif kind == "lr":
                    optimizer.param_groups[0]["lr"] *= 0.9
                elif kind == "scheduler":
                    scheduler.step()
        except UsageError as error:
            return str(error), bodies
    return "", bodies


def as_it_should_be(kind):
    """The same once a step, and kept objects whose state is made again each time it is asked for."""
    with Run() as run:
        module = nn.Linear(2, 1)
        model = run.model(module)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        counter = Fresh()
        run.keep(counter=counter, scheduler=scheduler)
        for _ in run.epochs(2):
            for batch in run.train(run.loader(X, **SIZES)):
                if run.step(model(batch).square().mean()):
                    scheduler.step()
                    counter.n += 1
        return counter.n, optimizer.param_groups[0]["lr"], state_hash(module)


class Fresh(Counter):
    def state_dict(self):
        torch.empty(11)  # so that no two tensors lie in one place
        return {"n": torch.tensor(self.n), "table": torch.arange(20)}

    def load_state_dict(self, state):
        self.n = int(state["n"])


SAYS = {
    "ema": "keep(ema=AveragedModel) was changed in the loop's body on micro-batch ",
    "data": "keep(mine=Linear) was changed in the loop's body on micro-batch ",
    "counter": "keep(counter=Counter) was changed in the loop's body on micro-batch ",
    "replaced": "keep(tensor=Counter) was changed in the loop's body on micro-batch ",
    "lr": "lr of SGD's group 0 changed from 0.1 to 0.09",
    "scheduler": "lr of SGD's group 0 changed from 0.1 to 0.09",
}


def test_what_counts_bodies_is_refused_with_the_way_out():
    fine = None
    for world in (1, 2):
        *refused, right = on_world(world, [*((naive, kind) for kind in SAYS), (as_it_should_be, "")])
        for kind, ranks in zip(SAYS, refused, strict=True):
            for message, bodies in ranks:
                assert message.startswith(SAYS[kind]), (kind, message)
                assert "write `if run.step(loss): ...`, which is true once a step on any number of ranks" in message
                assert bodies <= 2, "at once"
        fine = fine or right[0]
        assert right == [fine] * world
    assert fine[0] == 10


# ---- between run.epochs and run.train --------------------------------------------------------------------------------


def with_a_beginning(directory, save_every="1 step", kill=None, saved=None):
    """Each epoch begins with what changes saved state: a scheduler kept, weights reset, a log, an evaluation."""
    with Run(checkpoint=directory, save_every=save_every, keep=20) as run:
        module = net()
        model = run.model(module)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        run.keep(scheduler=scheduler)
        batches, told = run.loader(X, **SIZES), []
        for epoch in run.epochs(3):
            if epoch:
                scheduler.step()
            with torch.no_grad():
                module[3].weight.zero_()
                module[0].bias += torch.rand(8)
            for batch in run.evaluate(batches):
                run.measure(first=model(batch).squeeze(1), drawn=float(torch.rand(())))
            run.log(begins=epoch)
            for batch in run.train(batches):
                if run.step(model(batch).square().mean()) and kill == run.progress.step:
                    wait_for_save(directory, saved)
                    os.kill(os.getpid(), signal.SIGKILL)
            run.log(ends=epoch)
            for batch in run.evaluate(batches):
                run.measure(last=model(batch).squeeze(1), drawn=float(torch.rand(())))
            run.log(evaluated=epoch)
            told.append((float(torch.rand(())), optimizer.param_groups[0]["lr"]))
        return state_hash(module, optimizer, scheduler), run.metrics, told[-1]


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """What comes of `with_a_beginning` in one go, and its record."""
    directory = tmp_path_factory.mktemp("begun")
    return on_world(1, [(with_a_beginning, directory, RARELY)])[0][0], metric_lines(directory)


@pytest.mark.parametrize(
    ("kill", "saved", "save_every", "world"), [(3, 2, "1 step", 2), (6, 5, "1 step", 1), (7, 5, "1 epoch", 3)]
)
def test_what_an_epoch_begins_with_counts_once_however_often_it_is_resumed(
    tmp_path, begun, kill, saved, save_every, world
):
    expected, record = begun
    outcomes = run_each(trying_few, world, with_a_beginning, tmp_path / "killed", save_every, kill, saved)
    assert "killed by SIGKILL" in str([o.error for o in outcomes]), outcomes
    ((found,),) = on_world(1, [(with_a_beginning, tmp_path / "killed", RARELY)], env={RESUME: "1"})
    assert found == expected
    assert metric_lines(tmp_path / "killed") == record


def limited_epochs(directory, die_in_evaluation=False):
    """Each epoch is left after two of its four steps, and evaluated; rank 0 may die in the first evaluation."""
    with Run(seed=1, checkpoint=directory, save_every="1 step") as run:
        model = run.model(nn.Linear(2, 1))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        batches = run.loader(torch.arange(32.0).view(16, 2) / 32, global_batch=4, micro_batch=1)
        for _ in run.epochs(2):
            for batch in run.train(batches):
                if run.step(model(batch).square().mean()) and run.progress.epoch_step == 2:
                    break
            for batch in run.evaluate(batches):
                run.measure(output=model(batch).squeeze(1))
                if die_in_evaluation and run.rank == 0:
                    wait_until(lambda: _has(1, directory), "the checkpoint of step 1")
                    os.kill(os.getpid(), signal.SIGKILL)
        return run.progress, state_hash(model, optimizer), run.metrics


def _has(step, directory):
    return any(one.step == step for one in list_checkpoints(Path(directory)))


def test_an_epoch_that_was_left_by_break_is_over_also_after_a_resume(tmp_path):
    (whole,) = run_ranks(limited_epochs, 1, str(tmp_path / "whole"))
    assert whole[0].step == 4
    run_each(limited_epochs, 2, str(tmp_path / "killed"), True)
    resumed = run_ranks(limited_epochs, 2, str(tmp_path / "killed"), env={RESUME: "1"})
    assert resumed == [whole] * 2


def loaders_in_turn(directory, leave_after=None):
    """Each epoch has a data set of its own length; the second is left within its epoch."""
    data = torch.arange(32.0).view(16, 2) / 32
    with Run(seed=1, checkpoint=directory) as run:
        model = run.model(nn.Linear(2, 1))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        loaders = [run.loader(part, global_batch=4, micro_batch=1) for part in (data, data[:9])]
        for epoch in run.epochs(3):
            for batch in run.train(loaders[epoch % 2]):
                if run.step(model(batch).square().mean()) and run.progress.step == leave_after:
                    return None
        return run.progress, state_hash(model, optimizer), run.metrics


@pytest.mark.parametrize(("leave_after", "before", "after"), [(2, 1, 3), (6, 4, 2)])
def test_loaders_of_different_length_in_turn_are_resumed(tmp_path, leave_after, before, after):
    ((whole,),) = on_world(1, [(loaders_in_turn, str(tmp_path / "whole"))])
    assert whole[0].step == 4 + 3 + 4
    legs = str(tmp_path / "legs")
    assert on_world(before, [(loaders_in_turn, legs, leave_after)]) == [[None] * before]
    assert on_world(after, [(loaders_in_turn, legs)], env={RESUME: "1"}) == [[whole] * after]
