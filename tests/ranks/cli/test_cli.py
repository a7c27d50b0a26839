"""The command line: what it accepts, how it refuses, and how fast it answers."""

import importlib
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import lockstep
from lockstep import cli
from lockstep.cli.run_options import INSTEAD

SOURCE = str(Path(lockstep.__file__).parents[1])


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_alone_it_says_what_it_can_do(capsys, words):
    assert cli.main(words) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert "  run                 start a script" in said.out
    assert said.out.count("\n  lockstep run ") == 3
    assert len(said.out.splitlines()) < 30


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"lockstep {lockstep.__version__}\n"


def test_help_of_run_fits_a_screen(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "--help"])
    assert ended.value.code == 0
    assert len(capsys.readouterr().out.splitlines()) < 55


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("rum train.py", "lockstep: no such command: rum; did you mean run?"),
        ("train.py", "lockstep: no such command: train.py; to start a script: lockstep run train.py"),
        ("fly", "lockstep: no such command: fly; there are run"),
        ("run", "lockstep run: say what to run: lockstep run train.py"),
        ("run trian.py", "lockstep run: no such file: trian.py; did you mean train.py?"),
        ("run --nproc-per-nod 2 train.py", "no such option: --nproc-per-nod; did you mean --nproc-per-node?"),
        ("run --nproc 2 train.py", "no such option: --nproc"),
        ("run --nproc_per_node x train.py", "give a number of ranks, gpu, cpu or auto"),
        ("run --max-restarts few train.py", "invalid int value: 'few'"),
        ("run --grace -1 train.py", "it must be at least 0 seconds"),
        ("run --nnodes 2 train.py", "say where the machines meet, the same on each: --rdzv-endpoint HOST:PORT"),
        ("run --nnodes=4:1 train.py", "--nnodes 4:1: give a number of machines, or MIN:MAX such as 1:4"),
        ("run --nnodes few train.py", "--nnodes few: give a number of machines"),
        ("run --nnodes 2 --rdzv_endpoint n1:0 train.py", "give HOST:PORT, with a port between 1 and 65535"),
        ("run --nnodes 2 --rdzv-endpoint n1 --rdzv-conf timeout=3 train.py", "there are join_timeout=SECONDS"),
        ("run --nnodes 2 --rdzv-endpoint n1 --rdzv-conf join_timeout=no train.py", "give join_timeout=SECONDS"),
        ("run --nnodes 2 --rdzv-endpoint n1 --rdzv-conf lost_after=0 train.py", "it must be more than 0 seconds"),
        ("run --nnodes 2 --rdzv-endpoint n1 --rdzv-conf suspect_after=31 train.py", "at most lost_after, which is 30"),
        ("run --nnodes 3:4 --rdzv-endpoint n1 --spares 2 train.py", "the others must be at least MIN"),
        ("run --nnodes 2 --rdzv-endpoint n1 --max-changes -1 train.py", "--max-changes -1: it must be at least 0"),
        ("run --nnodes 2 --rdzv-endpoint n1 --rdzv-takeover train.py", "say --run-dir DIR, too"),
        ("run --refill-after 0 train.py", "--refill-after 0.0: it must be more than 0 seconds"),
        ("run --nnodes 2 --rdzv-endpoint nohost.invalid train.py", "cannot resolve 'nohost.invalid' from node "),
        ("run --node_rank 1 train.py", "--node-rank 1 with --nnodes 1: the first machine is 0, the last one 0"),
        ("run --nnodes 1:2 --node_rank 1 --master_addr n1 train.py", "machines that come and go have no fixed numbers"),
        ("run --nnodes 2 --master-port 1 train.py", "--master-port 1: say --master-addr HOST, too"),
        ("run --nnodes 2 --master-addr n1 --master-port 0 train.py", "with a port between 1 and 65535"),
        ("run --nnodes 2 --master-addr n1 --rdzv-endpoint n1 train.py", "say the same thing; give one of them"),
        (
            "run --nnodes 2 --node-rank 0 --master-addr 192.0.2.1 train.py",
            "this machine cannot listen at 192.0.2.1:29500",
        ),
        ("run --attach 2 --ranks 2 train.py", "--attach 2: give one of the 2 ranks, from 0 to 1"),
        (
            "run --attach 0 --nnodes 2 --master-addr n1 train.py",
            "--attach 0: a terminal is for the ranks of its own machine",
        ),
        ("run --strategy fsdpp train.py", "strategy='fsdpp': did you mean fsdp? give one of none, dp, ddp"),
        ("run --strategy deepspeed_stage_2 train.py", "did you mean zero:stage=2? give one of none"),
        ("run --strategy tensor train.py", "strategy='tensor': give one of none, dp, ddp"),
        ("run --num_processes 2 train.py", "no such option: --num_processes; say --nproc-per-node N"),
        ("run -np 2 train.py", "no such option: -np; say --nproc-per-node N"),
        ("run --devices=2 train.py", "no such option: --devices; say --nproc-per-node N"),
        ("run --monitor-interval 1 train.py", "no such option: --monitor-interval; leave it out"),
        ("job slurm --num-gpus 2 train.py", "no such option: --num-gpus; say --nproc-per-node N"),
        ("job slurm --num_machines 2 train.py", "no such option: --num_machines; leave it out: the job itself says"),
        ("run --strategy ddp:compres=fp16 train.py", "strategy ddp has no option compres; did you mean compress?"),
        ("run --keep 3 train.py", "it is a setting: --set keep=VALUE"),
        ("run --set keep train.py", "give NAME=VALUE"),
        ("run --set kepp=3 train.py", "kepp: no such setting; did you mean keep?"),
        ("run --set keep=0 train.py", "keep=0: it must be at least 1"),
        ("run --precision fp8 train.py", "precision='fp8': give one of fp32, bf16, fp16"),
        ("run --reduction exactly train.py", "reduction='exactly': give one of exact, fast"),
        ("run --save-every often train.py", "give a number and a unit"),
        ("run --start thread train.py", "choose from 'fork', 'plain'"),
        ("run --resume=best train.py", "--resume takes no value; did you mean --resume-from best?"),
        ("run --fresh=yes train.py", "--fresh takes no value"),
        ("run --resume train.py", "say which run, with --run-dir DIR"),
        ("run --resume --fresh --run-dir r train.py", "contradict"),
        ("run -m trian", "no such module: trian; did you mean train?"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line_with_a_way_out(here, capsys, words, says):
    assert cli.main(words.split()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert says in said.err
    assert len(said.err.splitlines()) == 1
    assert sorted(path.name for path in here.iterdir()) == ["train.py"]


def test_what_is_said_of_the_options_of_other_launchers_is_true():
    """None of them is ours in the same spelling, and each option that is named instead is."""
    known = set(cli.run_options()._option_string_actions)
    assert not known & set(INSTEAD)
    named = {option for text in INSTEAD.values() for option in re.findall(r"(?<![\w-])--?[a-z][a-z-]*", text)}
    assert named <= known


@pytest.mark.parametrize(
    ("words", "ours", "program"),
    [
        ("train.py --resume --fresh -m x", {}, ("train.py", ["--resume", "--fresh", "-m", "x"])),
        ("--resume --run-dir r train.py --run-dir s", {"run_dir": "r"}, ("train.py", ["--run-dir", "s"])),
        ("--nproc_per_node=4 -- train.py -- x", {"nproc_per_node": "4"}, ("train.py", ["--", "x"])),
        ("--grace 1 train.py -- x", {"options": ("--grace", "1")}, ("train.py", ["--", "x"])),
        ("train.py --", {"options": ()}, ("train.py", ["--"])),
        ("--standalone --nnodes 1 train.py", {}, ("train.py", [])),
        ("-m pack.train -m", {"options": ()}, ("pack.train", ["-m"])),
        ("--fresh --run-dir=r --grace 3 train.py", {"grace_s": 3.0, "options": ("--grace", "3")}, ("train.py", [])),
        ("--ranks 3 train.py --ranks 4", {"nproc_per_node": "3"}, ("train.py", ["--ranks", "4"])),
        ("--nproc_per_node=2 --use_env --max_restarts 1 train.py", {"max_restarts": 1}, ("train.py", [])),
        ("--node_rank=0 --nnodes=1 --master_addr=n1 --master_port=1234 train.py", {"nodes": None}, ("train.py", [])),
        ("--run_dir=r --run_dir s --grace 1 train.py", {"options": ("--grace", "1")}, ("train.py", [])),
        ("--set keep=2 --strategy fsdp train.py", {"settings": {"keep": "2", "strategy": "fsdp"}}, ("train.py", [])),
    ],
)
def test_what_stands_after_the_script_is_the_scripts(here, monkeypatch, words, ours, program):
    asked = []
    monkeypatch.setattr(importlib.import_module("lockstep.launch"), "start", lambda request: asked.append(request) or 0)
    assert cli.main(["run", *words.split()]) == 0
    (request,) = asked
    assert (request.program.name, list(request.program.args)) == program
    assert {name: getattr(request, name) for name in ours} == ours
    assert cli.main(request.command_args("--resume", "--run-dir", "there")) == 0
    goes_on = replace(request, run_dir="there", resume=True, fresh=False, options=asked[1].options)
    assert asked[1] == goes_on, "the command that goes on asks for the same"


def test_the_guides_static_rendezvous_is_ours(here, monkeypatch):
    asked = []
    monkeypatch.setattr(importlib.import_module("lockstep.launch"), "start", lambda request: asked.append(request) or 0)
    words = "--nnodes 2 --node_rank 1 --master_addr n1 --master_port 1234 --rdzv_backend static train.py"
    assert cli.main(["run", *words.split()]) == 0
    nodes = asked[0].nodes
    assert (nodes.min_nodes, nodes.max_nodes, nodes.endpoint, nodes.node_rank) == (2, 2, "n1:1234", 1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = = 1", "train.py:1: SyntaxError: invalid syntax: x = = 1"),
        ("if 1:\nprint(1)", "train.py:2: IndentationError: expected an indented block"),
        ("'\x00'", "train.py"),
    ],
)
def test_what_python_cannot_read_is_told_before_torch_is_imported(here, capsys, text, says):
    (here / "train.py").write_text(text)
    assert cli.main(["run", "--nproc-per-node", "2", "train.py"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_of_a_module_the_file_that_would_run_is_read(here, capsys):
    (here / "pack").mkdir()
    (here / "pack" / "__init__.py").write_text("raise SystemExit('it was imported')")
    (here / "pack" / "fit.py").write_text("x = = 1")
    assert cli.main(["run", "-m", "pack.fit"]) == 2
    assert "fit.py:1: SyntaxError" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["train.py --help", "train.py fit -h", "-m train --help"])
def test_a_script_is_asked_for_its_help_once_and_leaves_nothing(here, capfd, words):
    (here / "train.py").write_text("import sys; print('help', sys.argv[1:], 'torch' in sys.modules); sys.exit(5)")
    assert cli.main(["run", "--nproc-per-node", "3", *words.split()]) == 5
    said = capfd.readouterr()
    assert said.out.startswith("help [")
    assert said.out.endswith("False\n")
    assert said.err == ""
    assert not (here / "runs").exists()


def test_a_setting_of_the_environment_is_checked_too(here, capsys, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_STRATEGY", "fsdpp")
    assert cli.main(["run", "train.py"]) == 2
    assert "strategy='fsdpp'" in capsys.readouterr().err


def test_a_checkpoint_directory_does_not_follow_the_script_around(here, monkeypatch):
    asked = []
    monkeypatch.setattr(importlib.import_module("lockstep.launch"), "start", lambda request: asked.append(request) or 0)
    cli.main(["run", "--checkpoint", "c", "train.py"])
    assert asked[0].settings == {"checkpoint": str(here / "c")}


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["run", "--help"], ["run", "nothere.py"]])
def test_it_answers_without_loading_what_is_slow(tmp_path, words):
    look = f"""
import sys
sys.path.insert(0, {SOURCE!r})
from lockstep import cli
try:
    cli.main({words!r})
except SystemExit:
    pass
slow = {{"torch", "numpy", "rich", "matplotlib", "multiprocessing.context"}} & set(sys.modules)
if "nothere.py" in {words!r}:
    slow -= {{"multiprocessing.context"}}
sys.exit(f"loaded: {{slow}}" if slow else 0)
"""
    done = subprocess.run([sys.executable, "-c", look], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["lockstep store connection", "of the user's own"])
def test_a_thread_that_is_stuck_in_compiled_code_does_not_end_the_command(name):
    command = f"""
import atexit, importlib, sys, threading
entry = importlib.import_module("lockstep.cli.main")
entry.main = lambda: print("last words") or 7
atexit.register(print, "an interpreter ended")
threading.Thread(target=threading.Event().wait, daemon=True, name={name!r}).start()
sys.exit(entry.run_command())
"""
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, env={"PYTHONPATH": SOURCE})
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout == "last words\n" + "an interpreter ended\n" * name.startswith("of the user")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--rdzv-takeover train.py", "--rdzv-takeover: say --run-dir DIR, too"),
        ("--rdzv-conf lost_after=x train.py", "lost_after=x: give lost_after=SECONDS"),
        ("--spares 1 train.py", "--spares 1 with --nnodes"),
    ],
)
def test_options_of_several_nodes_count_where_a_scheduler_says_which_they_are(here, monkeypatch, capsys, words, says):
    step = {"JOB_ID": "812", "JOB_NODELIST": "n[1-2]", "STEP_ID": "0", "STEP_NUM_TASKS": "2", "NODEID": "1"}
    for name, value in step.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert cli.main(["run", *words.split()]) == 2
    assert says in capsys.readouterr().err
