"""Predictions for a script: scaling, other GPUs, cost, choices, what if; and the command."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from lockstep import cli
from lockstep.cli.predict import predict_options
from lockstep.errors import SettingError
from lockstep.scale import (
    LinkProfile,
    PredictionRequest,
    Prices,
    SimulatedStrategy,
    cheapest_within,
    compared,
    fastest_within,
    open_catalogue,
    parse_system,
    predict,
    shipped_loss,
    side_by_side,
    what_if,
    write_profile,
)
from lockstep.scale.other_device import for_ranks, on_gpu, with_micro_batch
from lockstep.scale.predict import waterfall
from lockstep.scale.profile_script import with_fixed_part
from lockstep.scale.simulator import alone_s
from profiles import profile

CATALOGUE = open_catalogue()
KINDS = "8xA100,8xV100,8xH100,8xH200,8xB200,8xP100,4xT4,8xL40S,8xA10G,8xA100-40GB"


def request(on="8xA100,2x8xH100-ib", **more):
    systems = tuple(parse_system(word, CATALOGUE) for word in on.split(","))
    made = PredictionRequest(
        profile=profile(micro_batches=16, steps_per_epoch=1000, epochs=10),
        systems=systems,
        strategies=(SimulatedStrategy(),),
        catalogue=CATALOGUE,
        prices=Prices({"A100": 2.0, "H100": 5.0}, "EUR"),
        loss=shipped_loss(),
    )
    return replace(made, **more)


def test_doublings_of_each_system_with_cost_and_intervals():
    found, notes = predict(request())
    assert [one.ranks for one in found] == [1, 2, 4, 8, 1, 2, 4, 8, 16]
    assert notes == []
    for one in found:
        assert one.total_low_s <= one.total_s <= one.total_high_s
        assert one.gpu_hours == pytest.approx(one.total_s * one.ranks / 3600)
        assert one.cost == pytest.approx(one.gpu_hours * {"A100": 2.0, "H100": 5.0}[one.gpu])
        assert one.efficiency == pytest.approx(one.speed_up / one.ranks)
        assert one.fits
        assert one.sources
    assert found[0].efficiency == pytest.approx(1)
    assert found[0].step.seconds == pytest.approx(alone_s(request().profile))


@pytest.mark.parametrize("weak", [False, True])
def test_a_waterfall_ends_at_the_speed_up(weak):
    for one in predict(request(weak=weak))[0]:
        steps = waterfall(one)
        assert steps[0] == ("ideal", one.ranks)
        assert sum(change for _, change in steps) == pytest.approx(one.speed_up)


def test_strong_scaling_divides_the_step_and_weak_scaling_multiplies_it():
    step = profile(micro_batches=16)
    assert for_ranks(step, 8, 0.1, weak=True) == step
    assert for_ranks(step, 8, 0.1, weak=False).micro_batches == 2
    assert for_ranks(step, 5, 0.1, weak=False).micro_batches == 4
    smaller = for_ranks(step, 64, 0.1, weak=False)
    assert (smaller.micro_batches, smaller.micro_batch) == (1, 8)
    # A sample of a small micro-batch takes longer.
    assert step.forward.median_s / 4 < smaller.forward.median_s < step.forward.median_s
    found, notes = predict(request("128x8xA100"))
    assert found[-1].ranks == 512
    assert "1024 ranks share a step of 512 samples" in notes[0]


def test_another_gpu_by_roofline():
    step = profile(flops_per_sample=1e12)
    moved = on_gpu(step, CATALOGUE.gpu("V100"), CATALOGUE)
    assert moved.fast.forward.median_s <= moved.likely.forward.median_s <= moved.slow.forward.median_s
    assert moved.slow.forward.median_s == pytest.approx(0.1 * 2039 / 900)
    assert moved.fast.forward.median_s == pytest.approx(0.1 * 19.5 / 15.7)
    assert "roofline" in moved.notes[0]
    assert on_gpu(step, CATALOGUE.gpu("A100"), CATALOGUE).likely is step
    assert with_micro_batch(step, 32, 0.1).forward.median_s == pytest.approx(0.1)


def test_a_small_micro_batch_takes_as_long_as_a_second_size_said():
    step = profile(forward=0.1, backward=0.2)
    halved = with_fixed_part(step, profile(forward=0.03, backward=0.06, micro_batch=4))
    assert with_micro_batch(halved, 4, 0.5).forward.median_s == pytest.approx(0.03)
    once, twice = with_micro_batch(halved, 2, 0.5), with_micro_batch(with_micro_batch(halved, 8, 0.5), 2, 0.5)
    assert once.forward.median_s == pytest.approx(twice.forward.median_s)
    # What was measured says more than published GPUs, and leaves the interval narrower.
    (known,), (unknown,) = (predict(request("32xA100", profile=one, up_to=32))[0][-1:] for one in (halved, step))
    assert known.step.high / known.step.low < unknown.step.high / unknown.step.low


def test_a_measured_link_is_taken_where_it_was_measured():
    slow = LinkProfile(2, 2, "nccl", (1000, 10_000_000), (0.01, 1.0))
    plain, measured = request("2x1xA100,2x1xH100"), request("2x1xA100,2x1xH100", link=slow)
    before, after = (predict(one)[0] for one in (plain, measured))
    assert after[1].step.seconds > 3 * before[1].step.seconds
    assert "measured all-reduce" in " ".join(after[1].sources)
    assert after[3].step.seconds == pytest.approx(before[3].step.seconds)


def test_choices():
    found, _ = predict(request())
    soon = found[-1].total_s * 1.01
    assert cheapest_within(found, soon) is found[-1]
    assert cheapest_within(found, 1.0) is None
    cheapest = min(found, key=lambda one: one.cost)
    assert cheapest_within(found, 1e9) is cheapest
    assert fastest_within(found, 1e9) is found[-1]
    assert fastest_within(found, cheapest.cost * 0.9) is None
    with pytest.raises(SettingError, match="a budget needs prices"):
        fastest_within(predict(request(prices=Prices()))[0], 100)


def test_what_if():
    slow = request("2x8xA100-10gbe")
    base = predict(slow)[0][-1].step
    assert predict(what_if(slow, "link=ib"))[0][-1].step.seconds < base.seconds
    assert predict(what_if(slow, "link=1gbe,bucket=1"))[0][-1].step.seconds > base.seconds
    assert predict(what_if(slow, "strategy=diloco:period=50"))[0][-1].step.seconds < base.seconds
    assert predict(what_if(slow, "batch=64"))[0][-1].step.samples == 2 * base.samples
    assert predict(what_if(slow, "gpu=V100"))[0][-1].gpu == "V100"
    assert predict(what_if(slow, "input=1"))[0][-1].step.samples_per_s == pytest.approx(2, rel=0.2)
    for text, says in {
        "buckt=1": "is none of bucket=",
        "bucket=x": "give a number",
        "reduction=slow": "exact or fast",
    }.items():
        with pytest.raises(SettingError, match=says):
            what_if(slow, text)


def test_what_if_compares_each_system_with_itself():
    before = request("8xA100,2x8xA100-ib,8xH100")
    pairs = side_by_side(before, what_if(before, "gpu=V100"))
    assert [(old.system, new.gpu, new.ranks) for old, new in pairs] == [
        ("8xA100-nvlink3", "V100", 8),
        ("2x8xA100-ib-hdr8", "V100", 16),
        ("8xH100-nvlink4", "V100", 8),
    ]
    changed = side_by_side(before, what_if(before, "strategy=dp"))
    assert [new and new.ranks for _, new in changed] == [8, None, 8]
    assert compared(changed, "strategy=dp")[2] == "  2x8xA100-ib-hdr8: cannot be so"


def test_ranks_are_spread_evenly_over_nodes():
    found, _ = predict(request("2x6xA100"))
    assert [(one.ranks, one.nodes) for one in found] == [(1, 1), (2, 1), (4, 1), (8, 2), (12, 2)]


def test_ten_systems_to_4096_ranks_in_a_second():
    """The aim of one second is for a quiet core; this leaves room for a busy one, and counts CPU time."""
    shipped_loss()
    began = time.process_time()
    found, notes = predict(request(KINDS, weak=True, up_to=4096))
    assert (len(found), notes) == (130, [])
    assert time.process_time() - began < 3


# The command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_profile(tmp_path / "p.json", profile(micro_batches=16, steps_per_epoch=1000, epochs=10))
    (tmp_path / "lockstep.toml").write_text('[prices]\nA100 = 2\nH100 = 5\ncurrency = "EUR"\n')
    return tmp_path


def test_the_command(here, capsys):
    words = "predict --profile p.json --on 8xA100,2x8xH100-ib --deadline 12h --budget 50 --what-if bucket=1"
    assert cli.main([*words.split(), "--picture", "o.svg"]) == 0
    said = capsys.readouterr().out
    assert "EUR" in said.splitlines()[0]
    for part in ("why ", "what if bucket=1", "cheapest within 12h: ", "fastest within 50: ", "note: H100 from A100"):
        assert part in said
    assert "cheapest within 12h: none" not in said
    assert ElementTree.parse(here / "o.svg").getroot().tag.endswith("svg")
    assert (here / "o.csv").read_text().count("\n") == 10
    assert cli.main([*words.split(), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 18
    assert all(row["step_low"] <= row["step_s"] <= row["step_high"] for row in rows)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "say what to predict"),
        ("--profile p.json", "say where: --on"),
        ("--profile nowhere.json --on 8xA100", "--profile nowhere.json"),
        ("--profile p.json --on 8xA1000Z", "GPU"),
        ("--profile p.json --on 8xA100 --deadline soon", "--deadline soon: give a time"),
        ("--profile p.json --on 8xA100 --strategies fsp", "strategy='fsp'"),
        ("--profile p.json --on 8xA100 --anchor 4", "it goes with --table"),
        ("--table nowhere.csv", "--table nowhere.csv"),
        ("--profile p.json --on 8xA100 --picture o.png", "ends in .svg"),
        ("--profile p.json --on 8xA100 --picture nowhere/o.svg", "--picture nowhere/o.svg"),
        ("--profile p.json --on ,", "say where"),
        ("--profile p.json --on 8xA100 --samples -1", "--samples -1: give a number above 0"),
        ("--profile p.json --on 8xA100 --samples 0", "--samples 0: give a number above 0"),
        ("--profile p.json --on 8xA100 --deadline 0h", "--deadline 0h: give a time"),
        ("--profile p.json --on 8xA100 --budget nan", "--budget nan: give a number above 0"),
        ("--profile p.json --on 8xA100 --strategies diloco:period=inf", "give a whole number"),
        ("train.py --on 8xA100 --epochs 3", "options of the script come after --"),
        ("train --on 8xA100", "train: give a script"),
    ],
)
def test_what_it_refuses(here, capsys, words, says):
    assert cli.main(["predict", *words.split()]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        "train.py --on 8xA100 --strategies ddp fsdp -- --epochs 3",
        "--on 8xA100 --strategies ddp fsdp train.py -- --epochs 3",
    ],
)
def test_the_script_stands_anywhere(words):
    parsed, unknown = predict_options().parse_known_args(words.split())
    assert (parsed.script, parsed.on, parsed.strategies) == ("train.py", "8xA100", ["ddp", "fsdp"])
    assert (parsed.args, unknown) == (["--epochs", "3"], [])


@pytest.mark.parametrize(
    ("site", "says"),
    [
        ("prices = 3", "write a table, [prices]"),
        ("[prices]\nA100 = -1", "A100 = -1; give a number"),
        ("[prices", "lockstep.toml: "),
        ("[predict]\nlinks = 1", "[predict.links.NAME]"),
        ('[predict.links.mine]\nplace = "over"', "place, which is"),
        (
            '[predict.gpus.Z1]\ntflops = {fp32 = 1}\nmemory_gbs = 1\nmemory_gib = 1\nwithin = "rope"',
            "'Z1' lacks or misspells 'rope'",
        ),
    ],
)
def test_a_site_file_that_says_nonsense(here, capsys, site, says):
    (here / "lockstep.toml").write_text(site)
    assert cli.main(["predict", "--profile", "p.json", "--on", "8xA100"]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gradients", [1]),
        ("micro_batch", 0),
        ("forward", {"median_s": 0.0, "p10_s": 0.0, "p90_s": 0.0}),
        ("data", {"median_s": "x", "p10_s": 0.0, "p90_s": 0.0}),
    ],
)
def test_a_profile_that_no_measurement_gives(here, capsys, name, value):
    held = json.loads((here / "p.json").read_text())
    held["step"][name] = value
    (here / "p.json").write_text(json.dumps(held))
    assert cli.main(["predict", "--profile", "p.json", "--on", "8xA100"]) == 2
    assert "no whole profile" in capsys.readouterr().err


def test_how_long_a_training_is_that_counts_steps(here, capsys):
    write_profile(here / "p.json", profile(micro_batches=16, training_steps=1000))
    assert cli.main(["predict", "--profile", "p.json", "--on", "8xA100", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows[0]["total_s"] == pytest.approx(1000 * rows[0]["step_s"])
    write_profile(here / "p.json", profile())
    assert cli.main(["predict", "--profile", "p.json", "--on", "8xA100", "--deadline", "1h"]) == 2
    assert "give --samples" in capsys.readouterr().err


def test_no_torch_is_loaded(here):
    code = (
        "import sys; from lockstep import cli; "
        "cli.main('predict --profile p.json --on 8xA100 --json'.split()); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
