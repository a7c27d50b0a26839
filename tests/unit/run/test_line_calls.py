"""The functions of a script that its lines were seen to run, and what is kept of their arguments."""

import gc
import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from lockstep.run.source.line_calls import LineCalls
from lockstep.run.source.source_reads import Lines


@dataclass
class Output:
    logits: torch.Tensor


@dataclass(frozen=True, slots=True)
class SlottedOutput:
    logits: torch.Tensor


def criterion(outputs, scale):
    return sum(outputs) if isinstance(outputs, list) else outputs


def first_of(batch):
    return batch


@pytest.mark.parametrize(
    "holder", [lambda y: {"out": y}, lambda y: [y, y], lambda y: {"of": {"out": y}}, Output, SlottedOutput]
)
def test_results_of_bodies_are_let_go(holder):
    calls, model, results = LineCalls(), nn.Linear(2, 2), []
    for _ in range(4):
        y = model(torch.ones(1, 2))
        results.append(weakref.ref(y))
        outputs = holder(y)
        calls.watch()
        criterion(outputs, 2.0)
        calls.unwatch()
        del y, outputs
    gc.collect()
    seen = calls.ran_by(__file__, Lines(1, 1000))
    assert {ran.function for ran in seen} == {criterion}
    assert [result() for result in results] == [None] * 4


def test_of_the_dicts_that_bodies_make_one_is_kept():
    calls, made = LineCalls(), []
    for number in range(4):
        batch = {"x": torch.full((1,), float(number))}
        made.append(weakref.ref(batch["x"]))
        calls.watch()
        first_of(batch)
        calls.unwatch()
        del batch
    gc.collect()
    assert sum(one() is not None for one in made) == 1
