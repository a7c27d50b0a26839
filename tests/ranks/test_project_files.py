"""`lockstep.toml` and `[tool.lockstep]`: which file holds, what stands over what, and what is wrong, by its line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep import cli
from lockstep.errors import SettingError
from lockstep.launch import JOB_SCRIPT_SCHEDULERS
from lockstep.launch_contract import PROJECT
from lockstep.project_files import TABLES, project_files, resolve_settings, table
from lockstep.settings import OPTIONS_VARIABLE

ALL = """
[run]
seed = 7
save_every = "5 min"
sync_batchnorm = true
clip_norm = 0.5

[launch]
nproc-per-node = 2
max_restarts = 3
bind = false
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory two levels below the project's, and no file of the user's."""
    place = tmp_path / "project" / "scripts"
    place.mkdir(parents=True)
    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv(PROJECT, raising=False)
    return place


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def shown(capsys, *words):
    code = cli.main(["config", "show", *words])
    told = capsys.readouterr()
    return code, told.out, told.err


def test_there_is_a_table_for_each_scheduler_that_writes_job_scripts():
    assert set(JOB_SCRIPT_SCHEDULERS) < set(TABLES)


def test_each_setting_is_shown_with_its_line(here, capsys):
    project = written(here.parent / "lockstep.toml", ALL)
    code, out, _ = shown(capsys)
    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[:2] == [f"project: {project}", "user: no file"]
    for line in (
        *(
            "seed = 7 lockstep.toml:3",
            "save_every = 300 seconds lockstep.toml:4",
            "sync_batchnorm = True lockstep.toml:5",
        ),
        *("clip_norm = 0.5 lockstep.toml:6", "strategy = ddp default"),
        *("--nproc-per-node 2 lockstep.toml:9", "--max-restarts 3 lockstep.toml:10"),
    ):
        assert line in lines
    assert "bind" not in out
    told = json.loads(shown(capsys, "--json")[1])
    assert told["settings"]["seed"] == {"value": 7, "source": "lockstep.toml:3"}
    assert told["files"] == {"project": str(project)}


def test_what_stands_over_what(here, tmp_path, monkeypatch):
    users = written(tmp_path / "config" / "lockstep" / "lockstep.toml", "[run]\nseed = 1\nkeep = 1\ncheck_every = 1\n")
    written(here.parent / "lockstep.toml", "[run]\nseed = 2\nkeep = 2\nworkers = 2\nthreads = 2\n")
    env = {**os.environ, "LOCKSTEP_THREADS": "4", OPTIONS_VARIABLE: json.dumps({"bucket_mb": "5"})}
    resolved = resolve_settings({"workers": 3, "threads": 3, "bucket_mb": 3.0}, env)
    found = {name: (getattr(resolved.values, name), resolved.sources[name]) for name in ("seed", "keep", "check_every")}
    assert found == {
        "seed": (2, "lockstep.toml:2"), "keep": (2, "lockstep.toml:3"), "check_every": (1, f"{users}:4"),
    }  # fmt: skip
    assert (resolved.values.workers, resolved.sources["workers"]) == (3, "script")
    assert (resolved.values.threads, resolved.sources["threads"]) == (4, "environment")
    assert (resolved.values.bucket_mb, resolved.sources["bucket_mb"]) == (5.0, "command line")


def test_the_nearest_file_holds_and_pyproject_counts_if_it_has_the_table(here):
    written(here.parents[1] / "lockstep.toml", "[run]\nseed = 1\n")
    written(here.parent / "pyproject.toml", '[project]\nname = "x"\n\n[tool.lockstep.run]\nseed = 2\n')
    written(here / "pyproject.toml", '[project]\nname = "x"\n')
    resolved = resolve_settings({}, os.environ)
    assert (resolved.values.seed, resolved.sources["seed"]) == (2, "pyproject.toml:5")
    written(here.parent / "lockstep.toml", "[run]\nseed = 3\n")
    assert resolve_settings({}, os.environ).values.seed == 3
    assert resolve_settings({}, os.environ | {PROJECT: ""}).sources["seed"] == "default"
    assert resolve_settings({}, os.environ | {PROJECT: str(here.parents[1] / "lockstep.toml")}).values.seed == 1


@pytest.mark.skipif(os.getuid() != 0, reason="files of another user need root")
def test_a_file_above_that_another_user_put_there_is_left_alone(here):
    path = written(here.parent / "lockstep.toml", "[run]\nseed = 1\n")
    os.chown(path, 12345, 12345)
    assert project_files(os.environ) == []
    written(here / "lockstep.toml", "[run]\nseed = 2\n")
    os.chown(here / "lockstep.toml", 12345, 12345)
    assert resolve_settings({}, os.environ).values.seed == 2, "in the working directory itself it is the user's choice"


WRONG = """
[run]
strategi = "ddp"
seed = -1
keep = [1]
[lunch]
x = 1
[launch]
nproc = 1
bind = 3
strategy = "ddp"
grace = true
"""


def test_all_that_is_wrong_is_told_at_once_with_its_line(here, capsys):
    written(here / "lockstep.toml", WRONG)
    code, _, err = shown(capsys)
    assert code == 2
    assert [line.strip() for line in err.removeprefix("lockstep config show: ").splitlines()] == [
        "lockstep.toml:6: no table [lunch] is known; did you mean launch?",
        "lockstep.toml:3: strategi: no such setting; did you mean strategy?",
        "lockstep.toml:4: seed=-1: it must be at least 0",
        "lockstep.toml:5: keep = [1]: give a text, a number, true or false",
        "lockstep.toml:9: [launch] nproc: lockstep run has no such option; did you mean --nproc-per-node?",
        "lockstep.toml:10: [launch] bind = 3: give true or false",
        "lockstep.toml:11: [launch] strategy: a setting of the run; write it under [run]",
        "lockstep.toml:12: [launch] grace = True: give a text or a number",
    ]
    with pytest.raises(SettingError, match="no table"):
        table("prices", project_files(os.environ))
    written(here / "lockstep.toml", "[run\n")
    assert "lockstep.toml: " in shown(capsys)[2]


SCRIPT = """
import os
import lockstep

os.chdir("/")
with lockstep.Run() as run:
    if run.leads:
        print("ranks", run.world_size, "seed", run.settings.values.seed, run.settings.sources["seed"])
"""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "ranks 2 seed 7 lockstep.toml:3"),
        (("--nproc-per-node", "1", "--set", "seed=9"), "ranks 1 seed 9 command line"),
    ],
)
def test_a_run_starts_with_them_wherever_its_script_goes(here, words, says):
    written(here.parent / "lockstep.toml", ALL)
    written(here / "train.py", SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "run", *words, "train.py"], capture_output=True, text=True, check=False
    )
    assert says in done.stdout + done.stderr, done


def test_options_of_a_single_start_are_for_the_command_line(here, capsys):
    for name in ("fresh", "resume", "fault", "no_python"):
        written(here / "lockstep.toml", f"[launch]\n{name} = true\n")
        assert f"lockstep.toml:2: [launch] {name.replace('_', '-')}: of one start" in shown(capsys)[2]
    written(here / "lockstep.toml", '[launch]\nmax-restarts = "x"\non-hang = "explode"\n')
    told = shown(capsys)[2]
    assert "lockstep.toml:2: argument --max-restarts: invalid int value: 'x'" in told
    assert "lockstep.toml:3: argument --on-hang: invalid choice: 'explode'" in told
    assert cli.main(["job", "slurm", "--time", "1h", "--gpus", "2", "train.py"]) == 2, "the job would read them, too"


def test_a_mention_is_no_table_and_what_is_none_is_refused(here, capsys):
    written(here.parent / "lockstep.toml", "[run]\nseed = 5\n")
    written(here / "pyproject.toml", "# see tool.lockstep in the docs\n[project]\nname = 'x'\n")
    assert resolve_settings({}, os.environ).values.seed == 5
    written(here / "pyproject.toml", "[tool]\nlockstep = {run = {seed = 6}}\n")
    assert resolve_settings({}, os.environ).values.seed == 6
    written(here / "pyproject.toml", "[tool]\nlockstep = 3\n")
    assert "tool.lockstep = 3; write tables" in shown(capsys)[2]


RESTARTED = """
import os, pathlib
import lockstep

with lockstep.Run() as run:
    generation = os.environ["LOCKSTEP_GENERATION"]
    print("generation", generation, "keep", run.settings.values.keep, flush=True)
    if generation == "0":
        pathlib.Path("lockstep.toml").write_text("[run]\\nkeep = 9\\n")
        os._exit(3)
"""


def test_a_file_that_changes_meanwhile_is_for_the_next_run(here):
    written(here / "lockstep.toml", "[run]\nkeep = 5\n[launch]\nmax-restarts = 1\nnproc-per-node = 1\n")
    written(here / "train.py", RESTARTED)
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "run", "train.py"], capture_output=True, text=True, check=False
    )
    assert "generation 0 keep 5" in done.stdout, done
    assert "generation 1 keep 5" in done.stdout, done


OPTIONS = """
[bench]
ranks = [1, 2]
steps = 7
rounds = 1
[verify]
only = ["ranks"]
[tune]
workers = 3
resume = true
[doctor]
quick = true
nodes = "many"
"""


def test_each_command_has_options_of_its_own(here, capsys):
    written(here / "lockstep.toml", OPTIONS)
    assert [line.strip() for line in shown(capsys)[2].removeprefix("lockstep config show: ").splitlines()] == [
        "lockstep.toml:10: [tune] resume: of one start, not of a project; give it on the command line",
        "lockstep.toml:13: argument --nodes: invalid int value: 'many'",
    ]
    written(here / "lockstep.toml", OPTIONS.replace("resume = true\n", "").replace('"many"', "1"))
    told = json.loads(shown(capsys, "--json")[1])
    assert told["bench"][0] == {"option": "--ranks 1 2", "source": "lockstep.toml:3"}
    assert told["doctor"][0] == {"option": "--quick", "source": "lockstep.toml:11"}
    lines = [" ".join(line.split()) for line in shown(capsys)[1].splitlines()]
    assert lines[lines.index("options of lockstep tune:") + 1] == "--workers 3 lockstep.toml:9"


def test_the_command_line_stands_over_the_options_of_a_file(here, capsys):
    written(here / "lockstep.toml", "[bench]\nranks = [1]\nrounds = 0\n")
    written(here / "train.py", SCRIPT_OF_STEPS)
    assert cli.main(["bench", "train.py"]) == 2
    assert "--rounds 0: it must be at least 1" in capsys.readouterr().err
    assert cli.main(["bench", "--rounds", "1", "--steps", "0", "train.py"]) == 2
    assert "--steps 0: it must be at least 1" in capsys.readouterr().err


@pytest.mark.campaign
def test_commands_that_start_runs_of_their_own_read_the_same_file_and_no_options(here):
    written(here.parent / "lockstep.toml", "[run]\nseed = 5\n[launch]\nnnodes = 2\n")
    written(here / "train.py", SCRIPT_OF_STEPS)
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "verify", "--only", "surroundings", "--time", "60", "train.py"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


SCRIPT_OF_STEPS = """
import torch
import lockstep

with lockstep.Run() as run:
    model = run.model(torch.nn.Linear(2, 1))
    run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for x in run.train(run.loader(torch.ones(32, 2), global_batch=8, micro_batch=2)):
        run.step(model(x).square().mean())
"""
