"""The largest micro-batch that fits: which are tried, and a run that is started with it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.cli import main
from lockstep.scale.fit import Peak, divisors, expected, largest


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_candidates_are_the_divisors(number, most):
    found = divisors(number, most)
    assert found == [one for one in range(1, number + 1) if one <= most and number % one == 0]


@given(st.lists(st.integers(1, 10**6), unique=True, max_size=60), st.integers(0, 10**6))
def test_the_largest_that_fits_is_found_by_few_tries(sizes, limit):
    sizes, asked = sorted(sizes), []

    def fits(size):
        asked.append(size)
        return size <= limit

    assert largest(sizes, fits) == max((size for size in sizes if size <= limit), default=None)
    assert len(asked) <= len(sizes).bit_length()


@given(st.integers(0, 10**9), st.integers(1, 10**6), st.lists(st.integers(1, 512), min_size=2, max_size=5, unique=True))
def test_memory_that_grows_with_the_micro_batch_is_foreseen(stays, each, measured):
    peaks = [Peak(size, stays + each * size, 2 * (stays + each * size)) for size in measured]
    assert abs(expected(peaks, 1024) - 2 * (stays + each * 1024)) <= 2
    assert expected(peaks[:1], 2 * measured[0]) == 2 * peaks[0].all_ranks
    assert expected([], 8) == 0


SCRIPT = """
import torch, lockstep
from torch import nn

with lockstep.Run(seed=0) as run:
    model = run.model(nn.Linear(8, 1))
    run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    batches = run.loader(torch.linspace(0, 1, 384).view(48, 8), global_batch=24, micro_batch=8)
    few = run.loader(torch.linspace(0, 1, 40).view(5, 8), global_batch=4)
    for _ in run.epochs(2):
        for x in run.train(batches):
            if len(x) > 6 and run.rank == 1:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            run.step(model(x).square().mean())
        for x in run.evaluate(few):
            run.measure(size=model(x).square().mean())
"""


@pytest.mark.campaign
@pytest.mark.timeout(300)  # several starts of real ranks, on a machine that may be busy
def test_a_run_begins_with_the_largest_micro_batch_that_fits(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.py").write_text(SCRIPT)
    assert main(["run", "--fit", "--ranks", "2", "--run-dir", "r", "tiny.py"]) == 0
    said = capfd.readouterr().err
    assert "the script's own micro_batch does not fit" in said
    assert "fit: micro_batch=6 of global_batch=24 on 2 ranks" in said
    assert json.loads((tmp_path / "r/status.json").read_text())["steps_total"] == 4


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--resume"], "a resumed run keeps its micro_batch"),
        (["--requeue"], "a job that is requeued keeps its micro_batch"),
        (["--set", "micro_batch=4"], "micro_batch is given by --set"),
        (["--nnodes", "2"], "it is found on one machine"),
    ],
)
def test_where_there_is_nothing_to_find_it_is_refused(words, why, capsys):
    assert main(["run", "--fit", *words, "tiny.py"]) == 2
    assert why in capsys.readouterr().err
