"""Lines of one form that two ranks print: other numbers are found, but not a rank's own times and the like."""

import pytest

from lockstep.launch.terminal.console import Tail
from lockstep.launch.workers.output_comparison import OutputComparison

OWN = [
    ("epoch 3 loss 0.25 took 12.1 s", "epoch 3 loss 0.25 took 12.3 s"),
    ("epoch 3 | loss 0.25 | 12.1s | 812 samples/s", "epoch 3 | loss 0.25 | 12.3s | 799 samples/s"),
    ("train time: 12.1, loss: 0.5", "train time: 12.3, loss: 0.5"),
    ("epoch_time=0:01:13 loss=0.5", "epoch_time=0:01:14 loss=0.5"),
    ("2026-11-26 04:05:33,123 INFO loss 0.5", "2026-11-26 04:05:34,001 INFO loss 0.5"),
    ("rank 0 of 2", "rank 1 of 2"),
    ("[0] ready", "[1] ready"),
    ("using cuda:0", "using cuda:1"),
    ("peak memory 1.21 GiB", "peak memory 1.30 GiB"),
    ("1.21GB allocated", "1.30GB allocated"),
    ("12.1 it/s", "13.2 it/s"),
    ("34 images per second", "35 images per second"),
    ("pid 4711", "pid 4712"),
    ("peak rss 287700", "peak rss 287704"),
    ("Epoch: [0] Time 0.0142 Data 0.0110 Loss 0.6972", "Epoch: [0] Time 0.0151 Data 0.0099 Loss 0.6972"),
    ("local loss 0.25", "local loss 0.75"),
    ("local_right=12", "local_right=13"),
    ("<object at 0x7f3a>", "<object at 0x1fbe>"),
    ("no number", "none either"),
    ("epoch 3 loss 0.25", "epoch 3 accuracy 0.75"),
    ("12:05:01 loss 0.5", "12:05:02 loss 0.5"),
    ("step 5: 12.1 ms", "step 5: 11.9 ms"),
]
DIFFERENT = [
    ("epoch 3 loss 0.25", "epoch 3 loss 0.26"),
    ("0.25", "0.26"),
    ("right: 45", "right: 47"),
    ("loss 0.25, 12.1 s", "loss 0.26, 12.3 s"),
    ("12.1 s, loss 0.25", "12.3 s, loss 0.26"),
    ("{'loss': 2.5e-3, 'acc': 0.5}", "{'loss': 2.5e-4, 'acc': 0.5}"),
    ("time 3 loss 0.25", "time 3 loss 0.26"),
    ("accuracy 45%", "accuracy 47%"),
    ("loss -0.25", "loss +0.25"),
    ("best score: 0.25 (epoch 3)", "best score: 0.25 (epoch 4)"),
    ("samples 800 in 3.1 s", "samples 600 in 3.1 s"),
    ("norm 1e-05", "norm 2e-05"),
    ("tensor(0.2500)", "tensor(0.2600)"),
]


@pytest.fixture
def numbers(tmp_path):
    log = tmp_path / "rank-0001.log"
    log.touch()
    tail = Tail(log, 0)
    yield OutputComparison(1, tail)
    tail.close()


@pytest.mark.parametrize("lines", OWN, ids=lambda lines: lines[0])
def test_what_is_a_ranks_own_may_differ(numbers, lines):
    assert numbers.differing(*lines) is None


@pytest.mark.parametrize("lines", DIFFERENT, ids=lambda lines: lines[0])
def test_other_numbers_are_found(numbers, lines):
    assert numbers.differing(*lines) == lines


def test_lines_of_one_form_are_compared_in_their_order_whenever_they_come(numbers):
    told = [f"epoch {epoch} loss {epoch / 8}" for epoch in range(6)]
    assert numbers.differing("\n".join(["begin 1", *told[:4]]), "") is None
    assert numbers.differing("", "\n".join(["other 2", *told])) is None
    assert numbers.differing("\n".join([told[4], "epoch 5 loss 9"]), "") == ("epoch 5 loss 9", told[5])


def test_a_form_that_only_one_rank_prints_costs_little(numbers):
    for turn in range(150):
        assert numbers.differing("\n".join(f"form {'x' * form} {turn}" for form in range(300)), "") is None
    lines = [line for both in numbers._waiting.values() for line in both[0]]
    assert len(lines) <= 200 * 100
    assert numbers.differing("", "form x 7") is None
