"""Every file and message that is parsed, changed at random: a clear error, a fall-back or nothing, at once.

What is changed is both the bytes, as a disk or a stranger does, and what they say, with sums that fit again, as
somebody does who knows the format. `make test` takes a slice, the same one each time; `make campaign` 10,000 of each.
"""

import ast
import contextlib
import json
import os
import random
import re
import struct
import time
import tomllib
import tracemalloc
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import lockstep
from lockstep.checkpoint import CheckpointReader, Checkpoints, load_tree, read_weights, verify
from lockstep.checkpoint.filesystem import LOCAL
from lockstep.checkpoint.lock import Holder
from lockstep.checkpoint.manifest import MANIFEST
from lockstep.checkpoint.next_step import NEXT_STEP, read_next_step
from lockstep.checkpoint.part_file import PartWriter, load_part, read_part_head
from lockstep.checkpoint.whole_save import FlatTree
from lockstep.cli.config import file_words
from lockstep.cli.run_options import run_options
from lockstep.cli.setting_options import site_prices, site_table
from lockstep.collectives import single_rank_group
from lockstep.errors import LockstepError
from lockstep.heartbeat_message import Heartbeat, SourceLine
from lockstep.launch.diagnosis.error_record import Failure
from lockstep.launch.diagnosis.rank_places import RankPlaces
from lockstep.launch.diagnosis.root_cause import RankExit, diagnose
from lockstep.launch.rendezvous.job_contract import JobContract, Signature, version_in
from lockstep.launch.rendezvous.lease import Lease, LeaseFiles
from lockstep.launch.rendezvous.notices import (
    Message,
    endings_from_json,
    endings_to_json,
    notice_from_json,
    notice_to_json,
)
from lockstep.launch.rendezvous.plan import UNKNOWN, Member, NodeReport, Plan, beat_in, record_text
from lockstep.launch.run_dir.run_directory import next_generation
from lockstep.launch.schedulers import JOB_SCRIPT_SCHEDULERS
from lockstep.launch.schedulers.grid_engine import GridEngine
from lockstep.launch.schedulers.job_script import site_defaults
from lockstep.launch.schedulers.pbs import Pbs
from lockstep.launch.schedulers.scheduler import text_of
from lockstep.launch.schedulers.slurm import Slurm
from lockstep.project_files import FILE, project_files, resolve_settings
from lockstep.records import object_from, read_bytes
from lockstep.report import RanksFile, RankStatus, Status, StatusFile
from lockstep.report.metrics_file import MetricsFile
from lockstep.report.top import table
from lockstep.run.recovery.measures_journal import journal_in
from lockstep.saved_run.listed import check, rows
from lockstep.scale import LinkProfile, StepProfile, Timing, open_catalogue, predict_table, rows_table, shipped_loss
from lockstep.scale.published import read_rows
from lockstep.scale.step_profile import GradientReady, read_profile, write_profile
from lockstep.slurm_syntax import expand_counts, expand_hosts
from lockstep.tune import Choice, Float, enqueue, load
from lockstep.tune.record.journal import JournalWriter, SearchPlan, journal_file
from lockstep.tune.record.planned_trials import PlannedTrials
from lockstep.tune.record.records import LossReported, TrialBegan, TrialEnded
from lockstep.tune.record.search_directory import Death
from lockstep.tune.record.trial_claims import TrialClaims
from lockstep.tune.record.warm_start import WarmStart
from lockstep.tune.results.summary import show, warm_start_lines
from lockstep.tune.search import Space
from lockstep.world.world import leading_host

SLICE, ALL = 30, 10_000
MOST_S, MOST_BYTES = 5.0, 100 << 20
STRANGE = (
    None, True, -1, 0, 1 << 33, 1 << 70, 10**400, 1e308, float("nan"), "", "x", "\x1b]0;owned\x07", "\ud800",
    "../../etc", [], {}, [[]], ["a"], {"a": 1}, [-2, -2], [1] * 5000,
)  # fmt: skip
DEEP = b"[" * 100_000


def of_bytes(content, chance):
    """``content`` as a disk, a power cut or a stranger leaves it."""
    at, end = sorted(chance.randrange(len(content) + 1) for _ in range(2))
    noise = chance.randbytes(chance.randrange(1, 9))
    flipped = bytearray(content)
    if flipped:
        flipped[chance.randrange(len(flipped))] ^= 1 << chance.randrange(8)
    return chance.choice(
        [
            bytes(flipped),
            bytes(flipped),
            content[:at],
            content[:at] + content[end:],
            content[:at] + noise + content[at:],
            content[:at] + bytes(end - at) + content[end:],
            content[:at] + content[at:end] * 2 + content[end:],
            content[:at] + DEEP + content[at:],
            b"",
        ]
    )


def of_values(value, chance):
    """``value``, as JSON has it, with another one somewhere in it, or without one, or with one more."""
    if isinstance(value, dict | list) and value and chance.random() < 0.85:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = chance.choice(keys)
        changed = dict(value) if isinstance(value, dict) else list(value)
        what = chance.random()
        if what < 0.1:
            del changed[key]
        elif what < 0.15 and isinstance(changed, dict):
            changed[str(chance.choice(STRANGE))] = changed[key]
        elif what < 0.2 and isinstance(changed, list):
            changed.append(changed[key])
        else:
            changed[key] = of_values(value[key], chance)
        return changed
    return chance.choice(STRANGE)


def of_json(text, chance):
    return json.dumps(of_values(json.loads(text), chance)).encode()


def of_line(content, chance):
    """A line of a journal of a search, or a note beside a checkpoint: its sum, and JSON."""
    lines = content.splitlines()
    number = chance.randrange(len(lines))
    text = of_json(lines[number][9:], chance)
    lines[number] = b"%08x %b" % (zlib.crc32(text), text)
    return b"\n".join(lines) + (b"\n" if content.endswith(b"\n") else b"")


def of_manifest(content, chance):
    body = of_json(json.dumps(json.loads(content)["manifest"]), chance)
    return b'{"crc32":"' + b"%08x" % zlib.crc32(body) + b'","manifest":' + body + b"}\n"


def of_safetensors(content, chance):
    length = int.from_bytes(content[:8], "little")
    head = of_json(content[8 : 8 + length], chance)
    return len(head).to_bytes(8, "little") + head + content[8 + length :]


def of_toml(content, chance):
    changed = of_values(tomllib.loads(content.decode()), chance)
    tables = changed if isinstance(changed, dict) else {"prices": changed}
    return "\n".join(f"{json.dumps(key)} = {toml(value)}" for key, value in tables.items()).encode()


def toml(value):
    """``value`` as TOML has it, in one line; what it does not have is not TOML either then."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


def of_words(content, chance):
    """A list or a table as people and schedulers write them: another number, sign or word somewhere."""
    parts = re.split(r"(\d+|[^\w\s])", content.decode())
    place = chance.randrange(len(parts))
    parts[place] = chance.choice(
        ["", "-1", "0", "1-2", "[", "]", ",", "\n", "9" * 9, "9" * 30, "9" * 5000, "0-99999999", "[0-9999][0-9999]",
         "nan", "1e400", "(x999999999)", "\x1b]0;owned\x07", "\0", "x", parts[chance.randrange(len(parts))]]
    )  # fmt: skip
    return "".join(parts).encode()


def of_slot(content, chance):
    step, room, length, _ = struct.unpack_from("<qqqI", content)
    start = struct.calcsize("<qqqI")
    text = of_json(content[start : start + length], chance)[:room]
    head = struct.pack("<qqqI", step, room, len(text), zlib.crc32(text))
    return head + text.ljust(room, b"\0") + content[start + room :]


@dataclass(frozen=True)
class Parsed:
    """Something that is parsed: where it is, how it is changed so that its sums still fit, and who reads it."""

    path: object
    by_meaning: object
    read: object


def message(tmp_path, text, read, by_meaning=of_json):
    """A message, which lies in a file only for this test."""
    path = tmp_path / "message"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return Parsed(path, by_meaning, lambda: read(path.read_bytes()))


def checkpoint(tmp_path):
    root = tmp_path / "checkpoints"
    saves = Checkpoints(root, single_rank_group(), keep=3, say=print)
    tree = {"models": [{"w": torch.arange(6.0).reshape(2, 3), "n": torch.tensor(3)}], "progress": {"epoch": 1}}
    for step in (1, 2):
        told = {"metrics": {"loss": 0.5}, "strategy": ("ddp", 1), "best": {"metric": "loss", "step": 1}}
        saves.save({**tree, **told}, step, {"protected": [1]})
        saves.protect_newest()
    saves.close()
    newest = root / "step-00000002"

    def read():
        outcomes = []
        for one in (verify, CheckpointReader, load_tree):
            try:
                one(newest)
                outcomes.append("")
            except LockstepError as error:
                outcomes.append(str(error))
        # What the cheap look calls damaged, all others do, and what is verified can be loaded.
        assert outcomes[1] in ("", outcomes[0])
        assert bool(outcomes[2]) == bool(outcomes[0])
        listed = rows(root)
        assert [row.step for row in listed] == [2, 1]
        assert listed[0].damaged == outcomes[1]
        assert [fault for _, fault in check(root)] == [outcomes[0], ""]
        told = []
        found = Checkpoints(root, single_rank_group(), keep=3, say=told.append).newest()
        assert found.step == (1 if outcomes[0] else 2)

    return newest, read


def a_manifest(tmp_path):
    newest, read = checkpoint(tmp_path)
    return Parsed(newest / MANIFEST, of_manifest, read)


def a_part(tmp_path):
    newest, read = checkpoint(tmp_path)
    return Parsed(newest / "part-00000.safetensors", of_safetensors, read)


def a_next_step(tmp_path):
    path = tmp_path / NEXT_STEP
    text = json.dumps({"loss": 0.5, "sums": [1, 2]})
    path.write_bytes(b"%08x %b" % (zlib.crc32(text.encode()), text.encode()))
    return Parsed(path, of_line, lambda: read_next_step(tmp_path, LOCAL))


def weights(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3).bfloat16()}, path)
    return Parsed(path, of_safetensors, lambda: [one.whole() for one in read_weights(path).values()])


def an_index(tmp_path):
    weights(tmp_path)
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "model.safetensors"}}))
    return Parsed(path, of_json, lambda: [one.whole() for one in read_weights(path).values()])


def a_slot(tmp_path):
    writer = PartWriter(tmp_path)
    writer.begin(3, {"x": 1}, FlatTree.of({"w": torch.arange(6.0), "n": (1, "a")}))
    writer.close()
    path = next(one for one in sorted(tmp_path.glob("slot-*")) if one.stat().st_size)

    def read():
        if read_part_head(path) is not None:
            with contextlib.suppress(LockstepError):
                load_part(memoryview(bytearray(path.read_bytes())))

    return Parsed(path, of_slot, read)


def a_holder(tmp_path):
    return message(tmp_path, json.dumps(asdict(Holder("n1", 7, "job", 2))), Holder.parse)


def a_search(tmp_path):
    space = Space.of({"x": Float(0, 1), "act": Choice("relu", "tanh")})
    settings = {"trials": 3, "options": {}, "seed": 1, "patience": 2, "min_improvement": 0.01, "repeats": 2}
    SearchPlan(space.to_json(), settings | {"repeat_best": 1, "warm_start": {"old": {"used": 3}}}).write(tmp_path)
    with contextlib.closing(JournalWriter(tmp_path, 0)) as writer:
        for number in range(3):
            point, repeat = (0.25, 1.0), {"repeats": 0, "repeat": 1} if number == 2 else {}
            began = TrialBegan(number, 1, 1, 10.0, params=space.params(point), point=point, operator="random", **repeat)
            writer.append(began)
            writer.append(LossReported(number, 1, 0, 0.5, 11.0))
            writer.append(TrialEnded(number, 1, "done", 12.0, 2.0, losses=(0.5,), violation=0.0, reason="why"))
    (tmp_path / "claims").write_bytes(b"0000000\n0000000\n")

    def read():
        result = load(tmp_path)
        show(result.record)
        json.dumps(result.to_json(), allow_nan=False)

    return read


def a_journal(tmp_path):
    read = a_search(tmp_path)
    return Parsed(journal_file(tmp_path, 0), of_line, read)


def a_search_file(tmp_path):
    read = a_search(tmp_path)
    return Parsed(tmp_path / "search.json", of_json, read)


def planned(tmp_path):
    a_search(tmp_path)
    enqueue(tmp_path, [{"x": 0.5, "act": "tanh"}, {"x": 0.25}])

    def read():
        with contextlib.closing(TrialClaims(tmp_path)) as found:
            assert all(one.params is not None for one in PlannedTrials(tmp_path, found).by_number().values())

    return Parsed(tmp_path / "planned.json", of_json, read)


def warm_start(tmp_path):
    (tmp_path / "old").mkdir()
    a_search(tmp_path / "old")
    space = Space.of({"x": Float(0, 1), "act": Choice("relu", "tanh")})
    WarmStart.begin(tmp_path, space, 1, [str(tmp_path / "old")])

    def read():
        kept = WarmStart.read(tmp_path, space)
        assert all(space.params(one.point) for one in kept.individuals())
        warm_start_lines({"warm_start": kept.told})

    return Parsed(tmp_path / "warm_start.json", of_json, read)


def claims(tmp_path):
    a_search(tmp_path)

    def read():
        with contextlib.closing(TrialClaims(tmp_path)) as found:
            assert all(owner is None or owner >= 0 for owner in found.owners())

    return Parsed(tmp_path / "claims", of_bytes, read)


def a_death(tmp_path):
    Death(2, 1.0, "why", is_of_objective=False).write(tmp_path)
    return Parsed(tmp_path / "death.json", of_json, lambda: Death.read(tmp_path, 3))


def a_status(tmp_path):
    path = tmp_path / "status.json"
    StatusFile(path).write(Status(3, 10, samples_per_s=2.0, loss=0.5, eta_s=3.0, late="rank 1"))

    def read():
        if (status := StatusFile.read(path)) is not None:
            " ".join(status.words().values()).encode()

    return Parsed(path, of_json, read)


def ranks(tmp_path):
    file = RanksFile(tmp_path, 0)
    file.write([RankStatus(0, 3, "data", "train.py:3", 0.5), RankStatus(1, 3, "data", "train.py:3", 0.2)])
    return Parsed(file.path, of_json, lambda: table(RanksFile.read_all(tmp_path)))


def a_run(tmp_path):
    path = tmp_path / "run.json"
    start = {"command": "lockstep run train.py", "subject": "train.py", "job": "", "settings": {"seed": "1"}}
    path.write_text(json.dumps({"format": 1, "starts": [start], "generations": [{"number": 0, "ranks": 2}]}))
    return Parsed(path, of_json, lambda: next_generation(tmp_path))


def metrics(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "epoch": 0, "wall_s": 1.0, "loss": 0.5}\n{"step": 2, "epoch": 0, "loss": null}\n')

    def read():
        file = MetricsFile(path, step=2, say=print)
        file.close()

    return Parsed(
        path, lambda content, chance: b"\n".join(of_json(line, chance) for line in content.split(b"\n") if line), read
    )


def a_heartbeat(tmp_path):
    beat = Heartbeat(0, 7, 3, 1, "data", SourceLine("train.py", 3, "main"), "", False, 1, 0.5, 1.0)
    return message(tmp_path, beat.to_text(), Heartbeat.from_text)


FAILURE = Failure(0, "n1", "ValueError", "no", "train.py", 3, "x", "trace", False, 1.0, 10)


def a_failure(tmp_path):
    return message(tmp_path, FAILURE.to_message(), Failure.from_message)


def places(tmp_path):
    beat = Heartbeat(0, 7, 3, 1, "data", SourceLine("train.py", 3, "main"), "", False, 1, 0.5, 1.0)
    state = {"rank": 0, "beat": beat.to_text(), "seconds": [1.0, 2.0, 3.0], "idle": False, "process": "S"}
    text = json.dumps({"states": [state], "exited": {"1": -9}})
    return message(tmp_path, text, lambda told: RankPlaces.from_text(told.decode(errors="replace"), "n1"))


def a_lease(tmp_path):
    files = LeaseFiles(tmp_path)
    files.claim("node", "n1", "n1:29400")
    return Parsed(files.path / "term-000001", of_json, lambda: isinstance(files.newest(), Lease | None))


def rendezvous(text, *readers):
    """What launchers tell each other: read when it is signed, and refused when it is not."""

    def made(tmp_path):
        signature = Signature(b"of this run").of_launch("coordinator")

        def read(content):
            with pytest.raises(ValueError, match="not signed"):
                signature.text_of("key", content)
            signed = signature.sign("key", content.decode(errors="replace"))
            for reader in readers:
                with contextlib.suppress(ValueError):
                    reader(signature.text_of("key", signed))

        return message(tmp_path, text, read)

    return made


def node_list(tmp_path):
    def read(content):
        text = content.decode(errors="replace")
        for reader in (expand_hosts, expand_counts, leading_host):
            with contextlib.suppress(LockstepError, ValueError):
                assert len(str(reader(text))) < MOST_BYTES
        for name in ("SLURM_JOB_NODELIST", "SLURM_JOB_CPUS_PER_NODE", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"):
            with contextlib.suppress(LockstepError):
                env = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", name: text}
                Slurm().allocation(env, text_of)

    return message(tmp_path, "gpu[01-03,7]-ib,login[1-2,4-5],2(x3),1", read, of_words)


def host_file(scheduler, text, **env):
    """A file in which a scheduler names the nodes of a job."""

    def made(tmp_path):
        path = tmp_path / "hosts"
        path.write_text(text)
        given = {name: str(path) if value is None else value for name, value in env.items()}
        return Parsed(path, of_words, lambda: scheduler.allocation(given, text_of))

    return made


SITE = """
[run]
seed = 3
save_every = "5 min"
[launch]
nproc-per-node = 2
bind = true
prices = {currency = "EUR", A100 = 1.5, V100 = 1}
slurm = {account = "a", time = "1:00:00", gpus = 2, partition = "p"}
[predict.gpus.X100]
tflops = {fp32 = 19.5, bf16 = 312}
memory_gbs = 1555
memory_gib = 40
within = "thin"
between = "thick"
source = "here"
alike = ["x 100"]
[predict.links.thin]
place = "within"
gbs = 100
latency_us = 5
hop_us = 1
error = 0.1
ranks = 8
source = "here"
[predict.links.thick]
place = "between"
gbs = 12
latency_us = 5
hop_us = 1
error = 0.1
ranks = 8
source = "here"
"""


def a_site_file(tmp_path):
    path = tmp_path / FILE
    path.write_text(SITE)

    def read():
        with contextlib.chdir(tmp_path):
            for reader in (
                site_prices,
                lambda: open_catalogue(site_table("predict")).find_gpu("X100"),
                lambda: site_defaults(JOB_SCRIPT_SCHEDULERS["slurm"], project_files({})),
                lambda: resolve_settings({}, {}),
                lambda: file_words("run", run_options()),
            ):
                with contextlib.suppress(LockstepError, ValueError, OSError):
                    reader()

    return Parsed(path, of_toml, read)


TOOK = Timing(0.1, 0.09, 0.12)
STEP = StepProfile(
    "train.py", "NVIDIA A100-SXM4-80GB", "fp32", 32, 32, 1, 30, TOOK, TOOK, TOOK, TOOK, TOOK,
    (GradientReady("g", 4000, 0.05),), 4000, 8000, None,
)  # fmt: skip


def a_profile(tmp_path):
    path = tmp_path / "profile.json"
    write_profile(path, STEP, LinkProfile(2, 1, "gloo", (1024, 65536), (1e-4, 1e-3)))

    def read():
        step, _ = read_profile(path)
        assert step.forward.median_s > 0

    return Parsed(path, of_json, read)


def a_table(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text(
        "gpus_total,throughput_total,gpu,params_M,precision,batch_total\n"
        "1,100,A100,100,FP32,32\n8,700,A100,100,FP32,256\n64,,A100,100,FP32,2048\n"
    )

    def read():
        found, _ = predict_table(read_rows(read_bytes(path).decode("utf-8-sig"))[0], shipped_loss(), CATALOGUE, None)
        rows_table(found)

    return Parsed(path, of_words, read)


CATALOGUE = open_catalogue()

EXIT = RankExit(0, 1, 2.0, failure=FAILURE, log_tail="end", host="n1")
RECORD = record_text(NodeReport("n", "n1", 2, addresses=("10.0.0.1",)), 3, [1])

PLAN = Plan(3, members=(Member("c", "n1", 2, "10.0.0.1", ("10.0.0.1",)),), lost=("b",))
CONTRACT = JobContract("c", "n1", {"lockstep": "1"}, "/r", "new", 0)

PARSED = {
    "manifest": a_manifest,
    "part of a checkpoint": a_part,
    "next step": a_next_step,
    "weights": weights,
    "index of weights": an_index,
    "slot of a mirror": a_slot,
    "holder of a lock": a_holder,
    "journal of a search": a_journal,
    "search.json": a_search_file,
    "claims": claims,
    "enqueued trials": planned,
    "trials of another search": warm_start,
    "death of a worker": a_death,
    "status.json": a_status,
    "places of ranks": ranks,
    "run.json": a_run,
    "metrics.jsonl": metrics,
    "heartbeat": a_heartbeat,
    "error record": a_failure,
    "hang report": places,
    "lease": a_lease,
    "plan": rendezvous(
        Plan(3, members=(Member("c", "n1", 2, "10.0.0.1", ("10.0.0.1",)),), lost=("b",)).to_text(), Plan.from_text
    ),
    "contract": rendezvous(
        JobContract("c", "n1", {"lockstep": "1"}, "/r", "new", 0).to_text(), JobContract.from_text, version_in
    ),
    "node record": rendezvous(RECORD, beat_in, lambda text: UNKNOWN.update(object_from(text), 1.0).view()),
    "notice": rendezvous(notice_to_json(Message("text")), notice_from_json),
    "failure notice": rendezvous(notice_to_json(diagnose([EXIT], ranks=2)), notice_from_json),
    "endings": rendezvous(endings_to_json([EXIT]), endings_from_json),
    "node list": node_list,
    "host file of Grid Engine": host_file(
        GridEngine(), "n1 2 all.q@n1 UNDEFINED\nn2 4 all.q@n2 UNDEFINED\n", JOB_ID="7", PE_HOSTFILE=None
    ),
    "node file of PBS": host_file(Pbs(), "n1\nn1\nn2\n", PBS_JOBID="7", PBS_NODEFILE=None),
    "lockstep.toml": a_site_file,
    "profile": a_profile,
    "table of predict": a_table,
    "measures": lambda tmp_path: message(tmp_path, bytes(1 << 16), journal_in, of_bytes),
}


def change(parsed, times, seed):
    whole = parsed.path.read_bytes()
    parsed.read()
    chance = random.Random(seed)
    tracemalloc.start()
    try:
        for number in range(times):
            content = (parsed.by_meaning if number % 2 else of_bytes)(whole, chance)
            parsed.path.write_bytes(content)
            tracemalloc.reset_peak()
            before, began = tracemalloc.get_traced_memory()[0], time.process_time()
            try:
                # A clear error, of Lockstep's or that it is no such message; anything else fails the test.
                with contextlib.suppress(LockstepError, ValueError):
                    parsed.read()
            except BaseException as error:
                error.add_note(f"mutation {number}: {content[:2000]!r}")
                raise
            lasted = time.process_time() - began
            assert lasted < MOST_S, f"mutation {number} took {lasted:.1f} s: {content[:2000]!r}"
            taken = tracemalloc.get_traced_memory()[1] - before
            assert taken < MOST_BYTES, f"mutation {number} took {taken} bytes: {content[:2000]!r}"
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", PARSED)
def test_what_is_changed_at_random_is_a_clear_error_or_nothing(kind, tmp_path):
    change(PARSED[kind](tmp_path), SLICE, zlib.crc32(kind.encode()))


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", PARSED)
def test_ten_thousand_changes(kind, tmp_path):
    change(PARSED[kind](tmp_path), ALL, random.randrange(1 << 32))


# What stands where a file should be; a link leads to what never ends.
STRANGE_FILES = {
    "pipe": os.mkfifo,
    "directory": Path.mkdir,
    "link to what never ends": lambda path: path.symlink_to("/dev/zero"),
    "terabyte": lambda path: (path.touch(), os.truncate(path, 1 << 40)),
    "nothing": lambda path: None,
}
OF_FILES = [
    kind for kind in PARSED if kind not in ("heartbeat", "error record", "hang report", "node list", "measures")
]


@pytest.mark.parametrize("kind", OF_FILES)
def test_what_is_no_file_or_has_no_end_is_a_clear_error_or_nothing(kind, tmp_path):
    parsed = PARSED[kind](tmp_path)
    if parsed.path.name == "message":
        pytest.skip("no file, but for this test")
    aside = parsed.path.rename(tmp_path / "aside")
    for what, put in STRANGE_FILES.items():
        put(parsed.path)
        tracemalloc.start()
        try:
            with contextlib.suppress(LockstepError, ValueError, OSError):
                parsed.read()
            assert tracemalloc.get_traced_memory()[1] < MOST_BYTES, what
        except BaseException as error:
            error.add_note(what)
            raise
        finally:
            tracemalloc.stop()
        if parsed.path.is_dir():
            parsed.path.rmdir()
        else:
            parsed.path.unlink(missing_ok=True)
    aside.rename(parsed.path)
    parsed.read()


def test_all_that_unpickles_is_here():
    """Only what came from a process of the same job, or from the run's private directory, is unpickled."""
    own = {
        "collectives/object_channel.py",  # of ranks, through gloo, as torch's own object collectives are
        "collectives/gathered_objects.py",  # the same
        "collectives/mailbox.py",  # of ranks, over connections that a secret of theirs has opened
        "doctor/watched.py",  # in the place of torch.load, of a script that calls it
        "launch/launcher.py",  # what ranks of `lockstep.launch` returned, in the run directory
        "verify/plain_script.py",  # the same
        "testing/ranks.py",  # of processes that a test has started, through a pipe
    }
    loads = {"pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load", "np.load", "marshal.loads", "shelve.open"}
    house = Path(lockstep.__file__).parent
    found = {
        path.relative_to(house).as_posix()
        for path in house.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in loads
    }
    assert found == own


def test_all_that_reads_json_is_here():
    """Who reads JSON without `lockstep.records` reads what its own process, or its child, has just written."""
    own = {
        "tune/record/search_directory.py",
        "tune/results/optuna_study.py", "scale/trace_run.py", "scale/scaling_loss.py", "settings.py",
        "checkpoint/model_files.py", "checkpoint/save_thread.py", "checkpoint/next_step.py", "records.py",
        "launch/workers/fork_server.py", "launch/workers/fork_messages.py",
    }  # fmt: skip
    house = Path(lockstep.__file__).parent
    found = {
        path.relative_to(house).as_posix()
        for path in house.rglob("*.py")
        if re.search(r"json\.loads?\b", path.read_text())
    }
    assert found == own
