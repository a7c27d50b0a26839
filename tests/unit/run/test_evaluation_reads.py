"""A measured value that depends on the batch before is refused by the script's source, and no other one is."""

import runpy
import textwrap

import pytest

from lockstep.errors import UsageError

SCRIPT = """
import collections, torch
from torch import nn
from torch.nn import functional as F
import lockstep

{setup}

with lockstep.Run(seed=0, replay={replay}) as run:
    model = run.model(nn.Linear(3, 2))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    data = torch.randn(16, 3), torch.arange(16) % 2
    batches, test = run.loader(data, global_batch=8, micro_batch=2), run.loader(data, global_batch=8, micro_batch=2)
    for epoch in run.epochs(2):
        for x, y in run.train(batches):
            run.step(F.cross_entropy(model(x), y))
{before}
        for x, y in run.evaluate(test):
{body}
{after}
"""
MEASURE = "run.measure(loss=F.cross_entropy(model(x), y, reduction='none'))"


def play(tmp_path, before, body, setup="", after="", replay=True):
    places = {"before": (before, 8), "body": (body, 12), "after": (after, 8), "setup": (setup, 0)}
    parts = {name: textwrap.indent(textwrap.dedent(text), " " * spaces) for name, (text, spaces) in places.items()}
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(replay=replay, **parts))
    runpy.run_path(str(path), run_name="__main__")


CARRIED = {
    "a hidden state": ("h = 0.0", "h = 0.5 * h + model(x).mean()\nrun.measure(value=h.expand(len(x)))", "h"),
    "an average so far": (
        "right, seen = 0, 0",
        "right += int((model(x).argmax(1) == y).sum())\nseen += len(y)\nrun.measure(accuracy=right / seen)",
        "right",
    ),
    "a bank": (
        "bank = []",
        "bank.append(model(x))\nrun.measure(near=(torch.cat(bank)[:, :1].mean() - model(x)[:, 0]).abs())",
        "bank",
    ),
}


@pytest.mark.parametrize("name", CARRIED)
def test_what_goes_from_batch_to_batch_is_not_measured(tmp_path, name):
    before, body, named = CARRIED[name]
    with pytest.raises(UsageError, match=rf"run\.evaluate\(\.\.\.\), {named}, which run\.measure"):
        play(tmp_path, before, body)
    play(tmp_path, before, body, replay=False)


def test_nor_is_what_a_method_counts(tmp_path):
    setup = """
        class Meter:
            def __init__(self): self.total, self.n = 0.0, 0
            def add(self, value):
                self.total, self.n = self.total + value, self.n + 1
                return self.total / self.n
    """
    with pytest.raises(UsageError, match=r"meter\.total, which run\.measure|meter\.n, which run\.measure"):
        play(tmp_path, "meter = Meter()", "run.measure(mean=meter.add(float(model(x).mean())))", setup=setup)


HARMLESS = {
    "a sum for all ranks": ("right = 0", f"right += int(y.sum())\n{MEASURE}", "print(run.sum(right))"),
    "a list to gather": ("outputs = []", f"outputs.append(model(x))\n{MEASURE}", "run.gather(torch.cat(outputs))"),
    "a line": ("shown = 0", f"shown += 1\nif shown == 1:\n    print(x[0])\n{MEASURE}", ""),
    "a histogram": ("seen = collections.Counter()", f"seen.update(y.tolist())\n{MEASURE}", "print(len(seen))"),
    "a state that begins anew": (
        "h = None",
        "h = torch.zeros(len(x))\nfor part in x.T:\n    h = 0.5 * h + part\nrun.measure(value=h)",
        "",
    ),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_not_measured_may(tmp_path, name):
    before, body, after = HARMLESS[name]
    play(tmp_path, before, body, after=after)
