"""What a script's own variables hold is compared with what they held when the same step began."""

import copy
import sys
from types import SimpleNamespace

import torch
from torch import nn

from lockstep.run.proofs.script_state import lost, script_state
from lockstep.run.source.line_calls import LineCalls
from lockstep.run.state.user_values import as_stateful


def net():
    return nn.Sequential(nn.Linear(3, 6), nn.Linear(6, 2))


class Trainer:
    def __init__(self, model):
        self.model, self.best, self.best_state, self.averages = model, 0.5, None, []


def script(change):
    """What is seen of a script's variables before and after a ``change`` of them, which some are free of."""
    model, kept = net(), net()
    trainer, average, inputs = Trainer(model), copy.deepcopy(model), torch.zeros(4, 3)
    state = SimpleNamespace(
        models=[model],
        optimizers=[],
        schedulers=[],
        sample_sources=[],
        kept={"kept": as_stateful("kept", kept)},
        transient_buffers=list,
    )
    before = script_state(sys._getframe(), state, LineCalls())
    change(SimpleNamespace(**locals()))
    after = script_state(sys._getframe(), state, LineCalls())
    return before, after


def moved(module):
    with torch.no_grad():
        module[0].weight.add_(1)


def test_weights_beside_the_run_are_seen_wherever_a_script_has_them():
    assert lost(*script(lambda it: moved(it.average)), {}).weights == ["average"]
    before, after = script(lambda it: setattr(it.trainer, "best_state", copy.deepcopy(it.model.state_dict())))
    assert lost(before, after, {}).weights == [], "there were none before, as where a resume is past the first epoch"
    assert lost(after, before, {}).weights == ["trainer"], "they were not made again"
    before, after = script(lambda it: it.trainer.averages.append(copy.deepcopy(it.model)))
    assert lost(after, before, {}).weights == ["trainer"]


def test_weights_of_the_run_and_kept_ones_are_not():
    assert not any(lost(*script(lambda it: moved(it.model)), {}))
    assert not any(lost(*script(lambda it: moved(it.kept)), {}))
    assert not any(lost(*script(lambda it: setattr(it.trainer, "views", it.model.state_dict())), {}))


def test_numbers_texts_lengths_and_tensors_are_said_with_both_values():
    before, after = script(lambda it: setattr(it.trainer, "best", 0.75))
    assert lost(before, after, {}).plain == ["trainer.best (0.5, now 0.75)"]
    before, after = script(lambda it: it.trainer.averages.append(1.5))
    assert "trainer.averages (1, now 0)" in lost(after, before, {}).plain
    found = lost(*script(lambda it: it.inputs.add_(1)), {})
    assert (found.weights, found.inputs) == ([], [])
    assert found.plain[0].startswith("inputs (a tensor of checksum ")


def test_a_variable_that_is_not_there_yet_was_not_lost():
    before, after = script(lambda it: moved(it.average))
    after["variables"].remove("average")
    assert lost(before, after, {}).weights == []
    assert not any(lost({}, after, {})), "an earlier version has noted nothing"
