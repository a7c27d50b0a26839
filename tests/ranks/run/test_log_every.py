"""`log_every`: means over so many steps, equal on any number of ranks, without gaps through kills and resumes."""

import itertools
import json
import math
import os
import signal

import pytest
import torch
from torch import nn

from lockstep.checkpoint import list_checkpoints
from lockstep.report import MetricsFile
from lockstep.run import Run
from lockstep.testing import run_each
from worlds import on_world

X = torch.linspace(0, 1, 38).view(38, 1)  # 5 steps an epoch, the last one short
W = 0.25


def trained(directory, kill_at=0, leave_at=0, resume=False, tracker=None, strategy="ddp"):
    os.environ["LOCKSTEP_RESUME"] = str(int(resume))
    given = {"checkpoint": directory, "strategy": strategy, "track": tracker, "clip_norm": math.inf}
    with Run(log_every="3 steps", save_every="2 steps", **given) as run:
        model = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            model.weight.fill_(W)
        model = run.model(model)
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches = run.loader(X, global_batch=8, micro_batch=2, shuffle=False, workers=0)
        for epoch in run.epochs(3):
            for x in run.train(batches):
                if leave_at and epoch == 1 and run.progress.epoch_step == leave_at:
                    break  # before the step: with two ranks, each has handed out one micro-batch
                done = run.step(model(x).square().mean())
                run.measure(big=x[:, 0] > 0.5)
                if done and run.progress.step == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
            run.log()
    return recorded(directory)


def recorded(directory):
    with open(f"{directory}/metrics.jsonl") as file:
        return [{k: v for k, v in json.loads(line).items() if k != "wall_s"} for line in file]


def by_hand():
    """Of each three steps: the mean loss, the part of the samples that are big, the mean norm of the gradient."""
    w, losses, big, norms = W, [], [], []
    for _, batch in itertools.product(range(3), X.double().view(-1).split(8)):
        losses.append(((w * batch) ** 2).sum())
        big.append((batch > 0.5).sum())
        norms.append(float((2 * w * batch**2).mean().abs()))
        w -= 0.1 * (2 * w * batch**2).mean()
    counts = [8, 8, 8, 8, 6] * 3
    return [
        (
            float(sum(losses[at - 3 : at])) / sum(counts[at - 3 : at]),
            int(sum(big[at - 3 : at])) / sum(counts[at - 3 : at]),
            sum(norms[at - 3 : at]) / 3,
        )
        for at in range(3, 16, 3)
    ]


def test_it_is_what_the_steps_measured_on_any_world(tmp_path):
    ((alone,), (left,)) = on_world(1, [(trained, str(tmp_path / "one")), (trained, str(tmp_path / "left1"), 0, 2)])
    rows = [row for row in alone if "loss_step" in row]
    assert [(row["step"], row["epoch"]) for row in rows] == [(3, 1), (6, 2), (9, 2), (12, 3), (15, 3)]
    for row, (loss, big, norm) in zip(rows, by_hand(), strict=True):
        assert row["grad_norm_step"] == pytest.approx(norm, rel=1e-5)
        assert row["lr"] == 0.1
        assert row["loss_step"] == pytest.approx(loss, rel=1e-5)
        assert row["big_step"] == big
    many, left_too, served = on_world(
        3,
        [
            (trained, str(tmp_path / "three")),
            (trained, str(tmp_path / "left3"), 0, 2),
            (trained, str(tmp_path / "served"), 0, 0, False, None, "parameter-server"),
        ],
    )
    assert many[0] == served[0] == alone
    assert left_too[0] == left
    import pandas  # takes half a second, which the ranks need not wait for

    table = pandas.read_json(tmp_path / "three" / "metrics.jsonl", lines=True)
    assert table.dropna(subset="loss_step").step.tolist() == [3, 6, 9, 12, 15]


def tensorboard_points(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # likewise

    events = EventAccumulator(str(directory / "tensorboard")).Reload()
    return {tag: [(e.step, round(e.value, 5)) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.campaign
def test_killed_and_resumed_every_line_and_point_is_there_once(tmp_path):
    (whole,) = on_world(
        1, [(trained, str(tmp_path / "whole"), 0, 0, False, "tensorboard,mlflow")], env=mlflow_in(tmp_path)
    )
    env = mlflow_in(tmp_path / "killed")
    for life, (kill_at, world) in enumerate([(8, 2), (12, 3), (0, 1)]):
        run_each(trained, world, str(tmp_path / "killed"), kill_at, 0, life > 0, "tensorboard,mlflow", env=env)
    assert recorded(tmp_path / "killed") == whole[0]
    points = tensorboard_points(tmp_path / "killed")
    assert points == tensorboard_points(tmp_path / "whole")
    assert [step for step, _ in points["loss_step"]] == [3, 6, 9, 12, 15]
    assert mlflow_points(tmp_path / "killed") == mlflow_points(tmp_path)


def mlflow_in(directory):
    return {"MLFLOW_TRACKING_URI": f"file:{directory}/mlflow", "MLFLOW_ALLOW_FILE_STORE": "true"}


def mlflow_points(directory):
    ((metrics,),) = [[path] for path in (directory / "mlflow").glob("*/*/metrics")]
    return {file.name: [line.split()[1:] for line in file.read_text().splitlines()] for file in metrics.iterdir()}


def test_what_was_logged_before_a_checkpoint_is_flushed_before_the_checkpoint_is_visible(tmp_path, monkeypatch):
    flush, seen = MetricsFile.flush, []

    def flushed(file):
        flush(file)
        seen.append(len(list_checkpoints(tmp_path)))

    monkeypatch.setattr(MetricsFile, "flush", flushed)
    monkeypatch.setenv("LOCKSTEP_RESUME", "0")
    trained(tmp_path)
    assert seen[0] == 0
    assert len(seen) >= 2
