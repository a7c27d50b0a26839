"""The best checkpoint by a metric is kept beside the newest ones, and training can go back to it."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from lockstep.checkpoint import list_checkpoints, load_tree
from lockstep.errors import SettingError
from lockstep.launch_contract import RESUME, RESUME_FROM
from lockstep.run import Run
from lockstep.settings import BestMetric
from worlds import on_world

X = torch.arange(32.0).view(16, 2) / 32
SIZES = {"global_batch": 8, "micro_batch": 2}  # 2 steps an epoch
HELD = {2: 0.25, 4: 0.75, 6: float("nan"), 8: 0.75, 10: 0.5, 12: 0.125}  # by step


def trained(directory, epochs=5, in_body=False, best="max held", resume="", back_to="", keep=1):
    """Steps done at the beginning and at the end, and what is on disk."""
    asked = {name: value for name, value in ((RESUME, resume), (RESUME_FROM, back_to)) if value}
    os.environ.update(asked)
    try:
        with Run(checkpoint=directory, save_every="1 step", keep=keep, best=best) as run:
            model = run.model(nn.Linear(2, 1))
            run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            after_it = nn.Linear(1, 1, bias=False)
            run.keep(after_it=after_it)
            batches, began = run.loader(X, **SIZES), None

            def evaluate():
                for batch in run.evaluate(batches):
                    run.measure(held=torch.full((len(batch),), HELD[run.progress.step]))

            for _ in run.epochs(epochs):
                began = run.progress.step if began is None else began
                for batch in run.train(batches):
                    if run.step(model(batch).square().mean()) and in_body and run.progress.step % 2 == 0:
                        evaluate()
                        nn.init.constant_(after_it.weight, run.progress.step)
                if not in_body:
                    evaluate()
        return began, run.progress.step
    finally:
        for name in asked:
            del os.environ[name]


def on_disk(directory):
    """The steps that are there, and what the newest checkpoint says of the best."""
    there = list_checkpoints(directory)
    return [one.step for one in there], load_tree(there[0].path)["best"]


def best_of(step):
    return {"metric": "held", "mode": "max", "value": HELD[step], "step": step}


def test_the_best_is_kept_beside_the_newest(tmp_path):
    names = [(in_body, tmp_path / str(in_body)) for in_body in (False, True)]
    assert on_world(2, [(trained, directory, 5, in_body) for in_body, directory in names]) == [[(0, 10)] * 2] * 2
    for _, directory in names:
        assert on_disk(directory) == ([10, 4], best_of(4)), "equal is not better, and nan is never"
    later, best = (load_tree(one.path) for one in list_checkpoints(tmp_path / "True"))
    assert (later["kept"]["after_it"]["weight"], best["kept"]["after_it"]["weight"]) == (10, 4), "at the body's end"
    assert best["best"] == best_of(4)


def test_the_best_value_survives_a_resume_and_one_can_go_back_to_it(tmp_path):
    assert trained(tmp_path, epochs=2) == (0, 4)
    assert on_disk(tmp_path) == ([4], best_of(4))
    assert trained(tmp_path, epochs=6, resume="1") == (4, 12)
    assert on_disk(tmp_path) == ([12, 4], best_of(4))
    with pytest.raises(SettingError, match=r"RESUME_FROM=7: .* has checkpoints of steps 12, 4; give one of these"):
        trained(tmp_path, back_to="7")
    assert trained(tmp_path, epochs=3, back_to="best") == (4, 6)
    assert on_disk(tmp_path) == ([6, 4], best_of(4))
    assert [one.step for one in list_checkpoints(tmp_path / "before-1")] == [12]


SCRIPT = """
import lockstep, torch
with lockstep.Run(best="max held", keep=1, save_every="1 step") as run:
    model = run.model(torch.nn.Linear(1, 1))
    run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    batches = run.loader(torch.ones(4, 1), global_batch=2, micro_batch=1)
    for epoch in run.epochs(3):
        print("EPOCH", epoch)
        for batch in run.train(batches):
            run.step(model(batch).mean())
        for batch in run.evaluate(batches):
            run.measure(held=1.0 if epoch == 1 else 0.0)
"""


@pytest.mark.long
def test_the_command_line_goes_back_to_it_once(tmp_path):
    script, place = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT)

    def lockstep(*options, ranks=2):
        words = ("--nproc-per-node", str(ranks), "--run-dir", str(place))
        command = [sys.executable, "-m", "lockstep", "run", *words, *options]
        return subprocess.run([*command, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=100)

    assert lockstep(ranks=1).returncode == 0
    assert on_disk(place / "checkpoints") == ([6, 4], {"metric": "held", "mode": "max", "value": 1.0, "step": 4})
    back = lockstep("--resume-from", "best", "--max-restarts", "1", "--fault", "kill rank 1 at step 5")
    assert back.returncode == 0, back.stderr
    assert "going back to step 4; later checkpoints are in" in back.stdout + back.stderr
    assert (back.stdout + back.stderr).count("going back") == 1, "what starts it again goes on from the newest"
    assert (back.stdout + back.stderr).count("resumed at step 4") == 1
    assert (back.stdout + back.stderr).count("goes on from step 5 (state of rank 0)") == 1
    wrong = lockstep("--resume-from", "last")
    assert wrong.returncode == 2
    assert "--resume-from last: give best, or the step of a checkpoint" in wrong.stderr


def test_without_a_best_one_there_is_none_to_go_back_to(tmp_path):
    trained(tmp_path, epochs=1, best=None, keep=3)
    assert on_disk(tmp_path) == ([2, 1], None)
    with pytest.raises(SettingError, match=r"it has no best one: give Run\(best='max accuracy'\)"):
        trained(tmp_path, back_to="best")
    assert trained(tmp_path, epochs=1, best="loss", keep=3, back_to="1") == (1, 2)
    assert on_disk(tmp_path)[1]["metric"] == "loss"


@pytest.mark.parametrize(
    ("text", "mode", "name"),
    [
        ("max accuracy", "max", "accuracy"),
        ("min x", "min", "x"),
        ("val_loss", "min", "val_loss"),
        ("top1_acc", "max", "top1_acc"),
        ("macro-F1", "max", "macro-F1"),
        ("mean_iou", "max", "mean_iou"),
        ("perplexity", "min", "perplexity"),
    ],
)
def test_a_metric_is_read(text, mode, name):
    assert BestMetric.parse(text) == BestMetric(mode, name)


@pytest.mark.parametrize("text", ["", "score", "max", "less accuracy", "min a b", "accuracy_loss"])
def test_a_metric_of_which_it_is_not_plain_what_is_better(text):
    with pytest.raises(SettingError, match=r"say what is better, 'max \S+' or 'min \S+'"):
        BestMetric.parse(text)


def test_a_metric_that_nobody_measures_is_said_as_soon_as_others_are_and_at_the_end(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    for in_body in (False, True):
        trained(tmp_path / f"{in_body}", best="max hold", in_body=in_body)
        said = [line for line in capfd.readouterr().err.splitlines() if not line.startswith("step ")]
        what = [line for line in said if line.startswith("best='max hold': hold was not measured")]
        assert what[0].startswith("best='max hold': hold was not measured so far, so no checkpoint is kept as the best")
        assert what[1].startswith("best='max hold': hold was not measured, so there is no best checkpoint; run.metrics")
        assert all("held" in line and line.endswith("did you mean held?") for line in what)
        assert len(what) == 2
    trained(tmp_path / "right")
    trained(tmp_path / "right", resume="1")  # measures nothing any more
    assert "was not measured" not in capfd.readouterr().err
