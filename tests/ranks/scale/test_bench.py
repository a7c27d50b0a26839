"""`lockstep bench` as it is typed, on a tiny script, with real ranks."""

import csv
import gzip
import json

import pytest

from lockstep.cli import main
from lockstep.scale import BenchResult, read_profile

SCRIPT = """
import sys, torch, lockstep
from torch import nn

with lockstep.Run(seed=0) as run:
    model = run.model(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    batches = run.loader(torch.linspace(0, 1, 4096).view(512, 8), global_batch=16, micro_batch=4, workers=0)
    for _ in run.epochs(int(sys.argv[1])):
        for x in run.train(batches):
            run.step(model(x).square().mean())
    run.save(model, "model.pt")
    if int(sys.argv[1]) > 1:
        raise SystemExit("it came to its end, where a benchmark has nothing to do")
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.py").write_text(SCRIPT)
    return "tiny.py"


@pytest.mark.campaign
@pytest.mark.timeout(300)  # several starts of real ranks, on a machine that may be busy
def test_a_failing_variant_is_a_row_and_the_others_are_measured(script, tmp_path, capsys):
    (tmp_path / "lockstep.toml").write_text('[prices]\ncurrency = "USD"\ncpu = 0.5\nEPYC = 0.5\n')
    words = [script, "--ranks", "2", "--batch", "32", "1", "--steps", "12", "--rounds", "1", "--out", "out", "--", "3"]
    assert main(["bench", *words]) == 0
    shown, said = capsys.readouterr()
    found = BenchResult.read(tmp_path / "out" / "bench.json")
    good, bad = found.rows
    assert (good.measured.global_batch, good.measured.micro_batch) == (32, 4)
    assert good.measured.steps_per_epoch == 16
    assert good.measured.step_s.low > 0
    assert good.samples_per_s == pytest.approx(32 / good.measured.step_s.median)
    assert found.flops_per_sample == pytest.approx(2 * 3 * (8 * 16 + 16) - 2 * 8 * 16)  # no gradient of the data
    assert "PlanError" in bad.failed
    assert "failed: rank" in shown
    assert "round 1 of 1: ddp x 2, batch 32" in said
    lines = list(csv.DictReader((tmp_path / "out" / "bench.csv").read_text().splitlines()))
    assert [line["batch"] for line in lines] == ["32", "1"]
    assert (tmp_path / "out" / "bench.svg").read_text().startswith("<?xml")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lockstep.toml", "out", "tiny.py"], "something is left"


@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_a_profile_a_trace_and_the_largest_batch(script, tmp_path, capsys):
    """In `make campaign`: each is a few runs."""
    assert main(["bench", script, "--ranks", "2", "--profile", "p.json", "--", "3"]) == 0
    step, link = read_profile(tmp_path / "p.json")
    # Micro-batches of an eighth were measured, too.
    assert step.fixed_samples is not None
    assert (step.global_batch, step.micro_batches, step.steps_per_epoch) == (16, 4, 32)
    assert [gradient.bytes for gradient in step.gradients] == [4, 64, 64, 512]
    assert (link.ranks, len(link.bytes)) == (2, 10)
    words = [script, "--ranks", "2", "--rounds", "1", "--steps", "8", "--trace", "--json", "--out", "out", "--", "3"]
    capsys.readouterr()
    assert main(["bench", *words]) == 0
    shown, said = capsys.readouterr()
    assert json.loads(shown)["schema"] == "lockstep-bench"
    merged = json.loads(gzip.decompress((tmp_path / "out" / "trace.json.gz").read_bytes()))
    names = {event["args"]["name"] for event in merged["traceEvents"] if event.get("name") == "process_name"}
    assert {"rank 0: parts of its steps", "rank 1: parts of its steps"} <= names
    assert any(name.startswith("rank 1: ") and "parts" not in name for name in names)
    assert (tmp_path / "out" / "timeline.svg").exists()
    assert "late in" in said
    # Memory that runs out on one rank: no memory is taken for it.
    (tmp_path / "tiny.py").write_text(
        SCRIPT.replace(
            "        run.step",
            "        if len(x) > 20 and run.rank == 1: raise torch.OutOfMemoryError('CUDA out of memory.')\n"
            "            run.step",
        )
    )
    assert main(["bench", script, "--ranks", "2", "--find", "batch", "--steps", "8", "--", "9"]) == 0
    shown, said = capsys.readouterr()
    assert "batch 32: out of memory" in said
    assert "seen to fit: 20" in shown or "seen to fit: 16" in shown or "seen to fit: 18" in shown


@pytest.mark.timeout(300)
def test_a_training_that_ends_before_it_is_measured_keeps_no_model(script, tmp_path):
    (tmp_path / "model.pt").write_text("a trained one")
    assert main(["bench", script, "--ranks", "1", "--steps", "60", "--rounds", "1", "--out", "out", "--", "1"]) == 0
    assert (tmp_path / "model.pt").read_text() == "a trained one"
    (row,) = BenchResult.read(tmp_path / "out" / "bench.json").rows
    assert row.measured.steps + row.measured.warm_up_steps <= 32


def test_what_cannot_be_measured_is_said_at_once(script, capsys, monkeypatch):
    for words, said in (
        (["--ranks", "1"], "give a script"),
        (["nowhere.py", "--ranks", "1"], "no such file"),
        ([script, "--strategies", "pdd"], "give one of"),
        ([script, "--steps", "0"], "at least 1"),
        ([script, "--set", "nonsense=1"], "no such setting"),
        ([script, "--rank", "1"], "did you mean --ranks"),
        ([script, "--bucket", "-1"], "bucket_mb=-1.0: it must be"),
        ([script, "--precision", "fp8"], "precision='fp8': give one of"),
        ([script, "--set", "seed=-1"], "seed=-1"),
        ([script, "--time-limit", "0"], "--time-limit 0: give seconds above 0"),
        ([script, "--out", script], "is no directory that can be written to"),
        ([script, "--profile", "."], "this is a directory"),
        ([script, "--epochs", "3"], "no such option: --epochs"),
        (["tiny", "--ranks", "1"], "tiny: give a script"),
    ):
        assert main(["bench", *words]) == 2, words
        assert said in capsys.readouterr().err


@pytest.mark.campaign
def test_a_script_that_fails_alone_is_told(script, tmp_path, capsys):
    """In `make campaign`: what fails in a variant is in the suite."""
    (tmp_path / "tiny.py").write_text("import sys; sys.exit('no data here')")
    assert main(["bench", script, "--ranks", "1", "--rounds", "1", "--out", "out"]) == 1
    shown, _ = capsys.readouterr()
    assert "failed:" in shown
    assert "no data here" in shown
