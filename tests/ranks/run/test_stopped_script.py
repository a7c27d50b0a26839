"""A run that ends right after a save, and is resumed: what its script held at the save is compared, too."""

import os
from collections import Counter
from pathlib import Path
from queue import Queue

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lockstep.errors import CheckpointError
from lockstep.run import Run
from lockstep.testing import state_hash
from waiting import wait_until
from worlds import on_world

X = torch.randn(96, 4, generator=torch.Generator().manual_seed(1))
Y = (X[:, 0] > 0).long()
EPOCH = 12  # steps


class Lost(Exception):
    """Ends a run in the step after a save, as a kill does there."""


def lose(directory, lost_at):
    """End the run once the checkpoint is there, the first time."""
    was_lost = Path(directory, f"was-lost-{os.environ['RANK']}")
    if not was_lost.exists():
        wait_until(Path(directory, f"step-{lost_at:08d}").exists)
        was_lost.touch()
        raise Lost


def ended(function, *args):
    """What a script gives that goes on where it was left, "lost", or the error."""
    os.environ["LOCKSTEP_RESUME"] = "1"
    try:
        return function(*args)
    except Lost:
        return "lost"
    except CheckpointError as error:
        return str(error)


def trained(how, directory, lost_at=None):
    """The model's hash; a weight of the loss counts from step 16 on."""
    save_every = f"{lost_at or 100} steps"
    with Run(seed=0, checkpoint=directory, save_every=save_every, replay=lost_at is not None) as run:
        model = run.model(nn.Linear(4, 2))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        weight, total = 1.0, 0.0
        if how == "kept":
            run.keep(weight=1.0)
        for _ in run.epochs(2):
            total = 0.0
            for x, y in run.train(run.loader((X, Y), global_batch=8, micro_batch=2)):
                if run.progress.step == lost_at:
                    lose(directory, lost_at)
                held = run.kept.weight if how == "kept" else weight
                loss = F.cross_entropy(model(x), y)
                if run.step(loss * (held if run.progress.step > 15 else 1.0)):
                    total += 1.0
                    if run.progress.step == 3 and how != "unchanged":
                        if how == "kept":
                            run.kept.weight = 3.0
                        else:
                            weight = 3.0
            print(f"{total} steps in this epoch")
        return state_hash(model)


@pytest.mark.parametrize("lost_at", [5, EPOCH], ids=["in an epoch", "at its end"])
def test_what_a_script_held_at_a_save_is_compared_when_it_goes_on(tmp_path, lost_at):
    ways = ("kept", "own", "unchanged")
    calls = []
    for how in ways:
        calls += [(ended, trained, how, str(tmp_path / how), lost_at)] * 2
        calls += [(ended, trained, how, str(tmp_path / f"{how} whole"))] * (how != "own")
    results = iter(on_world(2, calls))
    for how in ways:
        lost, resumed = next(results), next(results)
        assert lost == ["lost"] * 2
        if how != "own":
            assert resumed == next(results)
        else:
            for text in resumed:
                assert text.startswith("the script does not go on with the values that it held when the checkpoint was")
                assert "weight, which run.step(...) depends on, was 3.0 when it began, and is 1.0 now" in text


def patient(directory, how):
    """A script that ends in its third epoch, after a save; a count of bad epochs decides when the training ends."""
    with Run(seed=0, checkpoint=directory, save_every="1 epoch") as run:
        model = run.model(nn.Linear(4, 2))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches, bad, seen = run.loader((X, Y), global_batch=8, micro_batch=2), 0, []
        if how == "kept":
            run.keep(bad_epochs=0)
        for epoch in run.epochs(9):
            seen.append(epoch)
            if epoch == 2:
                lose(directory, 2 * EPOCH)
            for x, y in run.train(batches):
                run.step(F.cross_entropy(model(x), y))
            if how == "own":
                bad += 1
                if bad == 4:
                    break
            else:
                run.kept.bad_epochs += 1
                if run.kept.bad_epochs == 4:
                    break
        return state_hash(model), seen


def test_so_it_is_between_two_epochs(tmp_path):
    calls = [(ended, patient, str(tmp_path / how), how) for how in ("own", "kept") for _ in range(2)]
    own, resumed, kept, whole = on_world(2, calls)
    assert own == kept == ["lost"] * 2
    for text in resumed:
        assert "bad, which run.train(...) depends on, was 2 when it began, and is 0 now" in text
    assert [seen for _, seen in whole] == [[2, 3]] * 2


class Own:
    """An object of the script, without attributes."""


def made_when_missing(how, directory):
    """A script whose own state is made where there is none yet, and counts in the loss from step 8 on."""
    with Run(seed=0, checkpoint=directory, save_every="5 steps") as run:
        model = run.model(nn.Linear(4, 2))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        own, table, counter = Own(), {}, Counter()
        for x, y in run.train(run.loader((X, Y), global_batch=8, micro_batch=2)):
            if run.progress.step == 5:
                lose(directory, 5)
            late = run.progress.step >= 8
            loss = F.cross_entropy(model(x), y)
            if how == "hasattr":
                if not hasattr(own, "scale"):
                    own.scale = 1.0
                if run.step(loss * own.scale if late else loss):
                    own.scale *= 1.1
            elif how == "get":
                scale = table.get("scale", 1.0)
                if run.step(loss * scale if late else loss):
                    table["scale"] = scale * 1.1
            elif how == "Counter":
                if run.step(loss * counter["steps"] if late else loss):
                    counter["steps"] += 1
            elif how == "NameError":
                try:
                    variable  # noqa: B018 - asked for
                except NameError:
                    variable = 1.0
                if run.step(loss * variable if late else loss):
                    variable *= 1.1
            elif how == "a constant":
                if not hasattr(own, "weights"):
                    own.weights = torch.tensor([1.0, 2.0])
                run.step(F.cross_entropy(model(x), y, weight=own.weights))
            elif how == "a name for two things":
                count = table.get("count", 0)
                if run.step(loss):
                    table["count"] = count + 1
                    if table["count"] % 3 == 0:
                        loss = model(X[:2]).sum()
                        print(f"for the log: {loss.item():.3f}")
            else:
                own.share = 1 + run.progress.step / 10
                run.step(loss * own.share)
        return state_hash(model)


def test_what_is_made_again_because_it_is_missing_is_compared_with_what_was_there(tmp_path):
    ways = {
        "hasattr": "own.scale",
        "get": "table['scale']",
        "Counter": "counter['steps']",
        "NameError": "variable",
        "a constant": None,
        "in each body": None,
        "a name for two things": None,
    }
    calls = []
    for how in ways:
        calls += [(ended, made_when_missing, how, str(tmp_path / how))] * 2
        (tmp_path / f"{how} whole").mkdir()
        for rank in range(2):
            (tmp_path / f"{how} whole" / f"was-lost-{rank}").touch()
        calls += [(ended, made_when_missing, how, str(tmp_path / f"{how} whole"))] * (ways[how] is None)
    results = iter(on_world(2, calls))
    for how, name in ways.items():
        lost, resumed = next(results), next(results)
        assert lost == ["lost"] * 2
        if name is None:
            assert resumed == next(results), how
        else:
            assert all(f"{name}, which run.step(...) depends on, was " in text for text in resumed), resumed
            assert all("is made anew now, as 1" in text for text in resumed), resumed


class Hold:
    """A policy that leaves a rate as it is."""

    def __call__(self, rate):
        return rate


class Halve(Hold):
    """A policy that halves a rate."""

    def __call__(self, rate):
        return rate / 2


def led_by_referents(directory):
    """A script whose variables lead to other functions and objects after the first epoch, and to other numbers."""
    os.environ["LOCKSTEP_RESUME"] = "1"
    with Run(seed=0, checkpoint=directory, save_every="1 epoch") as run:
        model = run.model(nn.Linear(4, 2))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        slow, fast = (torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma) for gamma in (0.99, 0.5))
        run.keep(slow=slow, fast=fast, shown=0)
        batches, held_out = (run.loader((X, Y), global_batch=8, micro_batch=2) for _ in range(2))
        policy, criterion, current, best, rates = Hold(), F.cross_entropy, slow, 9.0, 0
        for epoch in run.epochs(4):
            if epoch == 2:
                lose(directory, 2 * EPOCH)
            for x, y in run.train(batches):
                run.step(criterion(model(x), y))
            for group in optimizer.param_groups:
                group["lr"] = policy(group["lr"])
            current.step()
            if run.metrics["loss"] < best:
                best = run.metrics["loss"]
                for x, y in run.evaluate(held_out):  # noqa: B007 - a name of the training's, set anew there
                    run.measure(mean=x)
            policy, criterion, current = Halve(), F.multi_margin_loss, fast
            rates = rates + 1


def test_it_is_told_which_functions_and_objects_variables_led_to(tmp_path, capsys):
    with pytest.raises(Lost):
        led_by_referents(str(tmp_path))
    capsys.readouterr()
    led_by_referents(str(tmp_path))
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "have begun anew" in line)
    assert "policy (an object of Halve, now an object of Hold)" in line
    assert "criterion (multi_margin_loss, now cross_entropy)" in line
    assert "current (run.kept.fast, now run.kept.slow)" in line
    assert "best (0." in line
    assert "rates (2, now 0)" in line, "the number that is kept is another one"


def rates_of_epochs(how, directory):
    """A script that takes the rate of each epoch from a queue, or from the lines of a file."""
    os.environ["LOCKSTEP_RESUME"] = "1"
    text = Path(directory, "rates.txt")
    text.write_text("0.1\n0.05\n0.02\n")
    rates = Queue()
    for line in text.read_text().splitlines():
        rates.put(line)
    with Run(seed=0, checkpoint=Path(directory, "saved"), save_every="1 epoch") as run, text.open() as lines:
        model = run.model(nn.Linear(4, 2))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for epoch in run.epochs(3):
            if epoch == 1:
                lose(directory + "/saved", EPOCH)
            for x, y in run.train(run.loader((X, Y), global_batch=8, micro_batch=2)):
                run.step(F.cross_entropy(model(x), y))
            optimizer.param_groups[0]["lr"] = float(rates.get() if how == "queue" else lines.readline())


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("queue", r"rates, which .* depends on, was 2 items of checksum \w+ when it began, and is 3 items of"),
        ("file", "lines, which .* depends on, was a file at position 4 when it began, and is a file at position 0 now"),
    ],
)
def test_queues_and_files_go_on_where_they_were(tmp_path, how, says):
    with pytest.raises(Lost):
        rates_of_epochs(how, str(tmp_path))
    with pytest.raises(CheckpointError, match=says):
        rates_of_epochs(how, str(tmp_path))
