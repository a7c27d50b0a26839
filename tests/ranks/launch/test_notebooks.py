"""`lockstep.launch` in a real kernel: its view in the cell, its interruption, its end with the kernel's, and CUDA."""

import os
import re
import signal
import textwrap

import pytest

pytest.importorskip("jupyter_client", reason="notebooks are not installed (jupyter-client, ipykernel)")
pytest.importorskip("ipykernel", reason="notebooks need ipykernel, which is not installed")

from notebook_kernel import kernel_in
from waiting import wait_until

DEFINES = """
import os, sys, time
from pathlib import Path
import torch
from torch import nn
from torch.nn import functional as F
import lockstep

def main(epochs, pause_s=0.02, checkpoint=True):
    with lockstep.Run(seed=0) as run:
        net = nn.Linear(2, 2)
        model = run.model(net)
        run.optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        xy = torch.randn(64, 2, generator=torch.Generator().manual_seed(1))
        batches = run.loader((xy, (xy[:, 0] > 0).long()), global_batch=16, micro_batch=4, workers=0)
        for epoch in run.epochs(epochs):
            for x, y in run.train(batches):
                time.sleep(pause_s)
                run.step(F.cross_entropy, x, y)
            run.log()
        return run.metrics["loss"]
"""


@pytest.fixture
def kernel(workshop):
    """A kernel whose processes the workshop sees; none of them may outlive it."""
    with kernel_in(workshop.here, workshop.environment()) as kernel:
        cell = kernel.run(textwrap.dedent(DEFINES))
        assert not cell.error
        yield kernel
    wait_until(lambda: not workshop.processes(), workshop.said_of_processes)


def ranks_of(workshop):
    return [name for name in workshop.processes().values() if name.startswith("rank ")]


def pictures_of(cell):
    """What the run's output in the cell has shown, one after another; there is one output only."""
    shown = [*cell.of("display_data"), *cell.of("update_display_data")]
    assert len(cell.of("display_data")) <= 1
    assert len({content["transient"]["display_id"] for content in shown}) <= 1
    return [content["data"]["text/plain"] for content in shown]


def test_a_cell_has_one_output_that_follows_the_run_and_says_how_it_ended(kernel):
    cell = kernel.run("losses = lockstep.launch(main, ranks=2, args=(8,), run_dir='r'); print(len(set(losses)))")
    assert not cell.error
    pictures = pictures_of(cell)
    steps = [int(re.search(r"step (\d+)/32", picture)[1]) for picture in pictures]
    assert steps == sorted(steps)
    assert len(set(pictures)) == len(pictures) >= 2, "what is shown already is not sent again"
    assert pictures[-1].startswith("done")
    assert all(content["data"]["text/html"].startswith("<pre") for content in cell.of("display_data"))
    assert "samples/s |" not in cell.text() + cell.text("stderr"), "the progress is not printed as well"
    assert "step 32: epoch 8, loss" in cell.text()
    assert cell.text().endswith("1\n")
    after = kernel.run("print('next')")
    assert [kind for kind, _ in after.messages if "display" in kind] == []


@pytest.mark.campaign
@pytest.mark.parametrize("view", ["lines", "silent"])
def test_another_view_is_taken_where_it_is_asked_for(kernel, view):
    cell = kernel.run(f"os.environ['LOCKSTEP_VIEW'] = {view!r}; lockstep.launch(main, ranks=1, args=(2,))")
    assert not cell.error
    assert pictures_of(cell) == []
    assert ("samples/s |" in cell.text()) == (view == "lines")
    assert cell.text("stderr") == "", "nothing looks like an error"


def test_a_rank_that_fails_is_named_and_its_traceback_stands_below_the_cell(kernel, workshop):
    cell = kernel.run("def fails():\n    raise ValueError('bad label 255')\nlockstep.launch(fails, ranks=2)")
    assert cell.error.startswith("LaunchError: ")
    assert "raised ValueError" in cell.error
    assert "bad label 255" in cell.text("stderr") + cell.text()
    wait_until(lambda: not ranks_of(workshop), workshop.said_of_processes)


def interrupting(kernel, times):
    """Interrupts the kernel once the run has shown a step, and again when it says that it stops."""
    left = [times]

    def meanwhile(cell):
        if pictures_of(cell) and left[0] and (left[0] == times or "Ctrl-C now" in cell.text()):
            left[0] -= 1
            kernel.manager.interrupt_kernel()

    return meanwhile


def test_an_interrupted_kernel_saves_leaves_no_rank_behind_and_goes_on(kernel, workshop):
    cell = kernel.run("lockstep.launch(main, ranks=2, args=(10_000,), run_dir='r')", interrupting(kernel, 1))
    assert cell.error.startswith("KeyboardInterrupt")
    assert pictures_of(cell)[-1].startswith("stopped")
    assert "to go on: lockstep.launch(main, ranks=2, resume=True, run_dir='r')" in cell.text()
    assert ranks_of(workshop) == []
    step = int(re.search(r"at step (\d+), which is saved", cell.text())[1])
    more = kernel.run(f"lockstep.launch(main, ranks=3, args=({step // 4 + 2}, 0), run_dir='r', resume=True)")
    assert not more.error
    assert f"resumed at step {step}" in more.text()


@pytest.mark.campaign
def test_a_kernel_interrupted_where_ranks_do_not_listen_ends_them_too(kernel, workshop):
    sleeps = "def sleeps():\n    Path(f'up-{os.environ[\"RANK\"]}').touch()\n    time.sleep(1000)\n"
    interrupted = []

    def meanwhile(cell):
        if cell.text() and not interrupted:
            interrupted.append(True)
            for rank in range(2):
                workshop.wait_for_file(f"up-{rank}")
            kernel.manager.interrupt_kernel()

    cell = kernel.run(f"{sleeps}lockstep.launch(sleeps, ranks=2, grace_s=1)", meanwhile)
    assert cell.error.startswith("KeyboardInterrupt")
    assert ranks_of(workshop) == []
    assert kernel.run("print('alive')").text() == "alive\n"


@pytest.mark.campaign
def test_an_interrupted_search_leaves_no_worker_behind_and_goes_on(kernel, workshop):
    searches = textwrap.dedent("""
        def objective(params):
            time.sleep({pause_s})
            return params["x"] ** 2

        found = lockstep.tune(
            objective, {{"x": (-1.0, 1.0)}}, trials=12, workers=2, algorithm="random", run_dir="s", resume={resume}
        )
        print(len(found.trials))
    """)
    interrupted = []

    def meanwhile(cell):
        if pictures_of(cell) and not interrupted:
            interrupted.append(True)
            wait_until(lambda: list((workshop.here / "s").glob("journal/*")), workshop.said_of_processes)
            kernel.manager.interrupt_kernel()

    cell = kernel.run(searches.format(pause_s=5, resume=False), meanwhile)
    assert cell.error.startswith("KeyboardInterrupt")
    assert "to go on: tune(..., resume=True)" in cell.text("stderr")
    wait_until(lambda: not ranks_of(workshop), workshop.said_of_processes)
    more = kernel.run(searches.format(pause_s=0, resume=True))
    assert not more.error, more
    assert more.text().splitlines()[-1] == "12"


@pytest.mark.parametrize("how", [pytest.param("restarted", marks=pytest.mark.campaign), "killed"])
def test_ranks_end_with_their_kernel(kernel, workshop, how):
    ended = []

    def meanwhile(cell):
        if pictures_of(cell) and not ended:
            ended.append(True)
            assert len(ranks_of(workshop)) == 2
            if how == "killed":
                os.kill(kernel.manager.provisioner.pid, signal.SIGKILL)
            else:
                kernel.manager.restart_kernel(now=True)
            wait_until(lambda: not ranks_of(workshop), workshop.said_of_processes)
            raise KernelEnded

    with pytest.raises(KernelEnded):
        kernel.run("lockstep.launch(main, ranks=2, args=(10_000,), run_dir='r')", meanwhile)


class KernelEnded(Exception):
    pass


def test_a_kernel_that_has_used_cuda_is_refused_before_anything_is_written(kernel, workshop):
    cell = kernel.run("""
        module = sys.modules["lockstep.launch.workers.fork_server_client"] if lockstep.launch else None
        asked, module.has_started_cuda = module.has_started_cuda, lambda: True
        lockstep.launch(main, ranks=2, args=(1,), run_dir="r")
    """)
    assert cell.error.startswith("LaunchError: CUDA is in use in this process")
    assert "restart the kernel" in cell.error
    assert not (workshop.here / "r").exists()
    cell = kernel.run(
        "module.has_started_cuda = asked; print(len(lockstep.launch(main, ranks=2, args=(1,), run_dir='r')))"
    )
    assert (cell.error, cell.text().splitlines()[-1]) == ("", "2")


@pytest.mark.campaign
def test_the_metrics_of_a_saved_run_are_a_table_and_without_pandas_there_is_a_clear_error(kernel):
    pytest.importorskip("pandas", reason="the table is one of pandas, which is not installed")
    assert not kernel.run("lockstep.launch(main, ranks=2, args=(3, 0), run_dir='r')").error
    cell = kernel.run("lockstep.metrics('r')")
    (result,) = cell.of("execute_result")
    assert "<table" in result["data"]["text/html"]
    assert result["data"]["text/plain"].split()[:4] == ["step", "epoch", "wall_s", "loss"]
    cell = kernel.run("sys.modules['pandas'] = None; lockstep.metrics('r')")
    assert cell.error.startswith("SettingError: metrics are a table of pandas: pip install 'torch-lockstep[notebook]'")
