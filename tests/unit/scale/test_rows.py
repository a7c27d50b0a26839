"""From durations to rows, tables, files and what they say."""

import csv
import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.cpu_use import CpuUse, busy_s
from lockstep.errors import DataError, SettingError
from lockstep.scale import BenchResult, open_catalogue, read_profile, table, write_profile
from lockstep.scale.bench_report import WIDTH, curves, write_csv
from lockstep.scale.bench_result import (
    BenchMachine,
    BenchRow,
    Measured,
    Prices,
    RoundSeen,
    measured,
    most_worthwhile,
    reference_of,
    with_reference,
    with_times,
)
from lockstep.scale.measured_run import Records
from lockstep.scale.memory_need import memory_need, memory_table
from lockstep.scale.profile_script import link_profile, step_profile
from lockstep.scale.steady_state import MedianInterval
from lockstep.scale.sweep import Variant
from lockstep.step_record import GradientTime
from records import record_of, step_of

QUIET = CpuUse(2, 1.0, 0.0)


def seen_of(*steps, ranks=2, use=QUIET):
    return RoundSeen(Records(tuple(record_of(rank, steps, ranks) for rank in range(ranks))), use)


def row_of(ranks, step_s, strategy="ddp", batch=None, failed="", **more):
    if failed:
        return BenchRow(Variant(strategy, ranks, batch), None, failed=failed)
    parts = dict.fromkeys(("data", "forward", "backward", "exposed", "optimizer", "other"), step_s / 6)
    found = Measured(
        32, 8, MedianInterval(step_s, step_s, step_s), parts, 300_000_000, 20, 2, True, 0.0, 10, 2, 0.0, False
    )
    return with_times(BenchRow(Variant(strategy, ranks, batch), found, **more), 2.0)


def result_of(rows):
    machine = BenchMachine("a", "Some CPU", False, 2, {"torch": "2.13"})
    return BenchResult("train.py", machine, "strong", 3, 30, tuple(rows), "USD")


def test_warm_up_starts_of_passes_and_short_steps_do_not_count():
    usual = [step_of(number) for number in range(3, 23)]
    odd = [step_of(23, forward=5.0, begins_pass=True), step_of(24, forward=5.0, samples=7)]
    slow = [step_of(number, forward=0.5) for number in range(3)]
    found = measured([seen_of(*slow, *usual, *odd)])
    assert found.step_s.median == pytest.approx(usual[0].total_s)
    assert (found.warm_up_steps, found.steps, found.steady) == (3, 20, True)
    assert sum(found.parts_s.values()) == pytest.approx(usual[0].total_s)
    assert found.first_step_s == pytest.approx(5.0 - 0.004)
    assert measured([seen_of(step_of(0), step_of(1, begins_pass=True))]) is None


def test_an_epoch_is_its_steps_and_what_its_first_one_takes_longer():
    row = with_times(BenchRow(Variant("ddp", 4), measured([seen_of(*map(step_of, range(20)))])), 3.0)
    assert row.epoch_s == pytest.approx(10 * step_of().total_s)
    assert row.gpu_hours == pytest.approx(row.epoch_s * 4 / 3600)
    assert row.cost == pytest.approx(3 * row.gpu_hours)
    assert row.samples_per_s == pytest.approx(32 / step_of().total_s)


@given(st.dictionaries(st.integers(1, 64), st.floats(0.001, 10.0), min_size=1), st.floats(0.1, 10.0))
def test_speed_up_is_that_over_the_fewest_ranks_whatever_the_unit(steps, unit):
    rows = with_reference([row_of(ranks, seconds) for ranks, seconds in steps.items()])
    least = min(steps)
    for row in rows:
        ranks = row.variant.ranks
        assert row.speed_up == pytest.approx(steps[least] / steps[ranks])
        assert row.efficiency == pytest.approx(row.speed_up * least / ranks)
    scaled = with_reference([row_of(ranks, unit * seconds) for ranks, seconds in steps.items()])
    assert [r.efficiency for r in scaled] == pytest.approx([r.efficiency for r in rows])


def test_ddp_is_the_reference_and_batches_are_not_compared():
    rows = [row_of(1, 1.0, "dp"), row_of(1, 2.0, "ddp"), row_of(2, 1.0, "ddp", batch=64), row_of(2, 1.0, failed="no")]
    assert reference_of(rows[0], rows).variant.strategy == "ddp"
    assert reference_of(rows[2], rows) is rows[2]
    assert with_reference(rows)[3] == rows[3]


def test_ranks_that_add_less_than_half_are_not_worth_it():
    spell = {1: 1978, 4: 681, 8: 548}  # seconds of the Spell benchmark's twenty epochs under DDP
    rows = [row_of(ranks, seconds) for ranks, seconds in spell.items()]
    assert most_worthwhile(rows).variant.ranks == 4
    assert most_worthwhile([row_of(n, 1 / n) for n in (1, 2, 4)]).variant.ranks == 4
    assert most_worthwhile([]) is None


NAMES = st.sampled_from(["ddp", "fsdp", "ddp:compress=powersgd,rank=4,start=100"])


@given(
    st.lists(
        st.builds(
            row_of,
            st.integers(1, 4096),
            st.floats(1e-6, 1e5),
            NAMES,
            st.none() | st.integers(1, 10**7),
            st.text("ab ", max_size=300),
            oversubscribed=st.booleans(),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_no_line_of_a_table_is_wider_than_a_terminal(rows):
    shown = table(result_of(with_reference(rows)))
    assert max(map(len, shown.splitlines())) <= WIDTH, shown


def test_a_table_says_what_failed_and_what_is_no_measurement_of_scaling(tmp_path):
    result = result_of(
        with_reference([row_of(1, 1.0), row_of(8, 0.5, oversubscribed=True), row_of(16, 1, failed="OOM")])
    )
    shown = table(result)
    assert "failed: OOM" in shown
    assert "ddp x 8*" in shown
    assert "* more threads than the 2 cores" in shown
    result.write(tmp_path / "bench.json")
    assert BenchResult.read(tmp_path / "bench.json") == result
    write_csv(result, tmp_path / "bench.csv")
    lines = list(csv.DictReader((tmp_path / "bench.csv").read_text().splitlines()))
    assert [line["ranks"] for line in lines] == ["1", "8", "16"]
    assert float(lines[1]["speed_up"]) == 2
    (tmp_path / "other.json").write_text('{"schema": "lockstep-bench", "version": 99}')
    with pytest.raises(DataError, match="version"):
        BenchResult.read(tmp_path / "other.json")


def test_rows_that_differ_in_ranks_only_are_one_curve():
    found = curves([row_of(4, 1.0), row_of(1, 1.0), row_of(2, 1.0, batch=64)])
    assert {name: [r.variant.ranks for r in own] for name, own in found.items()} == {
        "ddp": [1, 4],
        "ddp, batch 64": [2],
    }


def test_a_price_is_found_by_the_name_of_the_device():
    prices = Prices({"v100": 3.0, "V100-SXM3": 4.0}, "USD")
    assert prices.of("Tesla V100-SXM3-32GB") == 4
    assert prices.of("Tesla V100-PCIE") == 3
    assert prices.of("Some CPU") is None


def test_others_on_the_machine_are_seen(tmp_path):
    stat = tmp_path / "stat"
    stat.write_text("cpu 9 9 9 9\ncpu0 100 0 50 999 7 0 10 0 0 0\ncpu1 5 5 5 5 5 5 5 5 5 5\nintr 7\n")
    assert busy_s([0], stat) * 100 == 160
    assert busy_s([1], stat) * 100 == 30
    assert busy_s([0], tmp_path / "none") == 0
    assert CpuUse(2, 1.0, 1.0).disturbed
    assert not CpuUse(2, 2.0, 0.1).disturbed
    assert not CpuUse(64, 2.0, 20.0).disturbed


# ---- profiles -----------------------------------------------------------------------------------------------------


def test_a_profile_is_what_one_rank_saw_and_its_file_holds_all_of_it(tmp_path):
    gradients = (GradientTime("b", 40, 0.001), GradientTime("a", 400, 0.002))
    slow = [step_of(number, forward=0.5) for number in range(3)]
    records = Records(
        (record_of(0, [*slow, *map(step_of, range(3, 23))], 1, gradients=gradients, flops_per_sample=1e6),)
    )
    step = step_profile("dir/train.py", records)
    assert (step.script, step.micro_batches, step.steps) == ("train.py", 4, 20)
    assert step.forward.median_s == pytest.approx(0.004)
    assert [gradient.name for gradient in step.gradients] == ["b", "a"]
    assert step.peak_bytes is None
    link = link_profile(
        Records((record_of(0, [step_of()], sums=((4096, 1e-4), (8192, 2e-4))), record_of(1, [step_of()])))
    )
    assert (link.bytes, link.nodes) == ((4096, 8192), 1)
    for each in (None, link):
        write_profile(tmp_path / "profile.json", step, each)
        assert read_profile(tmp_path / "profile.json") == (step, each)


@pytest.mark.parametrize("text", ["{}", "[1]", "nothing", '{"schema": "lockstep-profile", "version": 7}'])
def test_what_is_no_profile_is_said_to_be_none(tmp_path, text):
    (tmp_path / "profile.json").write_text(text)
    with pytest.raises(DataError, match=r"measure|profile"):
        read_profile(tmp_path / "profile.json")


# ---- memory -------------------------------------------------------------------------------------------------------


@given(st.integers(1, 64), st.integers(1, 4096))
def test_what_is_divided_needs_less_and_a_batch_that_fits_fits(ranks, memory_mb):
    needs = {name: memory_need(record_of(), name, ranks) for name in ("ddp", "zero", "fsdp")}
    assert needs["fsdp"].gradients <= needs["zero"].gradients == needs["ddp"].gradients == 4_000_000
    assert needs["zero"].optimizer == pytest.approx(8_000_000 / ranks)
    assert needs["fsdp"].parameters + needs["fsdp"].gathered <= 4_000_000 * (1 + 1e-9)
    for need in needs.values():
        most = need.largest_micro_batch(memory_mb * 2**20)
        assert not most or need.total(most) <= memory_mb * 2**20
        assert need.total(8) - need.total(0) == pytest.approx(80_000)


def test_the_memory_table_names_gpus():
    lines = memory_table(record_of(), ["ddp", "fsdp"], [8], open_catalogue())
    assert any(line.startswith("V100") for line in lines)
    assert max(map(len, lines)) <= WIDTH
    with pytest.raises(SettingError, match="no formula"):
        memory_need(record_of(), "pipeline", 2)
    with pytest.raises(SettingError, match="fsdp:tensor=2"):
        memory_need(record_of(), "fsdp:tensor=2", 2)


def test_every_field_of_a_row_is_in_the_documented_schema():
    page = (Path(__file__).parents[3] / "docs" / "bench.md").read_text()
    for kind in (BenchResult, BenchRow, Measured, Variant, MedianInterval, BenchMachine):
        for field in dataclasses.fields(kind):
            assert f"`{field.name}`" in page, f"docs/bench.md does not explain {kind.__name__}.{field.name}"
