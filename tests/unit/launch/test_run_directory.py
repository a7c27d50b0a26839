"""All that is checked before anything starts."""

import json
import re
import sys
from dataclasses import replace
from datetime import datetime
from types import ModuleType, SimpleNamespace

import pytest

from lockstep import gpu_driver
from lockstep.errors import LockstepError, SettingError
from lockstep.launch.host.machine import Machine, cpus_beside_gpus, visible
from lockstep.launch.job.request import Executable, Function, Module, Request, Script
from lockstep.launch.run_dir.run_directory import note_generation, note_refused, prepare, settle
from lockstep.launch.workers.rank_environment import common_environment, rank_environment
from lockstep.settings import ResolvedSettings
from lockstep.world import World

NOW = datetime(2026, 11, 21, 10, 15)
CPUS = Machine(gpus=0, cpus=6)
GPUS = Machine(gpus=2, cpus=6)


def ask(machine=CPUS, env=None, name="train.py", program=None, **request):
    return prepare(Request(program or Script(name), **request), machine=machine, env=env or {}, now=NOW)


def begin(**request):
    job = ask(**request)
    settle(job, now=NOW).close()
    note_generation(job, job.generation, ranks=job.ranks, hosts=["n1"], now=NOW)
    return job


@pytest.mark.parametrize(
    ("machine", "asked", "ranks"),
    [
        (CPUS, None, 1),
        (GPUS, None, 2),
        (CPUS, "auto", 6),
        (GPUS, "auto", 2),
        (GPUS, "cpu", 6),
        (GPUS, "gpu", 2),
        (CPUS, "16", 16),
        (CPUS, 3, 3),
        (GPUS, "1", 1),
    ],
)
def test_how_many_ranks(here, machine, asked, ranks):
    assert ask(machine, nproc_per_node=asked).ranks == ranks


def test_without_a_gpu_it_says_so(here):
    assert ask().notes == ("No GPU found: 1 rank on the CPU; --nproc-per-node 2 rehearses",)
    assert ask(nproc_per_node=1).notes == ()


@pytest.mark.parametrize(
    ("machine", "request_", "says"),
    [
        (CPUS, {"nproc_per_node": "gpu"}, "no usable GPU; give a number of ranks to rehearse"),
        (CPUS, {"nproc_per_node": "0"}, "at least 1"),
        (CPUS, {"nproc_per_node": "many"}, "give a number of ranks, gpu, cpu or auto"),
        (GPUS, {"nproc_per_node": "4"}, "may use 2 GPUs; use --nproc-per-node 2, or rehearse on the CPU"),
        (GPUS, {"nproc_per_node": "4", "env": {"CUDA_VISIBLE_DEVICES": "0,1"}}, r"2 GPUs \(CUDA_VISIBLE_DEVICES=0,1\)"),
        (CPUS, {"max_restarts": -1}, "at least 0"),
        (CPUS, {"env": {"OMP_NUM_THREADS": "all"}}, "OMP_NUM_THREADS='all': give the number of CPU threads"),
        (CPUS, {"grace_s": float("nan")}, "at least 0 seconds"),
        (CPUS, {"name": "trian.py"}, r"no such file: trian.py; did you mean train.py\?"),
        (CPUS, {"name": "far/away.py"}, "check the path"),
        (CPUS, {"name": "."}, r"directory without a __main__.py"),
        (CPUS, {"resume": True, "fresh": True}, "contradict"),
        (CPUS, {"resume": True}, "say which run, with --run-dir DIR"),
        (CPUS, {"run_dir": "train.py"}, "is a file"),
        (CPUS, {"env": {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}}, "already"),
        (CPUS, {"env": {"RANK": "1"}}, "WORLD_SIZE is not"),
        (CPUS, {"name": "/bin/sh"}, "no Python script; to start a program of another kind: --no-python /bin/sh"),
        (CPUS, {"program": Executable("no-such-program")}, "no such program"),
        (CPUS, {"program": Executable("/etc/passwd")}, "may not be executed"),
        (CPUS, {"program": Executable("sh"), "faults": "kill rank 0 after 1 s"}, "--fault with --no-python"),
    ],
)
def test_what_is_refused_and_how(here, machine, request_, says):
    with pytest.raises(LockstepError, match=says):
        ask(machine, **request_)
    assert sorted(path.name for path in here.iterdir()) == ["train.py"], "nothing may have been done"


def test_a_module_that_is_not_there_is_refused(here):
    with pytest.raises(SettingError, match=r"no such module: trian; did you mean train\?"):
        prepare(Request(Module("trian")), machine=CPUS, env={}, now=NOW)
    assert prepare(Request(Module("json.tool")), machine=CPUS, env={}, now=NOW).run_dir.name.startswith("tool-")


def test_a_new_run_has_a_directory_of_its_own(here):
    first = begin()
    assert first.run_dir == here / "runs" / "train-20261121-101500"
    assert ask().run_dir.name == "train-20261121-101500-2"
    with pytest.raises(SettingError, match="the newest is --run-dir runs/train-20261121-101500"):
        ask(resume=True)


def test_an_earlier_run_is_continued_or_set_aside_only_when_told(here):
    begin(run_dir="r")
    (here / "r" / "checkpoints").mkdir()
    with pytest.raises(SettingError, match="holds an earlier run") as refused:
        ask(run_dir="r", options=("--strategy", "fsdp"))
    assert "\n  lockstep run --resume --run-dir r --strategy fsdp train.py\n" in str(refused.value)
    assert str(refused.value).endswith("\n  lockstep run --fresh --run-dir r --strategy fsdp train.py")

    resumed = begin(run_dir="r", resume=True)
    assert (resumed.begins, resumed.generation) == ("resume", 1)
    about = json.loads((here / "r" / "run.json").read_text())
    assert [start["begins"] for start in about["starts"]] == ["new", "resume"]
    assert [generation["number"] for generation in about["generations"]] == [0, 1]

    fresh = begin(run_dir="r", fresh=True)
    assert (fresh.begins, fresh.generation) == ("fresh", 0)
    assert (here / "r-before-20261121-101500" / "checkpoints").is_dir()
    assert not (here / "r" / "checkpoints").exists()
    assert "r-before-20261121-101500; nothing of it was deleted" in fresh.notes[-1]


@pytest.mark.parametrize("how", [{}, {"fresh": True}, {"resume": True}])
@pytest.mark.parametrize("mark", [None, "", "{}", '{"name": "somebody else\'s"}'])
def test_a_directory_that_is_no_runs_is_never_touched(here, how, mark):
    (here / "thesis").mkdir()
    (here / "thesis" / "chapter.tex").write_text("years of work")
    if mark is not None:
        (here / "thesis" / "run.json").write_text(mark)
    with pytest.raises(SettingError, match="is not empty and holds no run"):
        ask(run_dir="thesis", **how)
    assert (here / "thesis" / "chapter.tex").read_text() == "years of work"


def test_to_resume_where_there_is_nothing_begins(here):
    job = ask(run_dir="r", resume=True)
    assert (job.begins, job.generation) == ("resume", 0)


@pytest.mark.parametrize("how", [{}, {"fresh": True}, {"resume": True}])
def test_so_does_a_launcher_after_one_that_was_killed_before_it_had_written_the_run_file(here, how):
    settle(ask(run_dir="r"), now=NOW).close()
    (here / "r" / "run.json").rename(here / "r" / ".0123456789ab.run.json")
    settle(ask(run_dir="r", **how), now=NOW).close()
    assert json.loads((here / "r" / "run.json").read_text())["starts"]


def test_a_run_directory_has_one_launcher_at_a_time(here):
    job = ask(run_dir="r")
    with settle(job, now=NOW):
        for how in ({"resume": True}, {"fresh": True}):
            with pytest.raises(SettingError, match="another lockstep run works in r"):
                settle(ask(run_dir="r", **how), now=NOW)
    settle(ask(run_dir="r", resume=True), now=NOW).close()


def test_a_run_directory_that_cannot_be_made_is_refused(here):
    with pytest.raises(SettingError, match="cannot be made ready: "):
        settle(ask(run_dir="train.py/r"), now=NOW)


def test_a_rank_reads_its_own_place_from_what_it_is_given(here):
    job = ask(nproc_per_node=3, run_dir="r", settings={"precision": "bf16"})
    env = {"HOME": "/h", "RANK": "7", "LOCKSTEP_RESUME": "1", "LOCKSTEP_SETTINGS": '{"seed": 3}'}
    common = common_environment(job, env, "/tmp/beats")
    assert common["LOCKSTEP_CHANNEL"] == "/tmp/beats"
    world = World.from_env({**common, **rank_environment(job, World(2, 3, 2, 3, 0, 1, generation=4, port=1234), 0)})
    assert (world.rank, world.size, world.local_rank, world.nodes, world.port) == (2, 3, 2, 1, 1234)
    assert (world.generation, world.launcher, world.run_dir) == (4, "lockstep", str(here / "r"))
    assert json.loads(common["LOCKSTEP_SETTINGS"]) == {"seed": 3, "precision": "bf16"}
    assert common["OMP_NUM_THREADS"] == "1"
    assert "LOCKSTEP_RESUME" not in common
    assert common_environment(job, {"OMP_NUM_THREADS": "4"}, "")["OMP_NUM_THREADS"] == "4"


@pytest.mark.parametrize(
    ("begins", "restart", "resume", "fresh"),
    [("new", 0, None, None), ("resume", 0, "1", None), ("fresh", 0, None, "1"), ("fresh", 1, "1", None)],
)
def test_how_a_generation_begins(here, begins, restart, resume, fresh):
    variables = rank_environment(replace(ask(), begins=begins), World(0, 1, 0, 1, 0, 1, generation=restart), restart)
    assert (variables.get("LOCKSTEP_RESUME"), variables.get("LOCKSTEP_FRESH")) == (resume, fresh)


def train():
    """What a notebook would launch."""


def test_a_notebook_is_told_in_python_what_to_do(here):
    def launch(**more):
        return prepare(Request(Function(train), **more), machine=CPUS, env={}, now=NOW)

    settle(launch(run_dir="same"), now=NOW).close()
    with pytest.raises(SettingError) as refused:
        launch(run_dir="same", nproc_per_node=2)
    assert str(refused.value).splitlines() == [
        "run_dir='same' holds an earlier run; continue it, or set it aside and start over:",
        "  lockstep.launch(train, ranks=2, resume=True, run_dir='same')",
        "  lockstep.launch(train, ranks=2, fresh=True, run_dir='same')",
    ]
    for given, says in (
        ({"nproc_per_node": 0}, "ranks=0: it must be at least 1"),
        ({"grace_s": -1.0}, "grace_s=-1.0: it must be at least 0 seconds"),
        ({"resume": True}, "resume=True: say which run, with run_dir='DIR'"),
    ):
        with pytest.raises(SettingError, match=re.escape(says)):
            launch(**given)


def test_requests_can_be_said_again():
    assert Request(Module("pack.train", ("--lr", "a b"))).command("--resume") == (
        "lockstep run --resume -m pack.train --lr 'a b'"
    )
    assert Request(Function(test_requests_can_be_said_again)).program.stem == "test_requests_can_be_said_again"


@pytest.mark.parametrize(
    ("allowed", "present", "count"),
    [
        (None, 4, 4),
        ("", 4, 0),
        ("0,2", 4, 2),
        ("0, 2", 4, 2),
        ("-1", 4, 0),
        ("1,-1,2", 4, 1),
        ("0,9,1", 4, 1),
        ("GPU-5ebe9f43,GPU-77", 4, 2),
        ("0", 0, 0),
    ],
)
def test_gpus_that_are_visible(allowed, present, count):
    assert visible(allowed, present) == count


class Driver(ModuleType):
    """NVIDIA's library on a host of four GPUs, two at each socket; the names of CPUs alternate between sockets."""

    class NVMLError(Exception):
        pass

    def __init__(self, divided=False):
        super().__init__("pynvml")
        self.divided = divided
        self.nvmlInit = self.nvmlShutdown = lambda: None
        self.nvmlDeviceGetCount = lambda: 4

    def nvmlDeviceGetHandleByIndex(self, number):
        return number

    def nvmlDeviceGetHandleByUUID(self, name):
        if not name.startswith("GPU-"):
            raise self.NVMLError(name)
        return int(name[-1])

    def nvmlDeviceGetName(self, number):
        return f"GPU of kind {number // 2}"

    def nvmlDeviceGetMemoryInfo(self, number):
        if number == 3:
            raise self.NVMLError("not supported")
        return SimpleNamespace(total=(number + 1) << 30)

    def nvmlSystemGetDriverVersion(self):
        return "535.1"

    def nvmlDeviceGetMigMode(self, number):
        if number == 0:
            raise self.NVMLError("not supported")
        return [int(self.divided), 0]

    def nvmlDeviceGetCpuAffinity(self, number, words):
        return [0x5555555555555555 << (number >= 2)] * words


@pytest.fixture
def driver(monkeypatch):
    found = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", found)
    monkeypatch.setattr(gpu_driver, "_DRIVER", ("/",))
    return found


def test_of_divided_gpus_a_process_sees_one_part(driver):
    assert Machine.detect({}).gpus == 4
    driver.divided = True
    assert Machine.detect({}).gpus == 1
    assert Machine.detect({"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}).gpus == 1
    assert Machine.detect({"CUDA_VISIBLE_DEVICES": ""}).gpus == 0


def test_the_cpus_beside_the_gpus_that_a_process_sees(driver):
    even, odd = frozenset(range(0, 80, 2)), frozenset(range(1, 80, 2))
    assert cpus_beside_gpus(None, 80) == [even, even, odd, odd]
    assert cpus_beside_gpus("3,GPU-1", 80) == [odd, even]
    assert cpus_beside_gpus("MIG-1", 80) == []


def test_a_start_tells_the_gpus_of_its_node(driver, here):
    settle(ask(run_dir="r"), now=NOW).close()
    (node,) = json.loads((here / "r" / "run.json").read_text())["starts"][0]["nodes"].values()
    assert [gpu["memory_bytes"] for gpu in node["gpus"]] == [1 << 30, 2 << 30, 3 << 30, None]
    assert (node["gpus"][2]["name"], node["driver"]) == ("GPU of kind 1", "535.1")


def test_without_a_driver_no_cpu_is_beside_a_gpu(monkeypatch):
    monkeypatch.setattr(gpu_driver, "_DRIVER", ("/nowhere",))
    assert cpus_beside_gpus(None, 80) == []


def test_a_start_that_was_refused_leaves_its_directory_as_if_it_were_empty(here):
    job = ask(run_dir="r")
    settle(job, now=NOW).close()
    note_generation(job, 0, ranks=1, hosts=["n1"], now=NOW)
    note_refused(job)
    assert ask(run_dir="r").begins == "new"
    (job.run_dir / "metrics.jsonl").write_text("{}")
    with pytest.raises(SettingError, match="holds an earlier run"):
        ask(run_dir="r")


def test_a_new_run_directory_is_its_users_alone_and_says_no_secret(here, monkeypatch):
    job = ask(run_dir="r")
    settle(job, now=NOW).close()
    assert job.run_dir.stat().st_mode & 0o777 == 0o700
    program = Script("train.py", ("--token", "hunter2"))
    secret = ask(program=program, run_dir="r2")
    settle(secret, now=NOW).close()
    assert "hunter2" not in (secret.run_dir / "run.json").read_text()
    monkeypatch.setenv("SERVICE_TOKEN", "hunter3")
    monkeypatch.setenv("LOCKSTEP_SECRET", "hunter3")
    monkeypatch.setenv("LOCKSTEP_CHECKPOINT", "https://me:hunter3@host/r")
    settings = {"track": "wandb:api_key=hunter3"}
    settle(ask(program=program, run_dir="r3", settings=settings), now=NOW).close()
    assert "hunter3" not in (here / "r3" / "run.json").read_text(), "of variables, settings are recorded only"
    assert "hunter2" not in secret.to_resume
    assert secret.to_resume.endswith("train.py --token '***'")
    assert "hunter2" not in secret.to_resume_at("n1:29400")
    with pytest.raises(SettingError, match="holds an earlier run") as raised:
        ask(program=program, run_dir="r2")
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("left", ["", "{", '{"starts": [], "generations": {}}', '{"starts": 1, "generations": []}'])
def test_a_damaged_record_beside_checkpoints_is_called_damaged_and_nothing_is_to_be_emptied(here, left):
    begin(run_dir="r")
    (here / "r/checkpoints").mkdir()
    (here / "r/run.json").write_text(left)
    for how in ({}, {"resume": True}, {"fresh": True}):
        with pytest.raises(SettingError, match="is damaged or gone") as raised:
            ask(run_dir="r", **how)
        assert "empty" not in str(raised.value)


@pytest.mark.parametrize(("given", "meant"), [("PRECISON", "PRECISION"), ("SAVEEVERY", "SAVE_EVERY")])
def test_a_misspelt_variable_is_refused(here, given, meant):
    with pytest.raises(SettingError, match=f"LOCKSTEP_{given} is none of Lockstep's; did you mean LOCKSTEP_{meant}"):
        ask(env={f"LOCKSTEP_{given}": "bf16"})
    with pytest.raises(SettingError, match="none of Lockstep's"):
        ResolvedSettings.resolve({}, {f"LOCKSTEP_{given}": "bf16"})
    right = {"LOCKSTEP_PRECISION": "bf16", "LOCKSTEP_SAVE_EVERY": "2 steps", "LOCKSTEP_VIEW": "lines"}
    ask(env={**right, "LOCKSTEP_TEST_SESSION": "1", "PRECISON": ""})
