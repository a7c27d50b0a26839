"""A job that is started again finds its runs again, and asks for it only where that is meant."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.launch.run_dir.run_directory import about_job, directory_of_job
from lockstep.launch.schedulers import SCHEDULERS
from lockstep.launch.schedulers.scheduler import NO_SCHEDULER, Allocation, Node

SLURM, SGE, PBS, _ = SCHEDULERS


class FileSystem:
    """Run directories, without files."""

    def __init__(self):
        self.told = {}

    def start(self, given_, command, tmp_path):
        path, on = directory_of_job(given_, tmp_path, "train", command, self.told.get)
        path.mkdir(exist_ok=True)
        self.told.setdefault(path, {"starts": []})["starts"].append(about_job(given_, command))
        return path.name, on


def started(scheduler, restart, job="5"):
    """What the job is told, started once more after ``restart`` starts."""
    if scheduler is SLURM:
        env = {"SLURM_JOB_ID": job, **({"SLURM_RESTART_COUNT": str(restart)} if restart else {})}
        return SLURM.allocation(env, lambda path: "")
    # Grid Engine says whether it is started again, and not how often.
    env = {"JOB_ID": job, "HOSTNAME": "n1", "RESTARTED": str(min(restart, 1)), "SGE_JOB_SPOOL_DIR": "/spool/5.1"}
    trace = f"11/23/2026 05:15:5{restart} [0:{722 + restart}]: shepherd called with uid = 0, euid = 0\nand more\n"
    return SGE.allocation(env, {"/spool/5.1/trace": trace, "": ""}.__getitem__)


@given(
    st.sampled_from([SLURM, SGE]),
    st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=5),
    st.lists(st.integers(0, 5), max_size=3),
)
def test_each_run_of_a_job_goes_on_in_its_own_directory(tmp_path_factory, scheduler, commands, cuts):
    tmp_path = tmp_path_factory.mktemp("runs")
    disk = FileSystem()
    first = []
    for restart, reached in enumerate([*cuts, len(commands)]):
        # The job got to its ``reached``-th run, and began each time at the first.
        for place, command in enumerate(commands[:reached]):
            name, on = disk.start(started(scheduler, restart), command, tmp_path)
            if place < len(first):
                assert (name, on) == (first[place], True)
            else:
                assert not on
                assert name not in first
                first.append(name)


def test_another_job_starts_over(tmp_path):
    disk = FileSystem()
    assert disk.start(started(SLURM, 0), "a", tmp_path) == ("train-job5", False)
    assert disk.start(started(SLURM, 1, job="6"), "a", tmp_path) == ("train-job6", False)
    assert disk.start(started(SLURM, 1), "a", tmp_path) == ("train-job5", True)


def test_where_starts_cannot_be_told_apart_a_job_that_is_started_again_goes_on(tmp_path):
    disk = FileSystem()
    assert disk.start(Allocation(SGE, "5"), "a", tmp_path) == ("train-job5", False)
    for _ in range(2):
        assert disk.start(Allocation(SGE, "5", restarted=True), "a", tmp_path) == ("train-job5", True)


def slurm(**answers):
    asked = []

    def ask(words):
        asked.append(" ".join(words))
        return answers.get(words[0], (0, ""))

    return asked, ask


def test_a_slurm_job_is_put_in_the_queue_again():
    asked, ask = slurm(squeue=(0, "RUNNING None\n"))
    done = SLURM.requeue(Allocation(SLURM, "5"), 75, ask)
    assert (done.code, asked[-1]) == (75, "scontrol requeue 5")
    assert "in the queue again" in done.message


def test_a_cancelled_job_is_not():
    asked, ask = slurm(squeue=(0, "COMPLETING None\n"))
    assert "was cancelled" in SLURM.requeue(Allocation(SLURM, "5"), 75, ask).message
    assert not any("requeue" in words for words in asked)


def test_one_whose_time_is_up_is():
    asked, ask = slurm(squeue=(0, "COMPLETING TimeLimit\n"))
    SLURM.requeue(Allocation(SLURM, "5"), 75, ask)
    assert "scontrol requeue 5" in asked


@pytest.mark.parametrize(
    ("answer", "why"), [((127, "not found"), "container"), ((1, "Access denied\n"), "Access denied")]
)
def test_where_it_cannot_be_done_that_is_said(answer, why):
    _, ask = slurm(squeue=(127, ""), scontrol=answer)
    done = SLURM.requeue(Allocation(SLURM, "5"), 75, ask)
    assert done.code == 75
    assert why in done.message
    assert "from outside: scontrol requeue 5" in done.message


def test_grid_engine_is_told_by_the_exit_code():
    listed = "job-ID prior name user state\n---\n  4 0.5 d root dr 11/21/2026\n  5 0.5 train root {} 11/21/2026\n"
    assert SGE.requeue(Allocation(SGE, "5.2"), 75, lambda words: (0, listed.format("r"))).code == 99
    assert SGE.requeue(Allocation(SGE, "5.2"), 75, lambda words: (127, "")).code == 99
    deleted = SGE.requeue(Allocation(SGE, "5.2"), 75, lambda words: (0, listed.format("dr")))
    assert (deleted.code, "was deleted" in deleted.message) == (75, True)


def test_the_hosts_that_grid_engine_does_not_give_again_are_named():
    given_ = Allocation(SGE, "5", (Node("n1", 1), Node("n2", 1), Node("n3", 1)))
    done = SGE.requeue(given_, 75, lambda words: (0, ""))
    assert done.code == 99
    assert "on others than n2, n3, which it bars from this job" in done.message


@pytest.mark.parametrize("scheduler", [PBS, NO_SCHEDULER])
def test_outside_of_a_job_nothing_is_started_again(scheduler):
    done = scheduler.requeue(Allocation(scheduler, "5"), 75, pytest.fail)
    assert (done.code, "no Slurm or Grid Engine job" in done.message) == (75, True)
