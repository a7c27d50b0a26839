"""That the benchmarks run, not what they measure: in the smallest size each."""

import csv
import errno
import json
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from campaign import GROUPS, KINDS, is_named, plan
from faulty_files import WRITE, FaultyFiles
from hosts import why_not
from lockstep.strategy_kinds import BUILT_IN
from strategies import WAYS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
DEADLINE_S = 600  #: for what takes up to half a minute on an idle machine

pytestmark = pytest.mark.timeout(DEADLINE_S + 20)


def measured(tmp_path, script, *options):
    done = subprocess.run(
        [
            sys.executable,
            str(BENCHMARKS / script),
            *map(str, options),
            "--rounds",
            "1",
            "--json",
            str(tmp_path / "found.json"),
        ],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((tmp_path / "found.json").read_text()), done.stdout


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # by torch's own ZeRO
@pytest.mark.parametrize("script", sorted(path.name for path in BENCHMARKS.glob("*.py")))
def test_what_it_imports_is_there(script):
    """Most benchmarks run in `make campaign` only."""
    runpy.run_path(str(BENCHMARKS / script), run_name="imported")


@pytest.mark.campaign
def test_loop(tmp_path):
    (found,), shown = measured(tmp_path, "loop.py", "--ranks", "2", "--models", "linear")
    assert {"by hand", "lockstep", "lockstep, data in memory"} <= found["loops"].keys()
    assert found["loops"]["by hand"]["ratio"] == 1
    assert "linear, 2 ranks" in shown


@pytest.mark.campaign
def test_exact(tmp_path):
    found, shown = measured(tmp_path, "exact.py", "--ranks", "2", "--millions", "0.01", "--micro", "1", "2")
    assert [row["micro"] for row in found] == [1, 2]
    assert all(row[f"{way}_ms"] > 0 for row in found for way in ("ddp", "exact", "fast"))
    assert len(shown.splitlines()) == 4


@pytest.mark.campaign
def test_data(tmp_path):
    few = ("--images", "640", "--rows", "640", "--workers", "1", "--samples", "1000")
    found, shown = measured(tmp_path, "data.py", *few)
    assert {row["way"] for row in found["images"]} >= {"DataLoader", "run.loader", "run.loader, 8 a step"}
    assert all(row["rate"] > 0 for part in ("images", "tar", "parquet") for row in found[part])
    assert all(row["seconds"] > 0 for row in found["resume"])
    assert [row["samples"] for row in found["order"]] == [1000]
    assert {row["data"] for row in found["stream"]} >= {"by index", "stream", "stride", "shards"}
    assert "samples/s" in shown


@pytest.mark.campaign
def test_price(tmp_path):
    found, shown = measured(tmp_path, "price.py", "--models", "mlp", "--seconds", "0.1")
    seen = found["models"]["mlp"]
    assert list(seen)[:2] == ["plain", "1 rank, an eighth"]
    assert any(name.endswith("ranks, a half") for name in seen)
    assert all(rate > 0 for rates in seen.values() for rate in rates)
    assert len(shown.splitlines()) == 3 + len(seen)


@pytest.mark.campaign
def test_gpu_step(tmp_path):
    """Of sizes that a CPU can do."""
    found, shown = measured(tmp_path, "gpu_step.py", "--models", "gpt2", "--parts", "2", "--steps", "2")
    ways = found["seen"]["gpt2, 2"]
    assert list(ways) == ["plain", "deterministic", "lockstep"]
    assert all(step > 0 for way in ways.values() for step in way["step_s"])
    assert len(shown.splitlines()) == 2 + len(ways) + 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.campaign
def test_gpu_facts(tmp_path):
    found, _ = measured(tmp_path, "gpu_facts.py")
    assert found["rows under AdamW, fused"] == found["rows under SGD, fused"] == "same bits"


@pytest.mark.campaign
def test_gradient_hooks(tmp_path):
    found, _ = measured(tmp_path, "gradient_hooks.py", "--layers", "3")
    assert [(row["parameters"], row["way"]) for row in found] == [(6, "plain"), (6, "ddp"), (6, "hooks")]


@pytest.mark.campaign
def test_compress(tmp_path):
    found, shown = measured(tmp_path, "compress.py", "--models", "transformer", "--ranks", "1", "3")
    assert [row["rank"] for row in found] == [1, 3]
    assert all(row["ratio"] > 0 and set(row["ms"]) == {"torch", "lockstep"} for row in found)
    assert len(shown.splitlines()) == 4


@pytest.mark.campaign
def test_start(tmp_path):
    found, shown = measured(tmp_path, "start.py", "--ranks", "2")
    assert all(seconds > 0 for way in found["2"].values() for seconds in way)
    assert len(shown.splitlines()) == 3


@pytest.mark.campaign
def test_soak(tmp_path):
    (found,), shown = measured(tmp_path, "soak.py", "--steps", "100")
    assert found["warm"].keys() == found["end"].keys()
    assert sum(" rank " in name for name in found["end"]) == 2
    assert len(shown.splitlines()) == 2 + len(found["end"])


@pytest.mark.campaign
def test_goodput(tmp_path):
    few = ("--seconds", "3", "--kill-every", "1", "--every", "none")
    found, shown = measured(tmp_path, "goodput.py", *few)
    assert {row["way"] for row in found} == {"lockstep", "torchrun"}
    assert all(row["undisturbed"][0] > 0 for row in found)
    assert len(shown.splitlines()) == 4


on_hosts = pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts")


@pytest.mark.campaign
@pytest.mark.long
@on_hosts
def test_campaign(tmp_path):
    """A rank is killed, and the store where they meet: no step is made again, nothing is left."""
    few = ("--kinds", "^(SIGSEGV of a rank|kill -9 of the ranks' store)$", "--epochs", "6", "--seed", "1")
    found, shown = measured(tmp_path, "campaign.py", *few)
    assert len(found) == 2
    assert not any(one["left"] or one["again"] for one in found), shown
    assert all(one["named"] and one["bits"] and one["seconds"] for one in found), shown
    assert "| kill -9 of the ranks' store | 1 | 1/1 |" in shown


@pytest.mark.campaign
@on_hosts
def test_strategies(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- measured: ways -->\nold\n<!-- end -->\n<!-- measured: ranks -->\n<!-- end -->\n")
    few = ("--millions", "0.01", "--seconds", "0.1", "--speeds", "1gbit", "--curve", "1", "2", "--page", page)
    (time, _, curve), shown = measured(tmp_path, "strategies.py", *few, "--ways", "zero", "--no-memory")
    ways = {row["way"]: row for row in time["rows"]}
    assert list(ways) == ["none", "ddp", "zero"]
    assert ways["ddp"]["times_ddp"] == ways["none"]["of_alone"] == 1
    assert ways["none"]["sent_bytes"] < 1000  # the kernel may look for neighbours
    # They met over the network, and sent what there was to send.
    assert 1 < ways["ddp"]["sent_bytes"] / ways["ddp"]["formula_bytes"] < 2
    assert "| `zero` |" in page.read_text()
    assert "old" not in page.read_text()
    assert "1gbit, 2 ranks" in shown
    assert all(low <= ways[way]["median_ms"] <= high for way in ways for low, high in [ways[way]["quartiles_ms"]])
    assert [(row["way"], row["ranks"]) for row in curve["rows"]] == [("zero", 1), ("zero", 2)]
    assert curve["rows"][0]["times_fewest"] == 1
    assert curve["rows"][1]["samples_per_s"] > 0
    assert "| strategy | 1 rank | 2 ranks |" in page.read_text()


@pytest.mark.campaign
@on_hosts
def test_servers(tmp_path):
    few = ("--millions", "0.01", "--seconds", "0.1", "--servers", "1", "--workers", "1")
    (found,), _ = measured(tmp_path, "servers.py", *few)
    assert [row["way"] for row in found["rows"]] == [
        "parameter-server:servers=1",
        "parameter-server:servers=1,mode=async",
    ]
    for row in found["rows"]:
        assert 1 < row["server_received_bytes"] / row["server_formula_bytes"] < 2


@pytest.mark.campaign
@on_hosts
def test_links(tmp_path):
    (row,), shown = measured(tmp_path, "links.py", "--ranks", "2", "--speeds", "1gbit", "--megabytes", "0.1")
    assert row["gloo"] > 0 < row["lockstep"]
    assert len(shown.splitlines()) == 2


def group_of(kind):
    return next(name for name, group in GROUPS.items() if kind in group.kinds)


def test_every_fault_that_was_tried_before_is_covered_by_a_kind_or_a_test_or_says_why_not():
    with (BENCHMARKS / "faults_tried.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 259
    for row in rows:
        covers = [one for one in row["covered by"].split("; ") if one]
        assert bool(covers) != bool(row["why not"]), row
        for one in covers:
            path, _, test = one.partition("::")
            assert one in KINDS or f"def {test}(" in (BENCHMARKS.parent / path).read_text(), row


def test_files_fail_and_the_clock_is_wrong_as_a_rule_says(tmp_path):
    files = FaultyFiles(tmp_path / "control")
    if not files.env:
        pytest.skip("no C compiler")
    (tmp_path / "struck").mkdir()
    script = (
        "import os, time\n"
        "for name in ('struck/one', 'spared', 'struck/two'):\n"
        "    with open(name, 'wb', buffering=0) as file:\n"
        "        try:\n"
        "            print(name, file.write(bytes(9)))\n"
        "        except OSError as error:\n"
        "            print(name, error.strerror)\n"
        "print(time.time())"
    )

    def told():
        run = [sys.executable, "-c", script]
        done = subprocess.run(
            run, cwd=tmp_path, env={**os.environ, **files.env}, capture_output=True, text=True, check=True
        )
        *lines, clock = done.stdout.splitlines()
        return lines, float(clock) - time.time()

    files.rule(WRITE, "/struck/", errno.EIO, skip=1, clock_s=86400)
    lines, ahead_s = told()
    assert lines == ["struck/one 9", "spared 9", "struck/two Input/output error"]
    assert ahead_s > 80000
    assert files.hits == 1
    files.rule(WRITE, "/struck/", part=4)
    assert told()[0] == ["struck/one 4", "spared 9", "struck/two 4"]
    files.rule()
    assert told()[0] == ["struck/one 9", "spared 9", "struck/two 9"]


def test_a_plan_of_the_campaign_is_the_seeds_and_has_every_kind_with_those_of_hosts_on_hosts():
    rounds = plan(3, 500, "")
    assert rounds == plan(3, 500, "") != plan(4, 500, "")
    ours = [one for one in rounds if one.manner.way == "lockstep"]
    assert sum(len(one.kinds) for one in ours) >= 500
    here = [group for group in GROUPS.values() if not group.lacks]
    assert {kind for one in ours for kind in one.kinds} == {kind for group in here for kind in group.kinds}
    assert len(KINDS) > 200
    for one in rounds:
        assert one not in ours or all(one.manner.nodes in GROUPS[group_of(kind)].nodes for kind in one.kinds)
        assert one in ours or all(KINDS[kind].beside for kind in one.kinds)


@pytest.mark.parametrize(
    ("says", "said", "named"),
    [
        ("lost node", "lost node n3 (rank 2 of 3)", True),
        ("lost node", "lost node n3 (rank 2 of 3)\nrun failed: rank 0 of 3 hung", False),
        ("run failed: rank 1", "run failed: rank 1 raised\nrun failed: rank 1 raised", True),
        ("run failed: rank 1", "run failed: rank 1 raised\nrun failed: rank 0 raised", False),
        ("run failed: rank 1", "", False),
        ("", "resumed", True),
    ],
)
def test_a_cause_counts_as_named_where_nobody_else_is_accused(says, said, named):
    assert is_named(says, said) == named


def test_all_strategies_are_compared():
    # One takes a model with embeddings, the other GPUs.
    assert {way.spec.partition(":")[0] for way in WAYS} | {"hybrid", "dp"} == set(BUILT_IN)


@pytest.mark.campaign
def test_memory(tmp_path):
    few = ("--millions", "8", "--ranks", "2", "--micro", "1", "--ways", "fsdp", "by-hand-async")
    (row, by_hand), shown = measured(tmp_path, "memory.py", *few)
    for each in (row, by_hand):
        assert 0.95 < each["held"] / each["formula"] < 1.25
    assert row["resume"] < 16, "less than all of the checkpoint"
    assert len(shown.splitlines()) == 3


@pytest.mark.campaign
def test_zero(tmp_path):
    found, shown = measured(tmp_path, "zero.py", "--ranks", "2", "--millions", "0.01")
    held = {row["way"]: row["state_bytes"] for row in found}
    assert held["DDP"] == held["ddp"] == pytest.approx(8, rel=0.01)
    assert held["ZeroRedundancyOptimizer"] == held["zero"] == pytest.approx(4, rel=0.01)
    assert all(row["save_ms"] > 0 for row in found)
    assert len(found) == 4
    assert len(shown.splitlines()) == 2 + len(found)


@pytest.mark.campaign
def test_failures():
    # A hang is not its subject, and on a busy machine ranks do nothing for seconds.
    few = ("--only", "exception in forward", "--hang-after", "100")
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "failures.py"), *few],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = done.stdout.splitlines()
    failure, phase, said, _, left, bits, code = row.split(" | ")
    assert (failure, phase, left, bits, code) == ("exception", "forward", "0", "equal", "0")
    assert said == "rank 1 of 2 raised lockstep.faults.PlannedFault"


@pytest.mark.campaign
def test_tune_speed(tmp_path):
    options = ("--workers", "1", "--evaluations", "40", "--optuna", sys.executable)
    found, shown = measured(tmp_path, "tune_speed.py", *options)
    assert [row["way"] for row in found] == [
        "lockstep",
        "lockstep, each with a Run",
        "Optuna, journal",
        "Optuna, SQLite",
        "Optuna, memory",
    ]
    assert all(rate > 0 for row in found for rate in row["rates"])
    assert "lockstep is faster by" in shown


def test_tune_journal(tmp_path):
    found, shown = measured(tmp_path, "tune_journal.py", "--trials", "20")
    assert found[0].keys() == {"trials", "journal", "read", "first proposal", "a trial", "mebibytes", "summary"}
    assert found[0]["trials"] == 20
    assert "| 20 | 0.0 MiB | " in shown


def test_tune(tmp_path):
    few = (
        "--functions",
        "sphere",
        "step",
        "--ours",
        "evolution",
        "2xpropulate",
        "--evaluations",
        "60",
        "--workers",
        "2",
    )
    found, shown = measured(tmp_path, "tune.py", *few)
    assert found.keys() == {"evolution", "2xpropulate"}
    assert found["evolution"]["step"][0]["60"] < 0
    assert "| evolution | 60 |" in shown
