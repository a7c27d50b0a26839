"""What an environment says about the job, and how launchers are started on its nodes."""

import shlex
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import SettingError
from lockstep.launch.schedulers import SCHEDULERS, allocation, job_ends_at
from lockstep.launch.schedulers.scheduler import Allocation, Node

SLURM, SGE, PBS, _ = SCHEDULERS
SLURM_ENV = {
    "SLURM_JOB_ID": "812",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_CPUS_PER_NODE": "8(x2)",
    "SLURM_GPUS_ON_NODE": "4",
    "SLURMD_NODENAME": "n1",
    # These stand in a batch script too, and mean nothing there.
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "2",
}
STEP_ENV = {**SLURM_ENV, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "1"}
SGE_ENV = {"JOB_ID": "7", "SGE_ROOT": "/sge", "QUEUE": "all.q", "PE_HOSTFILE": "hosts", "RESTARTED": "1"}


def nothing(path):
    return ""


def test_a_list_of_nodes_that_cannot_be_read_is_refused():
    with pytest.raises(SettingError, match=r"list of hosts cannot be read: 'n\[1'"):
        allocation({**SLURM_ENV, "SLURM_JOB_NODELIST": "n[1"}, nothing)


def test_a_batch_script_on_several_nodes_spreads():
    found = allocation(SLURM_ENV, nothing)
    assert found == Allocation(SLURM, "812", (Node("n1", 8), Node("n2", 8)), gpus_per_node=4, start="0")
    assert found.starts_launchers
    assert not found.has_launcher_per_node
    assert str(found) == "Slurm job 812 (2 nodes: n1, n2)"


def test_a_launcher_in_a_step_is_one_of_those_that_were_spread():
    found = allocation(STEP_ENV, nothing)
    assert found.has_launcher_per_node
    assert not found.starts_launchers
    assert found.node_rank == 1


@pytest.mark.parametrize("step", ["4294967291", "4294967290"])
def test_a_batch_script_and_an_interactive_shell_are_no_steps(step):
    assert allocation({**STEP_ENV, "SLURM_STEP_ID": step}, nothing).starts_launchers


def test_one_node_starts_its_ranks_itself():
    one = {**SLURM_ENV, "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_CPUS_PER_NODE": "8"}
    assert not allocation(one, nothing).starts_launchers
    # A shell that salloc started on a login node is not on the node that it was given.
    del one["SLURMD_NODENAME"]
    assert allocation(one, nothing).starts_launchers


@pytest.mark.parametrize(
    ("says", "gpus"), [({"SLURM_GPUS_PER_NODE": "a100:4"}, 4), ({"SLURM_GPUS_PER_NODE": "a:2,b:1"}, 3), ({}, None)]
)
def test_gpus_of_a_node(says, gpus):
    env = {name: value for name, value in SLURM_ENV.items() if name != "SLURM_GPUS_ON_NODE"}
    assert allocation({**env, **says}, nothing).gpus_per_node == gpus


def test_a_host_that_grid_engine_names_twice_is_one_node():
    files = {"hosts": "n1 4 all.q@n1 UNDEFINED\nn2 2 all.q@n2 UNDEFINED\nn1 2 long.q@n1 <NULL>\n"}
    found = allocation(SGE_ENV, files.__getitem__)
    assert found == Allocation(SGE, "7", (Node("n1", 6), Node("n2", 2)), restarted=True)
    assert found.starts_launchers


def test_a_task_of_an_array_is_a_job_of_its_own():
    assert allocation({**SGE_ENV, "SGE_TASK_ID": "3", "NSLOTS": "2"}, nothing).job == "7.3"


def test_pbs_names_a_node_once_for_each_slot():
    env = {"PBS_JOBID": "5.head", "PBS_NODEFILE": "nodes"}
    assert allocation(env, lambda path: "n1\nn1\nn2\nn2\n").nodes == (Node("n1", 2), Node("n2", 2))


def test_outside_of_a_job_there_is_none():
    assert allocation({"JOB_ID": "a variable of the user's own"}, nothing) == Allocation()


def test_the_end_of_a_job_is_asked_for_where_no_variable_tells_it():
    assert job_ends_at({**SLURM_ENV, "SLURM_JOB_END_TIME": "1700000000"}, pytest.fail) == 1700000000.0
    said = "2026-01-01T10:00:00 1:00\n"
    first = job_ends_at(SLURM_ENV, lambda words: said)
    assert first == job_ends_at(SLURM_ENV, lambda words: said.replace(":00 ", ":30 ")) - 30
    assert job_ends_at(SLURM_ENV, lambda words: "") is None
    assert job_ends_at(SLURM_ENV, lambda words: "NONE\n") is None
    assert job_ends_at(SLURM_ENV, lambda words: "2027-01-01T10:00:00 UNLIMITED\n") is None
    assert job_ends_at({}, pytest.fail) is None


#: As Grid Engine 8.1.9 prints it, which says nowhere else when a job began.
SGE_JOB = "hard resource_list:         h_rt=80,s_rt=60\nscheduling info:            There are no messages available\n"
SGE_LIST = """\
job-ID  prior   name       user         state submit/start at     queue                          slots ja-task-ID
-----------------------------------------------------------------------------------------------------------------
      6 0.50000 j.sh       root         r     11/23/2026 02:10:32 all.q@n1                           2
      7 0.50000 array      ada          r     11/23/2026 02:30:32 all.q@n2                           2 2
      7 0.50000 array      ada          t     11/23/2026 02:31:32 all.q@n2                           2 3
"""


def test_the_end_of_a_job_of_grid_engine_counts_from_its_start_or_that_of_its_task():
    def ask(words):
        return SGE_JOB if words[1] == "-j" else SGE_LIST

    of_job = job_ends_at({**SGE_ENV, "JOB_ID": "6", "SGE_TASK_ID": "undefined"}, ask)
    assert time.localtime(of_job)[:6] == (2026, 11, 23, 2, 11, 32)
    assert job_ends_at({**SGE_ENV, "SGE_TASK_ID": "3"}, ask) == of_job + 21 * 60
    assert job_ends_at({**SGE_ENV, "JOB_ID": "8"}, ask) is None
    assert job_ends_at(SGE_ENV, lambda words: "" if words[1] == "-j" else SGE_LIST) is None


RUN = ["python", "-m", "lockstep", "run", "--run-dir", "r", "train.py", "run", "a b"]


def test_slurm_starts_all_launchers_at_once():
    (start,) = SLURM.start_commands(allocation(SLURM_ENV, nothing), RUN, endpoint="n1:2", directory="/w")
    step, launcher = start.argv[: start.argv.index("python")], start.argv[start.argv.index("python") :]
    assert step[0] == "srun"
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=8", "--kill-on-bad-exit=0"} <= {*step}
    assert shlex.join(launcher) == (
        "python -m lockstep run --nnodes 2 --rdzv-endpoint n1:2 --rdzv-id 812 --run-dir r train.py run 'a b'"
    )


def test_grid_engine_starts_each_launcher_where_it_belongs():
    files = {"hosts": "n1 4 q U\nn2 4 q U\n"}
    here, there = SGE.start_commands(allocation(SGE_ENV, files.__getitem__), RUN, endpoint="n1:2", directory="/my work")
    assert str(here).startswith("python -m lockstep run --nnodes 2 --rdzv-endpoint n1:2 --rdzv-id 7 --run-dir r")
    assert there.argv[:5] == ("qrsh", "-inherit", "-nostdin", "-V", "n2")
    # qrsh joins its words and gives them to a shell, which gives the last one to another.
    inner = shlex.split(" ".join(there.argv[5:]))
    assert inner[:3] == ["exec", "/bin/sh", "-c"]
    assert shlex.split(inner[3])[:4] == ["cd", "/my work", "&&", "exec"]
    assert shlex.split(inner[3])[-1] == "a b"


def test_launchers_that_nobody_can_spread_are_lines_to_paste():
    nodes = (Node("n1", 1), Node("n2", 1))
    lines = PBS.start_commands(Allocation(PBS, "5", nodes), RUN, endpoint="n1:2", directory="/w")
    assert [(line.host, line.by_user) for line in lines] == [("n1", False), ("n2", True)]
    assert all(str(line).startswith("python -m lockstep run --nnodes 2") for line in lines)


@given(st.text("0123456789.[]_-abc", min_size=1))
def test_the_port_of_a_job_is_one_that_anybody_may_open(job):
    assert 16384 <= Allocation(SLURM, job).port() < 32768


def test_a_node_whose_name_is_no_hosts_is_reached_as_slurm_does():
    said = "NodeName=n1 Arch=x86_64 NodeAddr=10.0.0.7 NodeHostName=vm Version=22.05"
    assert SLURM.node_address("n1", lambda host: True, pytest.fail) == "n1"
    assert SLURM.node_address("n1", lambda host: False, lambda words: said) == "10.0.0.7"
    assert SLURM.node_address("n1", lambda host: False, lambda words: "") == "n1"
