"""Predictions for published tables: how good they are, and that nothing in a table stops them."""

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate import BATCHES, DATA, TABLE, counts, nested, traits
from lockstep import cli
from lockstep.errors import DataError
from lockstep.scale import open_catalogue, predict_table, read_rows, shipped_loss
from lockstep.scale.predict_report import errors_of, summarize
from lockstep.scale.published import compare
from lockstep.scale.scaling_loss import ScalingLoss, weighted_quantile
from lockstep.scale.table_prediction import system_of
from required_bandwidth import TABLES, UTILIZATIONS, off, required_gbits

CATALOGUE = open_catalogue()
ROWS, _ = read_rows(TABLE.read_text(encoding="utf-8"))
DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "scale_measured.md").read_text(encoding="utf-8")


def figures(found):
    one = errors_of("", found)
    return one.mean_error, one.median_error, one.tail_error, one.inside


@pytest.fixture(scope="module")
def every():
    return predict_table(ROWS, shipped_loss(), CATALOGUE)[0]


@pytest.fixture(scope="module")
def zero_shot(every):
    return [one for one in every if counts(one)]


def test_each_row_is_predicted_without_its_own_model_and_gpu(zero_shot):
    """The aim: 4.5 % mean, 2.5 % median, 10 % at the 90th percentile, and 85 % of the rows within their intervals."""
    average, middle, tail, inside = figures(zero_shot)
    assert len(zero_shot) > 200
    assert average < 0.046
    assert middle < 0.025
    assert tail < 0.11
    assert inside > 0.85
    # What the page says is what comes out.
    rows, *said = on_the_page("from the fewest GPUs")
    assert rows == len(zero_shot)
    assert said[:4] == pytest.approx([100 * average, 100 * middle, 100 * tail, 100 * inside], abs=0.6)


def test_the_page_names_each_gpu_and_link():
    (known,) = re.findall(r"\| known \|.*?\n\n", (DOCS / "scale.md").read_text(encoding="utf-8"), re.DOTALL)
    named = set(re.findall(r"[\w-]+", known))
    assert {*CATALOGUE.gpus, *CATALOGUE.links} - {"cpu"} <= named


def on_the_page(row):
    """The numbers of a row of a table of the page."""
    (line,) = re.findall(rf"^\| {re.escape(row)} \|(.*)", PAGE, re.MULTILINE)
    return [float(number) for number in re.findall(r"[\d.]+", line)]


@pytest.mark.campaign
def test_nine_of_ten_rows_of_a_source_that_nothing_comes_from_lie_within_their_intervals():
    """Rows, constants and widths of intervals all come from other sources: what a table from elsewhere can expect."""
    single, _ = read_rows(BATCHES.read_text(encoding="utf-8"))
    groups = {one.group: one for one in summarize(nested([*ROWS, *single], 2))}
    # Constants are chosen by a search that rounding may turn elsewhere; coverage moves by some points with them.
    assert 0.87 <= groups["all"].inside <= 0.93
    assert 0.87 <= groups["weak scaling"].inside <= 0.93
    assert all(one.inside > 0.84 and one.median_width < 0.35 for one in groups.values())
    assert groups["all"].mean_error < 0.065
    assert groups["all"].median_error < 0.033
    names = {"all": "other sources", **{name: f"... {name}" for name in groups if name != "all"}}
    for name, one in groups.items():
        said = [100 * one.mean_error, 100 * one.median_error, 100 * one.tail_error, 100 * one.inside]
        assert on_the_page(names[name]) == pytest.approx([one.rows, *said, 100 * one.median_width], abs=0.6)


def test_what_leaves_out_a_source_knows_less(every):
    """The command says both: without the rows of the same model and GPU, and without those of the same source."""
    by_source, _ = predict_table(ROWS, shipped_loss(), CATALOGUE, left_out="source")
    assert [one.row for one in by_source] == [one.row for one in every]
    assert all(0 < one.low < one.predicted < one.high for one in [*by_source, *every])
    assert mean(abs(one.error) for one in by_source) > mean(abs(one.error) for one in every)
    one = errors_of("", by_source)
    assert one.inside > 0.88
    said = [
        100 * one.mean_error,
        100 * one.median_error,
        100 * one.tail_error,
        100 * one.inside,
        100 * one.median_width,
    ]
    assert on_the_page("other sources, constants as shipped") == pytest.approx([one.rows, *said], abs=0.6)


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(0.1, 10)), min_size=1, max_size=20), st.floats(0, 1))
def test_a_quantile_grows_with_its_part_and_is_one_of_the_values_or_between_two(pairs, part):
    values, weights = zip(*pairs, strict=True)
    found = weighted_quantile(values, weights, part)
    assert min(values) <= found <= max(values)
    assert found <= weighted_quantile(values, weights, (1 + part) / 2)


def test_one_measured_row_makes_the_others_better():
    found = [one for one in predict_table(ROWS, shipped_loss(), CATALOGUE, 4)[0] if counts(one)]
    average, middle, _, inside = figures(found)
    assert average < 0.037
    assert middle < 0.018
    assert inside > 0.85
    assert all(one.row.ranks > 4 for one in found)


def test_what_a_row_measured_is_not_what_its_prediction_comes_from():
    """A row's own throughput, changed, changes nothing of what is predicted for it."""

    def predicted(rows):
        return predict_table(rows, shipped_loss(), CATALOGUE)[0]

    rows = [row for row in ROWS if row.model == "ResNet50 v1.5" and row.precision == "TF32"]
    (before,) = predicted(rows)
    (after,) = predicted([replace(row, throughput=3000.0) if row.ranks == 8 else row for row in rows])
    assert after.predicted == before.predicted
    assert (before.row.throughput, after.row.throughput) == (7248, 3000)


def test_what_is_shipped_was_calibrated_on_this_table():
    model = ScalingLoss.read(DATA.read_text(encoding="utf-8"))
    assert model.date
    assert "scaling.csv" in model.origin
    assert len(model.known) == len(traits(ROWS))
    for held, made in zip(model.known, traits(ROWS), strict=True):
        assert (held.model, held.gpu, held.ranks, held.loss) == (made.model, made.gpu, made.ranks, made.loss)
        assert held.simulated == pytest.approx(made.simulated), held
    assert ScalingLoss.read(model.as_json()) == model


def test_the_shape_of_four_and_eight_gpus_over_gloo():
    """DeepLabV3 on V100, 2.90x and 3.61x: the exchange through the memory of the host is what holds it back."""
    from spell import PUBLISHED, speed_up

    for ranks, published in PUBLISHED.items():
        found, step = speed_up(ranks)
        assert found == pytest.approx(published, rel=0.11), ranks
        lost = {part: seconds for part, seconds in step.parts.items() if part in ("communication", "waiting", "fixed")}
        assert max(lost, key=lost.get) == "communication"


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_required_bandwidth_is_that_of_the_papers(table):
    """Within 10 % of the step of their grid that the published value ends."""
    for utilization, published in zip(UTILIZATIONS, table.published, strict=True):
        assert off(required_gbits(table, utilization), published) < 0.1, utilization


# Other tables ------------------------------------------------------------------------------------------------------

COLUMNS = next(csv.reader(io.StringIO(TABLE.read_text(encoding="utf-8"))))
words = st.sampled_from(
    ["", "?", "8x HDR200 IB/node", "25GbE", "PCIe", "NVLink9", "AMP", "H100", "img/s", "0", "-1", "nan", "1e999"]
)


@settings(max_examples=60)
@given(st.lists(st.fixed_dictionaries(dict.fromkeys(COLUMNS, words)), min_size=1, max_size=6), st.data())
def test_no_table_stops_it(entries, data):
    for entry in entries:
        entry["gpus_total"] = data.draw(st.sampled_from(["1", "2", "8", "64", "", "x"]))
        entry["throughput_total"] = data.draw(st.sampled_from(["", "100", "1500.5", "0", "nan"]))
    out = io.StringIO()
    table = csv.DictWriter(out, COLUMNS)
    table.writeheader()
    table.writerows(entries)
    for anchor in (None, 2):
        found, _ = predict_table(read_rows(out.getvalue())[0], shipped_loss(), CATALOGUE, anchor)
        for one in found:
            assert 0 < one.low <= one.predicted <= one.high
            json.dumps(one.as_dict(), allow_nan=False)


def test_two_columns_are_enough_and_what_is_not_known_widens_the_interval(tmp_path, capsys):
    file = tmp_path / "least.csv"
    file.write_text("gpus_total,throughput_total\n1,100\n8,\n")
    assert cli.main(["predict", "--table", str(file), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["measured"] is None
    assert 500 < row["low"] < row["predicted"] < row["high"] < 900
    assert any("not in the catalogue" in note for note in row["notes"])
    known = "gpus_total,throughput_total,gpu,params_M,precision\n1,100,A100,100,FP32\n8,,A100,100,FP32\n"
    file.write_text(known)
    assert cli.main(["predict", "--table", str(file), "--json"]) == 0
    (narrow,) = json.loads(capsys.readouterr().out)
    assert narrow["high"] - narrow["low"] < row["high"] - row["low"]


def test_a_table_without_what_is_needed(tmp_path, capsys):
    file = tmp_path / "other.csv"
    file.write_text("a,b\n1,2\n")
    assert cli.main(["predict", "--table", str(file)]) == 2
    assert "no column gpus_total" in capsys.readouterr().err
    with pytest.raises(DataError):
        read_rows("")


LEAST = "gpus_total,throughput_total,unit,batch_per_gpu,scaling_kind,group,notes"


@pytest.mark.parametrize(
    ("text", "predicted", "says"),
    [
        ("", None, "no column gpus_total"),
        ("gpus_total,throughput_total\n8,100\n", 0, "nothing to predict"),
        ("\ufeffGPUs_Total , throughput_total\r\n1,100\r\n8,700\r\n", 1, ""),
        ("gpus_total;throughput_total\n1;100\n8;700\n", 1, ""),
        ("gpus_total\tthroughput_total\n1\t1,000.5\n8\t7,000\n", 1, ""),
        ("gpus_total;throughput_total\n1;14,8\n8;90,1\n", 0, "line 2: throughput_total '14,8': no number above 0"),
        ("gpus_total,throughput_total\n1,100\n12,1000\n12,1000\n", 2, ""),
        ("gpus_total,throughput_total\n1,100\n2.5,200\n\n8,700,9,9\n", 1, "line 3: gpus_total '2.5' is no number"),
        ("gpus_total,throughput_total,unit\n1,2.5,s/step\n8,3,s/step\n", 0, "'s/step' is a duration"),
        ("gpus_total,throughput_total,unit,group\n1,100,img/s,a\n8,700,tok/s,a\n", 0, "nothing to predict"),
        ("gpus_total,throughput_total,params_M\n1,100,25600000\n8,700,25600000\n", 1, ""),
        ("gpus_total,throughput_total,gpus_per_node,grad_accum\n1,100,0.5,0.1\n8,700,0.5,0.1\n", 1, ""),
        ("gpus_total,throughput_total,nodes,inter_link\n1,100,1,\n16,700,2,0x HDR0\n", 1, ""),
        ('gpus_total,throughput_total\n1,100\n8,"700\n', None, "line 3 of the table"),
    ],
)
def test_mangled_tables_get_words(tmp_path, capsys, text, predicted, says):
    file = tmp_path / "mangled.csv"
    file.write_text(text, encoding="utf-8", newline="")
    code = cli.main(["predict", "--table", str(file), "--json"])
    out, err = capsys.readouterr()
    assert code == (2 if predicted is None else 0 if predicted else 1)
    assert says in err
    if predicted is not None:
        rows = json.loads(out, parse_constant=pytest.fail)
        assert len(rows) == predicted
        assert all(0 < row["low"] <= row["predicted"] <= row["high"] for row in rows)


def test_rows_without_the_anchor_are_named_and_suspect_ones_marked(tmp_path, capsys):
    file = tmp_path / "some.csv"
    lines = [LEAST, "1,100,,,weak,a,", "4,390,,,weak,a,", "8,700,,,weak,a,Suspect: says 900 elsewhere"]
    file.write_text("\n".join([*lines, "1,100,,,weak,b,", "8,700,,,weak,b,"]))
    assert cli.main(["predict", "--table", str(file), "--json", "--anchor", "4"]) == 0
    out, err = capsys.readouterr()
    (row,) = json.loads(out)
    assert (row["line"], row["suspect"]) == (4, True)
    assert any("suspect" in note for note in row["notes"])
    assert "1 row left out, since no row of 4 GPUs is measured of their group and strategy: line 6" in err


def test_a_batch_that_shrinks_within_a_group_counts():
    def predicted(batch, kind):
        table = f"{LEAST}\n1,100,img/s,64,{kind},a,\n8,,img/s,{batch},{kind},a,\n"
        ((one,), _) = predict_table(read_rows(table)[0], shipped_loss(), CATALOGUE)
        return one

    weak, strong, unsaid = predicted(64, "weak"), predicted(8, "strong"), predicted("", "strong")
    assert strong.predicted < 0.75 * weak.predicted
    assert "from a batch of 64 on 1 GPUs" in strong.notes
    assert unsaid.predicted > 0.9 * weak.predicted
    assert unsaid.low < strong.predicted


def test_strong_scaling_from_another_batch(every):
    found = [one for one in every if one.row.strong]
    assert len(found) == 8
    assert mean(one.inside for one in found) >= 0.8
    assert mean(abs(one.error) for one in found) < 0.045
    assert max(abs(one.error) for one in found) < 0.13


def test_the_command_says_how_good_it_is_without_a_model_and_gpu_and_without_a_source(capsys):
    assert cli.main(["predict", "--table", str(TABLE), "--json"]) == 0
    out, err = capsys.readouterr()
    rows = json.loads(out)
    assert all(row["low"] < row["predicted"] < row["high"] for one in rows for row in (one, one["by_source"]))
    known, _, unknown = err.partition("and where all of a row's source is left out:")
    for part in (known, unknown):
        for group in ("all", "weak scaling", "strong scaling", "one node", "several nodes"):
            assert re.search(
                rf"^{group}, \d+ rows .*% mean, .*% median, .*% in intervals \d+% wide", part, re.MULTILINE
            )


def test_links_as_tables_write_them():
    named = {row.between: system_of(row, CATALOGUE)[0].between for row in ROWS if row.nodes > 1}
    assert named["8x HDR200 IB/node"].bytes_per_s == pytest.approx(160e9)
    assert named["4x100Gb IB/node"].bytes_per_s == pytest.approx(40e9)
    assert named["1600Gbps RoCE/node"].bytes_per_s == pytest.approx(160e9)
    assert named["Cray Aries"].name == "aries"
    # GB of memory are no speed.
    assert named["see README section (H100 80GB BF16)"].name == "ib-ndr8"


def test_groups_are_kept_apart_and_a_contradicted_source_is_no_base():
    comparisons, _ = compare(ROWS)
    for one in comparisons:
        assert all(base.ranks < one.row.ranks for base in one.base)
        assert all(base.model == one.row.model and base.precision == one.row.precision for base in one.base)
        assert not any(base.suspect for base in one.base)
