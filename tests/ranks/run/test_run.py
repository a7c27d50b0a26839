"""What the loop promises beside the bits: order of events, means, checkpoints, records."""

import json
import os
import random
import shutil
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from campaign_marks import IN_CAMPAIGN
from lockstep.checkpoint import list_checkpoints
from lockstep.collectives import single_rank_group
from lockstep.errors import LockstepError, UsageError
from lockstep.progress import Progress
from lockstep.run import Run
from lockstep.run.stopping.save_stop import SaveStopController
from lockstep.run.stopping.stop_requests import JobDeadline
from lockstep.settings import Interval
from lockstep.testing import state_hash
from worlds import on_world

X = torch.sin(torch.arange(76.0)).view(38, 2)
SIZES = {"global_batch": 8, "micro_batch": 2}  # 5 steps an epoch, the last one of 6 samples in 3 micro-batches


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1))

    def forward(self, x):
        return self.layers(x)


class Training:
    """A run with everything in it."""

    def __init__(self, run):
        self.run = run
        self.model = run.model(Net())
        self.optimizer = run.optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9))
        self.scheduler = run.scheduler(torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5))
        self.batches = run.loader(X, **SIZES)
        self.seen = []

    def learn(self, batch):
        loss = self.model(batch).square().mean()
        self.run.measure(big=batch[:, 0] > 0, number=3.0)
        self.run.step(loss)

    def epoch(self, until=None):
        for batch in self.run.train(self.batches):
            self.learn(batch)
            if self.run.progress.step == until:
                return

    def hash(self):
        return state_hash(self.model, self.optimizer, self.scheduler)


def whole(directory=None, epochs=3, until=None, **settings):
    """Train to the end or to step ``until``; the hash and the metrics of each epoch."""
    with Run(checkpoint=directory, **settings) as run:
        training, told = Training(run), []
        for _ in run.epochs(epochs):
            training.epoch(until)
            if run.progress.step == until:
                break
            told.append(dict(run.metrics))
        return training.hash(), told, run.progress


def test_progress_counts_steps_epochs_and_samples():
    _, _, progress = whole(epochs=2)
    assert progress == Progress(step=10, epoch=2, epoch_step=0, samples=76)


def test_schedulers_count_optimizer_steps():
    with Run() as run:
        training = Training(run)
        for _ in run.epochs(1):
            training.epoch()
        assert training.scheduler.last_epoch == 5
        assert training.optimizer.param_groups[0]["lr"] == 0.05


def test_what_breaks_off_in_a_step_leaves_the_state_of_the_step_before():
    with Run(replay=False) as run:
        training = Training(run)
        for epoch in run.epochs(2):
            for number, batch in enumerate(run.train(training.batches)):
                if number == 9:  # the second micro-batch of the third step: its gradient is never used
                    run.step(training.model(batch).square().mean())
                    break
                training.learn(batch)
                if number == 7:
                    after_two_steps = training.hash()
            if epoch == 0:
                assert training.hash() == after_two_steps
                assert run.progress.epoch_step == 2
                assert all(p.grad is None for p in training.model.parameters())
                break


@pytest.mark.parametrize("until", [3, 5, 7])
def test_resumed_in_the_midst_it_ends_in_the_same_bits_and_means(tmp_path, monkeypatch, until):
    expected, means, progress = whole()
    _, before, at = whole(tmp_path, until=until)
    assert at.step == until
    monkeypatch.setenv("LOCKSTEP_RESUME", "1")
    found, after, end = whole(tmp_path)
    assert (found, end) == (expected, progress)
    assert before + after == means, "the epoch that was broken off has the means of a whole one"


def test_a_run_that_is_done_is_not_done_again(tmp_path, monkeypatch):
    found, _, progress = whole(tmp_path, epochs=1)
    monkeypatch.setenv("LOCKSTEP_RESUME", "1")
    assert whole(tmp_path, epochs=1) == (found, [], progress)


def saved_steps(directory):
    return sorted(checkpoint.step for checkpoint in list_checkpoints(directory))


def test_checkpoints_by_steps_by_epochs_and_at_the_end(tmp_path):
    whole(tmp_path / "steps", save_every="4 steps", keep=9)
    assert saved_steps(tmp_path / "steps") == [4, 8, 12, 15]
    whole(tmp_path / "epochs", save_every="2 epochs", keep=9)
    assert saved_steps(tmp_path / "epochs") == [10, 15]
    whole(tmp_path / "end")
    assert saved_steps(tmp_path / "end") == [15]
    whole(tmp_path / "kept", save_every="1 step", keep=2)
    assert saved_steps(tmp_path / "kept") == [14, 15]


def test_leaving_by_exit_without_complaint_saves_as_the_end_does(tmp_path):
    def script():
        with Run(checkpoint=tmp_path) as run:
            training = Training(run)
            for batch in run.train(training.batches):
                training.learn(batch)
            sys.exit()

    with pytest.raises(SystemExit):
        script()
    assert saved_steps(tmp_path) == [5]


def test_checkpoints_by_seconds():
    clock = [0.0]
    save_stop = SaveStopController(
        single_rank_group(),
        Interval.parse("10 s"),
        lambda: None,
        JobDeadline(None),
        peer_timeout_s=1,
        now=lambda: clock[0],
    )
    save_stop.open()
    saved = []
    for step in range(1, 30):
        clock[0] += 3
        if save_stop.after_step(step).save:
            save_stop.saved()
            saved.append(step)
    save_stop.close()
    assert saved == [4, 8, 12, 16, 20, 24, 28]


def test_what_is_kept_is_restored(tmp_path, monkeypatch):
    class Counter:
        n = 0

        def state_dict(self):
            return {"n": self.n}

        def load_state_dict(self, state):
            self.n = state["n"]

    def count(epochs):
        counter = Counter()
        with Run(checkpoint=tmp_path) as run:
            training = Training(run)
            run.keep(counter=counter)
            for _ in run.epochs(epochs):
                training.epoch()
                counter.n += 1
        return counter.n

    assert count(2) == 2
    monkeypatch.setenv("LOCKSTEP_RESUME", "1")
    assert count(3) == 3


def test_evaluation_sees_each_sample_once_and_leaves_the_training_as_it_was():
    with Run() as run:
        training = Training(run)
        held_out = run.loader(torch.arange(19.0), global_batch=8, micro_batch=3, shuffle=False)
        hashes, seen = [], []
        for _ in run.epochs(2):
            training.epoch()
            before = training.hash()
            for values in run.evaluate(held_out):
                assert not training.model.training
                assert not torch.is_grad_enabled()
                run.measure(mean=values)
                seen += values.tolist()
            assert training.model.training
            assert training.hash() == before
            hashes.append(before)
        assert seen == list(range(19)) * 2
        assert run.metrics["mean"] == 9.0
        assert set(run.metrics) == {"loss", "big", "number", "mean"}
    assert hashes[1] == whole(epochs=2)[0]


def test_the_record_and_the_log(tmp_path, capsys):
    with Run(checkpoint=tmp_path) as run:
        training = Training(run)
        for epoch in run.epochs(2):
            training.epoch()
            told = run.log(epoch=epoch, loss=7.0)
    assert told["loss"] == 7.0, "what is said by hand counts"
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["epoch"], line["number"]) for line in lines if "number" in line] == [
        (5, 1, 3.0),
        (10, 2, 3.0),
    ]
    assert "step 10: epoch 2, loss 7" in capsys.readouterr().err


def test_random_numbers_do_not_depend_on_what_the_script_drew_before():
    drawn = []
    for noise in (0, 5):
        with Run(seed=4, replay=False) as run:
            training = Training(run)
            torch.rand(noise)
            for batch in run.train(training.batches):
                drawn.append((float(torch.rand(())), random.random(), float(np.random.rand())))
                torch.rand(noise)
                training.learn(batch)
    half = len(drawn) // 2
    assert drawn[:half] == drawn[half:]
    assert len(set(drawn[:half])) == half, "the same numbers in each micro-batch"


def test_initial_weights_follow_the_seed():
    hashes = []
    for seed in (1, 2, 1):
        with Run(seed=seed):
            hashes.append(state_hash(Net()))
    assert hashes[0] == hashes[2] != hashes[1]


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own code
def test_a_compiled_model_learns(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    losses = []
    with Run(compile=True) as run:
        net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
        model = run.model(net)
        assert set(model.state_dict()) == set(net.state_dict())
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches = run.loader(X[:32], **SIZES)
        for _ in run.epochs(3):
            for batch in run.train(batches):
                run.step(F.mse_loss(model(batch), batch[:, :1]))
            losses.append(run.metrics["loss"])
    assert losses[2] < losses[0]


# ---- on ranks --------------------------------------------------------------------------------------------------------


def measured():
    """Means of values whose sum depends on the order of the additions, in training and in evaluation."""
    with Run() as run:
        model = run.model(nn.Linear(1, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        values = (10.0 ** torch.linspace(-6, 6, 37)).view(-1, 1)
        held_out = run.loader(values, global_batch=16, micro_batch=3, shuffle=False)
        seen = []
        for _ in run.epochs(2):
            for batch in run.train(run.loader(values, global_batch=9, micro_batch=2)):
                run.step((model(batch * 1e-6)).square().mean())
                run.measure(values=batch.squeeze(1), half=batch.squeeze(1).bfloat16(), yes=batch.squeeze(1) > 1)
            for batch in run.evaluate(held_out):
                run.measure(held=batch.squeeze(1), per_batch=batch.mean())
                seen += batch.squeeze(1).tolist()
        return sorted(run.metrics.items()), sorted(value for part in run.gather(seen) for value in part)


def passed_around():
    with Run() as run:
        number, tensor = run.sum(run.rank + 1), run.sum(torch.tensor([1.0, run.rank]))
        mean = run.mean(float(run.rank)), run.mean(torch.tensor(float(run.rank)))
        run.barrier()
        return number, tensor.tolist(), mean[0], float(mean[1]), run.gather(run.rank), run.broadcast(run.rank)


def downloaded(directory):
    with Run() as run:
        path = os.path.join(directory, "data")
        with run.leader_first():
            first = not os.path.exists(path)
            if first:
                with open(path, "w") as file:
                    file.write("data")
        with run.leader_first():
            pass
        return first


def not_downloaded():
    with Run() as run:
        try:
            with run.leader_first():
                raise FileNotFoundError("no such page")
        except (FileNotFoundError, LockstepError) as error:
            return str(error)


def broken_off():
    """Left in the midst of a step, then trained on in the next epoch."""
    with Run() as run:
        training = Training(run)
        for epoch in run.epochs(3):
            if epoch == 1:
                for batch in run.train(training.batches):
                    if run.progress.epoch_step == 2:
                        break
                    training.learn(batch)
            else:
                training.epoch()
        return training.hash(), run.progress


def only_the_leader_logs(directory):
    with Run(checkpoint=directory) as run:
        training = Training(run)
        for _ in run.epochs(1):
            training.epoch()
            if run.leads:
                run.log(again=1)
            run.log()
        return run.leads


def summed_and_averaged():
    """Sums and means of truth values and of small whole numbers, which would wrap around."""
    with Run() as run:
        small = 100
        kinds = [
            True,
            torch.tensor(True),
            torch.tensor([True, run.leads]),
            torch.tensor([small], dtype=torch.int8),
            torch.tensor(200, dtype=torch.uint8),
            np.int8(small),
            np.bool_(True),
            np.uint16(60000),
            np.array([small, -small], dtype=np.int8),
            np.array([200], dtype=np.uint8),
            np.array([True, run.leads]),
        ]
        sums, means = [run.sum(kind) for kind in kinds], [run.mean(kind) for kind in kinds]
        return [np.asarray(value).tolist() for value in sums], [np.asarray(value).tolist() for value in means]


def weighed():
    """Means by count, in training and in evaluation; the loss is one of them."""
    with Run() as run:
        model = run.model(nn.Linear(1, 1))
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.0))
        tokens = torch.arange(1, 13.0).view(12, 1)  # sample i has i tokens, each of which is i
        batches = run.loader(tokens, global_batch=6, micro_batch=1)
        for _ in run.epochs(1):
            for batch in run.train(batches):
                count = int(batch.sum())
                mean = (batch * batch).sum() / count
                loss = ((model(batch) + batch) * batch).sum() / count  # the model gives 0
                run.step(loss, count=count)
                run.measure(mean=mean, count=count)
                run.measure(mean_of_samples=batch.mean())
                with pytest.raises(UsageError, match=r"run\.measure\(my_loss=\.\.\.\)"):
                    run.measure(loss=loss)
                with pytest.raises(UsageError, match=r"says how many items a value is the mean of; name the value"):
                    run.measure(count=count)
            trained = dict(run.metrics)
            for batch in run.evaluate(batches):
                run.measure(loss=(batch * batch).sum() / batch.sum(), count=batch.sum().long())
        return trained, run.metrics["loss"]


def test_on_any_world(tmp_path):
    results = {}
    for world in (1, 2, 4) if IN_CAMPAIGN else (1, 4):
        (tmp_path / str(world)).mkdir()
        results[world] = on_world(
            world,
            [
                (measured,),
                (broken_off,),
                (passed_around,),
                (downloaded, str(tmp_path / str(world))),
                (only_the_leader_logs, str(tmp_path / str(world) / "run")),
                (summed_and_averaged,),
                (weighed,),
            ],
        )
        means, broken, passed, first, leads, summed, by_count = results[world]
        assert means == [results[1][0][0]] * world
        assert broken == [results[1][1][0]] * world
        total = world * (world + 1) // 2
        mean = (world - 1) / 2
        assert passed == [(total, [world, total - world], mean, mean, list(range(world)), 0)] * world
        assert first == [True] + [False] * (world - 1)
        assert leads == [True] + [False] * (world - 1)
        w = world
        sums = [w, w, [w, 1], [100 * w], 200 * w, 100 * w, w, 60000 * w, [100 * w, -100 * w], [200 * w], [w, 1]]
        shares = [1, 1, [1, 1 / w], [100], 200, 100, 1, 60000, [100, -100], [200], [1, 1 / w]]
        assert summed == [(sums, shares)] * w
        per_token = 650 / 78  # sum of i * i, by tokens
        assert by_count == [by_count[0]] * w == [results[1][6][0]] * w
        trained, held_out = by_count[0]
        assert trained == pytest.approx({"loss": per_token, "mean": per_token, "mean_of_samples": 6.5}, rel=1e-6)
        assert held_out == pytest.approx(per_token, rel=1e-6)
        lines = (tmp_path / str(world) / "run" / "metrics.jsonl").read_text().splitlines()
        assert sum("loss" in json.loads(line) for line in lines) == 2
    values = (10.0 ** torch.linspace(-6, 6, 37)).tolist()
    means, seen = results[4][0][0]
    assert seen == sorted(values * 2)
    for name in ("values", "held"):
        assert dict(means)[name] == pytest.approx(sum(values) / 37, rel=1e-12)
    assert dict(means)["yes"] == 18 / 37


def test_a_leader_that_fails_first_fails_all():
    (messages,) = on_world(2, [(not_downloaded,)])
    assert messages == ["no such page", "the leader of this node failed inside run.leader_first(); see its error"]


def trained_on_by_default(device):
    """The model, the metrics and the losses of a run whose script makes tensors on ``device`` unless it says where."""
    with Run(seed=1, clip_norm=0.5, track="none") as run, torch.device("cpu"):
        net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2))
        data = torch.randn(26, 3), torch.arange(26) % 2
        with torch.device(device):
            model = run.model(net)
            run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
            batches = run.loader(data, global_batch=8, micro_batch=2, shuffle=True)
            for _ in run.epochs(2):
                for x, y in run.train(batches):
                    run.step(F.cross_entropy(model(x), y), count=len(y))
                for x, y in run.evaluate(batches):
                    run.measure(right=(model(x).argmax(1) == y).float(), seen=1)
            return state_hash(run.state_dict(model)), run.metrics["right"], run.sum(2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_default_device_of_the_script_changes_nothing(ranks):
    """Of a device that holds nothing, so that each tensor made there by mistake ends the run."""
    calls = [(trained_on_by_default, "cpu"), (trained_on_by_default, "meta")]
    by_cpu, by_default = on_world(ranks, calls)
    assert by_default == by_cpu
    assert len(by_cpu[0][0]) == 64
