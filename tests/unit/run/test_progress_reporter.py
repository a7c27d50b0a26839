"""What the screen shows of a run is true: its loss is that of the leader's last micro-batch, at the end that of all."""

from typing import ClassVar

import pytest
import torch
from torch import nn

from lockstep.launch_contract import STATUS
from lockstep.progress import Progress
from lockstep.report import StatusFile
from lockstep.run import Run
from lockstep.run.metrics.progress_reporter import ProgressReporter, RunLength
from lockstep.run.stopping.stop_requests import JobDeadline
from lockstep.world import World


class ReadLater:
    """A value on its way from a GPU, which is the number of those before it; reading it is noted."""

    begun: ClassVar = []

    def __init__(self, values):
        assert values.shape == (1,)
        self.value, self.was_read = len(self.begun), False
        self.begun.append(self)

    def read(self):
        self.was_read = True
        return [float(self.value)]


@pytest.fixture
def shown(tmp_path):
    path = tmp_path / "status"
    reporter = ProgressReporter(World.from_env({}), {STATUS: str(path)}, JobDeadline(None), read_later=ReadLater)

    def show(state, loss):
        reporter.show(state, Progress(step=1), RunLength(), loss, lambda: None)
        return StatusFile.read(path).loss

    yield show
    reporter.close()


def test_on_a_cpu_it_is_the_loss_of_now(shown):
    assert shown("training", None) is None
    for value in (0.5, 0.25):
        assert shown("training", value) == value
    assert shown("evaluating", 0.125) == 0.125


@pytest.mark.parametrize("end", ["done", "unsaved", "stopped"])
def test_a_gpu_is_not_waited_for_until_the_end(shown, end):
    ReadLater.begun = []
    loss = torch.empty((), device="meta")  # on no CPU
    assert [shown("training", loss) for _ in range(3)] == [None, 0.0, 1.0]
    assert [each.was_read for each in ReadLater.begun] == [True, True, False]
    assert shown(end, loss) == 3.0


def test_the_final_line_tells_the_loss_of_the_last_pass_which_is_that_of_all_ranks(monkeypatch, capfd):
    monkeypatch.setenv("TERM", "dumb")
    with Run() as run:
        model = run.model(nn.Linear(1, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        for epoch in run.epochs(2):
            for x in run.train(run.loader(torch.ones(8, 1), global_batch=4, micro_batch=2)):
                loss = (model(x) * 0).sum() + 0.5 * epoch + 0.125 * run.progress.epoch_step
                run.step(loss)
        run.log(third=torch.tensor(1 / 3), lr=0.1)
    *_, logged, last = capfd.readouterr().err.splitlines()
    assert last.startswith("done | step 4/4 | epoch 2/2")
    assert last.endswith(" | loss 0.5625")
    assert "third 0.3333, lr 0.1" in logged  # a tensor is rounded as a float is


def test_the_steps_of_a_run_are_those_done_and_epochs_like_the_current_one():
    one_loader = RunLength(epochs=3, steps_per_epoch=4)
    assert [one_loader.steps_total(Progress(step, step // 4, step % 4)) for step in range(13)] == [12] * 13
    another = RunLength(epochs=3, steps_per_epoch=4)  # after two epochs of 5
    assert [another.steps_total(Progress(step, 2, step - 10)) for step in (10, 12, 14)] == [14] * 3
    assert another.steps_total(Progress(14, 3, 0)) == 14
