"""A real Slurm: where it starts us, what it sends us, and what comes of it."""

import re
import shutil
import sys

import pytest

from slurm import NODES, idle, job_state

HERE = "PYTHON -m lockstep run --nproc-per-node 2 --save-every '2 steps' train.py"
EVERYWHERE = "PYTHON -m lockstep run --nproc-per-node 1 --save-every '2 steps' train.py"
SLOW = {"PAUSE": "0.2", "EPOCHS": "12"}

# Jobs of a minute, and a scheduler that lets them wait. Each wait has its own deadline, and says what it waited for.
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture
def submit(slurm, bench):
    """Submit a batch script; its job's number."""

    def give(*words, **env):
        done = slurm("sbatch", "--parsable", f"--chdir={bench.here}", "--output=%j.out", "--open-mode=append", *words,
                     **bench.env, **env)  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return give


@pytest.fixture
def ended(slurm, bench):
    """Wait for the end of a job; what Slurm says of it."""

    def wait(job):
        def told():
            state = job_state(slurm, job)
            return state.get("JobState") in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT") and state

        return bench.until(told, f"the end of job {job}")

    return wait


@pytest.mark.parametrize(
    ("options", "line", "ranks"),
    [
        ((), f"exec {HERE}", 2),
        (("--ntasks=4",), f"exec {HERE}", 2),  # what srun would start is none of the launcher's business
        ((), f"srun --ntasks=1 {HERE}", 2),
        (("--ntasks=2",), "srun PYTHON train.py", 2),
        (("--nodes=2",), "srun PYTHON train.py", 2),
        (("--nodes=2",), f"exec {EVERYWHERE}", 2),
        (("--nodes=2",), f"srun --ntasks-per-node=1 {EVERYWHERE}", 2),
        (("--nodes=2", "--cpus-per-task=2"), f"exec {HERE}", 4),
    ],
    ids=["batch", "tasks", "step", "srun", "srun on nodes", "nodes", "nodes in a step", "nodes x ranks"],
)
def test_wherever_it_is_started_it_learns_the_same(submit, ended, bench, expected, options, line, ranks):
    job = submit(*options, bench.batch(line))
    told = ended(job)
    assert (told["JobState"], told["ExitCode"]) == ("COMPLETED", "0:0"), bench.out()
    assert bench.result() == (expected(), ranks)
    if "lockstep" in line:
        assert [path.name for path in (bench.here / "runs").iterdir()] == [f"train-job{job}"]


def test_in_the_shell_of_salloc_ranks_start_on_the_nodes_that_were_allotted(slurm, bench, expected):
    """A user types the command in that shell, which is on the login node."""
    line = EVERYWHERE.replace("PYTHON", sys.executable)
    done = slurm("salloc", "--nodes=2", "sh", "-c", f"cd {bench.here} && {line}", **bench.env)
    assert done.returncode == 0, done.stderr
    assert "(2 nodes: n1, n2): starting a launcher on each node" in done.stderr
    assert bench.result() == (expected(), 2)
    # Its secret is in the environment of these launchers.
    assert not list((bench.here / "runs").glob("*/.secret"))


@pytest.mark.parametrize("options", [("--ntasks=2",), ("--nodes=2",)], ids=["one node", "two nodes"])
def test_mpirun_of_a_whole_job(submit, ended, bench, expected, options):
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun here")
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    # Open MPI takes the bridges of containers, which have one address on all hosts, for a way to the other node.
    allowed |= {"OMPI_MCA_oob_tcp_if_include": "eth0"}
    told = ended(submit(*options, bench.batch("mpirun PYTHON train.py"), **allowed))
    assert told["JobState"] == "COMPLETED", bench.out()
    assert bench.result() == (expected(), 2)


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_script_that_we_write_runs_as_it_is(slurm, submit, ended, bench, expected, nodes):
    words = f"job slurm --nodes {nodes} --cpus 2 --time 10m --mem 100M -o train.sh --nproc-per-node 2 train.py".split()
    written = bench.command("python", "-m", "lockstep", *words)
    assert written.returncode == 0, written.stderr
    told = ended(submit("train.sh"))
    assert told["JobState"] == "COMPLETED", bench.out()
    assert (told["NumNodes"], told["TimeLimit"], told["Requeue"]) == (str(nodes), "00:10:00", "1")
    assert bench.result() == (expected(), 2 * nodes)


def test_what_cannot_be_run_is_told_once_and_before_anything_is_spread(submit, ended, bench):
    told = ended(submit("--nodes=2", bench.batch("exec PYTHON -m lockstep run trian.py")))
    assert told["ExitCode"] == "2:0"
    assert bench.out() == "lockstep run: no such file: trian.py; did you mean train.py?\n"


@pytest.mark.parametrize(("options", "line"), [((), HERE), (("--nodes=2",), EVERYWHERE)], ids=["one node", "two nodes"])
def test_a_cancelled_job_saves_first_and_stays_cancelled(slurm, submit, ended, bench, expected, options, line):
    job = submit(*options, bench.batch(f"exec {line.replace('lockstep run', 'lockstep run --requeue')}"), **SLOW)
    bench.under_way()
    slurm("scancel", job)
    assert ended(job)["JobState"] == "CANCELLED"
    # On several nodes the launcher that has started the others asks them with SIGUSR1, which may come before.
    assert re.search(r"by SIG(TERM|USR1)( on n\d)? at step", bench.out()), bench.out()
    assert job_state(slurm, job)["Restarts"] == "0"
    bench.until(lambda: idle(slurm) == len(NODES), "all nodes to be idle")
    # Another job, on another number of ranks, goes on where it stopped.
    again = f"PYTHON -m lockstep run --nproc-per-node 3 --resume --run-dir runs/train-job{job} train.py"
    assert ended(submit(bench.batch(f"exec {again}"), EPOCHS="12", PAUSE="0"))["JobState"] == "COMPLETED", bench.out()
    assert "resumed at step" in bench.out()
    assert bench.result() == (expected(12), 3)


@pytest.mark.parametrize(
    ("options", "line", "ranks"),
    [
        (("--signal=B:USR1@70",), f"exec {HERE}", 2),
        (("--signal=USR1@70",), f"srun {HERE}", 2),
        (("--signal=B:USR1@70", "--nodes=2"), f"exec {EVERYWHERE}", 2),
    ],
    ids=["batch", "step", "nodes"],
)
def test_a_warned_job_saves_starts_again_and_ends_in_the_same_bits(
    slurm, submit, ended, bench, expected, options, line, ranks
):
    # More work than there is until the warning; what goes on afterwards is quick.
    line = line.replace("lockstep run", "lockstep run --requeue")
    job = submit("--requeue", "--time=30", *options, bench.batch(line), PAUSE="2", EPOCHS="12")
    bench.under_way()
    # A minute or two are left, and the warning comes within fifty seconds, while there is something to save.
    hours, minutes, _ = map(int, job_state(slurm, job)["RunTime"].split(":"))
    slurm.must("scontrol", "update", f"JobId={job}", f"TimeLimit={60 * hours + minutes + 2}")
    bench.until(lambda: "in the queue again" in bench.out(), "the job to be put in the queue again")
    assert not (bench.here / "hash").exists(), "it ended before it was warned"
    slurm.must("scontrol", "update", f"JobId={job}", "TimeLimit=30")
    told = ended(job)
    assert told["JobState"] == "COMPLETED", bench.out()
    assert int(told["Restarts"]) >= 1
    assert f"Slurm job {job} " in bench.out()
    assert "so its run goes on" in bench.out()
    assert bench.result() == (expected(12), ranks)
    assert [path.name for path in (bench.here / "runs").iterdir()] == [f"train-job{job}"]
