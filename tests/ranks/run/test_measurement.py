"""A run that is measured: what it says of each step, that it ends by itself, and that no bit is another."""

import os
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lockstep.launch_contract import MEASURE
from lockstep.run import Run
from lockstep.run.benchmark.step_recorder import HostClock, Mark, RecordedStep, step_times
from lockstep.step_record import MeasureRequest, RankRecord
from lockstep.testing import state_hash
from worlds import on_world

SLEEP_S = 0.004


class Slow(torch.utils.data.Dataset):
    def __init__(self, seconds):
        self.seconds = seconds

    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return torch.full((8,), index / 64)


class SlowModel(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x):
        time.sleep(self.seconds)
        return self.last(torch.dropout(self.first(x).relu(), 0.2, train=self.training))


def trained(directory, steps=6, strategy="ddp", seconds=0.0, **asked):
    """The hashes after each step, of a run that is measured if there is a directory for what is found."""
    hashes = []
    request = MeasureRequest(str(directory), steps, **asked)
    os.environ[MEASURE] = request.to_text() if directory else ""
    try:
        train(hashes, strategy, seconds)
    except SystemExit as end:
        return hashes if directory and not end.code else f"it ended with {end.code}"
    finally:
        del os.environ[MEASURE]
    return hashes


def train(hashes, strategy, seconds):
    with Run(strategy=strategy, precision="bf16", workers=0) as run:
        model = run.model(SlowModel(seconds))
        run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
        batches = run.loader(Slow(seconds / 4), global_batch=16, micro_batch=4)
        for _ in run.epochs(3):
            for x in run.train(batches):
                if run.step(model(x).square().mean()) and strategy == "ddp":
                    hashes.append(state_hash(model))


def records(directory, ranks=1):
    request = MeasureRequest(str(directory), 0)
    return [RankRecord.read(request.record(rank)) for rank in range(ranks)]


def test_no_bit_is_another_where_it_is_measured_and_other_ranks_measure_too(tmp_path):
    sums = (4096, 65536)
    results = on_world(
        2,
        [
            (trained, None),
            (trained, tmp_path / "lean"),
            (trained, tmp_path / "all", 6, "ddp", 0.0),
            (trained, tmp_path / "fsdp", 4, "fsdp"),
            (measured_sums, tmp_path / "sums", sums),
        ],
    )
    whole, lean, _, _, _ = results
    assert lean[0] == lean[1] == whole[0][:6], results
    for rank, record in enumerate(records(tmp_path / "lean", 2)):
        assert (record.rank, record.ranks, record.backend) == (rank, 2, "gloo")
        assert [step.step for step in record.steps] == list(range(6))
        assert [len(step.data_s) for step in record.steps] == [2] * 6, "two of four micro-batches each"
        assert [step.begins_pass for step in record.steps] == [True, False, False, False, True, False]
        assert all(step.exposed_s > 0 for step in record.steps)
    assert all(step.exposed_s > 0 for record in records(tmp_path / "fsdp", 2) for step in record.steps)
    for record in records(tmp_path / "sums", 2):
        assert [size for size, _ in record.sums] == list(sums)
        assert all(seconds > 0 for _, seconds in record.sums)


def measured_sums(directory, sums):
    return trained(directory, 2, "ddp", 0.0, sum_bytes=sums, sum_budget_s=1.0)


def test_known_times_are_found_where_they_were_spent(tmp_path):
    plain = trained(None)
    began = time.perf_counter()
    hashes = trained(tmp_path, 6, "ddp", SLEEP_S, gradients=True, memory=True, flops=True)
    took = time.perf_counter() - began
    assert hashes[:6] == plain[:6], "measuring gradients, memory and operations changed a bit"
    (record,) = records(tmp_path)
    assert len(record.steps) == 6
    for step in record.steps:
        assert len(step.data_s) == len(step.forward_s) == len(step.backward_s) == 4
        # Four samples to a micro-batch, each of which sleeps a quarter; the model sleeps as long.
        assert all(seconds >= SLEEP_S for seconds in (*step.data_s, *step.forward_s))
        assert step.exposed_s == 0
        assert min(*step.backward_s, step.optimizer_s, step.other_s) > 0
        assert step.cpu_s < step.compute_s, "a model that sleeps uses no CPU"
    ends = [step.began_s + step.total_s for step in record.steps]
    assert ends[-1] <= took
    for end, following in zip(ends, record.steps[1:], strict=False):
        assert end <= following.began_s + 1e-6, "parts of two steps overlap"
    names = [gradient.name for gradient in record.gradients]
    assert sorted(names[:2]) == ["last.bias", "last.weight"], "the last layer's gradients are ready first"
    assert sorted(names[2:]) == ["first.bias", "first.weight"]
    assert record.gradient_bytes == record.parameter_bytes == 4 * (8 * 16 + 16 + 16 + 1)
    assert record.optimizer_bytes >= 2 * record.parameter_bytes
    assert record.flops_per_sample == 2 * (2 * (8 * 16 + 16) + 16)  # forward, weights, and one layer's input
    assert record.activation_bytes > 0


@pytest.mark.parametrize("steps", [100, 12])
def test_a_short_training_is_measured_to_its_end(tmp_path, steps):
    assert len(trained(tmp_path, steps)) == 12
    assert len(records(tmp_path)[0].steps) == 12


PARTS = st.sampled_from(["data", "forward", "backward", "exposed", "optimizer", "other", "left out"])


@given(st.lists(st.tuples(PARTS, st.floats(0, 1), st.floats(0, 1), st.floats(0, 1)), max_size=20))
def test_the_parts_of_a_step_add_up_to_it(marked):
    at = cpu = waited = 0.0
    marks = [Mark("begin", 0.0)]
    for part, seconds, share, wait in marked:
        at, cpu, waited = at + seconds, cpu + share * seconds, waited + wait
        marks.append(Mark(part, at, cpu, waited))
    found = step_times(RecordedStep(3, 16, False, marks), HostClock().seconds, 0.0, on_gpu=False)
    counted = sum(seconds for part, seconds, *_ in marked if part != "left out")
    assert found.total_s == pytest.approx(counted)
    parts = (*found.data_s, *found.forward_s, *found.backward_s, found.exposed_s, found.optimizer_s, found.other_s)
    assert min(parts) >= 0
    assert found.exposed_s >= sum(seconds for part, seconds, *_ in marked if part == "exposed") - 1e-9
    assert found.cpu_s <= sum(s for part, s, *_ in marked if part in ("forward", "backward")) + 1e-9


class Partly(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x):
        return self.used(x)


def train_partly():
    with Run(workers=0, replay=False) as run:
        model = run.model(Partly())
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches = run.loader(Slow(0.0), global_batch=16, micro_batch=8)
        for _ in run.epochs(9):
            for x in run.train(batches):
                loss = model(x).square().mean()
                run.step(loss)
                float(loss.detach())
            for x in run.evaluate(batches):
                x.sum().item()


def test_lines_that_need_values_and_parameters_without_a_gradient_are_named(tmp_path, monkeypatch):
    request = MeasureRequest(str(tmp_path), 9, gradients=True, waits=True, budget_s=1e-9)
    monkeypatch.setenv(MEASURE, request.to_text())
    with pytest.raises(SystemExit):
        train_partly()
    (record,) = records(tmp_path)
    assert record.unused == ("unused.weight", "unused.bias")
    assert len(record.steps) == 3, "there is no time for more"
    (wait,) = record.waits
    assert (wait.file, wait.calls, wait.count) == (__file__, "float()", 2.0)
    assert wait.seconds > 0
    assert (record.samples_per_epoch, record.workers) == (64, 0)
