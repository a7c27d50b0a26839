"""A page about runs: whatever a run directory holds is shown as text, and secrets are not."""

import html
import json
import math
import re
import sys
from html.parser import HTMLParser

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lockstep.html_report.page
from lockstep.errors import SettingError
from lockstep.html_report import attached_files, list_page, read_run, report_page
from lockstep.html_report.charts import _thinned, metric_charts, run_charts
from lockstep.html_report.page import _filled
from lockstep.html_report.tables import shown
from written_runs import BEGAN_S, write_run

HOSTILE = (
    "<script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    "</pre></details><img src=x onerror=alert(1)>",
    '" onmouseover="alert(1)',
    "<!-- <script>",
    "<a href='javascript:alert(1)'>x</a>",
    "\ud800 $script ${plotly} %{y} \x1b[2J",
)
TAGS = {
    *("html", "head", "meta", "title", "style", "body", "header", "h1", "p", "span", "noscript", "main", "section"),
    *(
        "form",
        "label",
        "select",
        "option",
        "input",
        "h2",
        "h3",
        "div",
        "table",
        "caption",
        "thead",
        "tbody",
        "tr",
        "th",
    ),
    *("td", "details", "summary", "dl", "dt", "dd", "pre", "script", "img"),
}


@pytest.fixture(autouse=True)
def plotly(monkeypatch):
    """A short script in place of plotly's: what is around it is tested here."""
    monkeypatch.setattr(lockstep.html_report.page, "_plotly", lambda: ("cGxvdGx5", "plotly"))


class Elements(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.found, self.text = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, [name for name, _ in attrs]))

    def handle_data(self, data):
        self.text.append(data)


def scripts(page):
    return re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.sampled_from(HOSTILE) | st.text(st.characters(), max_size=30))
def test_what_a_run_says_is_text(tmp_path, said):
    name = "".join(sign for sign in said if sign.isprintable() and sign != "/")[:40] or "x"
    run = read_run(write_run(tmp_path / f"r{name}", said, metric=said if said not in ("step", "wall_s") else "x"))
    other = tmp_path / "bench.json"
    other.write_text(json.dumps({said: [{said: said}], "rows": [{"a": [said], said: {said: None}}]}))
    page = report_page([run], attached_files([run.path], []))
    page.encode()
    elements = Elements(page)
    assert {tag for tag, _ in elements.found} <= TAGS
    assert not [name for _, names in elements.found for name in names if name.startswith("on")]
    assert len(scripts(page)) == 3
    assert "<" not in scripts(page)[0]
    drawn = json.dumps(json.loads(scripts(page)[0]))
    assert "<" not in drawn, "plotly takes some markup in its labels for markup"
    assert "\x1b" not in page


def test_what_a_run_says_is_there(tmp_path):
    said = "<b>bold & 'quoted'</b>"
    text = "".join(Elements(report_page([read_run(write_run(tmp_path / "run", said))])).text)
    assert text.count(said) > 20


def test_what_was_run_has_settings_with_their_sources_and_the_changes_folded(tmp_path):
    run_dir = write_run(tmp_path / "run", "x")
    about = json.loads((run_dir / "run.json").read_text())
    about["starts"][0]["settings"] = {"seed": {"value": 7, "source": "lockstep.toml:3"}}
    about["starts"].append({"command": "an older one", "settings": {"keep": "5"}, "source": {"patch": "../run.json"}})
    (run_dir / "run.json").write_text(json.dumps(about))
    (run_dir / "source.patch").write_text("-    lr = 0.1\n+    lr = 0.2\n" + "x" * (1 << 20))
    page = report_page([read_run(run_dir)])
    rows = [re.sub("<[^>]*>", "|", row).replace("||", "|") for row in re.findall("<tr>.*?</tr>", page)]
    assert "|seed|7|lockstep.toml:3|" in rows
    assert "|keep|5|command line|" in rows
    changes = re.search(r"<details><summary>source\.patch</summary><pre>([^<]*)</pre></details>", page)
    assert changes[1].startswith("-    lr = 0.1\n+    lr = 0.2\n")
    assert changes[1].endswith("... the rest is in source.patch")
    assert page.count("lr = 0.2") == 1


def test_secrets_are_left_out(tmp_path):
    run_dir = write_run(tmp_path / "run", "train.py --api-key hunter2 https://me:hunter2@host --set token=hunter2")
    (run_dir / "verify.json").write_text(json.dumps({"password": "hunter2", "tokens": "512"}))
    about = json.loads((run_dir / "run.json").read_text())
    about["starts"].append(
        {"settings": {"api_token": {"value": "hunter2", "source": "script"}, "auth_token": "hunter2"}}
    )
    (run_dir / "run.json").write_text(json.dumps(about))
    page = report_page([read_run(run_dir)], attached_files([run_dir], []))
    assert "hunter2" not in page
    assert "***" in page
    assert "512" in page


def test_only_the_scripts_of_the_page_may_run(tmp_path):
    page = report_page([read_run(write_run(tmp_path / "run"))])
    allowed = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    assert "default-src 'none'" in allowed
    assert "unsafe-eval" not in allowed
    assert re.search(r"script-src ('sha256-[\w+/=]+' ?){2};", allowed)
    assert not re.search(r'(src|href)="?https?:', page)


def test_numbers_of_charts_do_not_end_their_element():
    page = _filled("x", {"sections": {}, "charts": {"curves": "</script><script>alert(1)</script><!--"}})
    assert len(scripts(page)) == 3


def test_files_that_cannot_be_read_are_left_out(tmp_path):
    run_dir = write_run(tmp_path / "run")
    for name in ("run.json", "metrics.jsonl", "status.json", "ranks-0000.json", "faults.txt", "bench.json"):
        (run_dir / name).write_bytes(b"\xff{[")
    (run_dir / "checkpoints").write_text("no directory")
    run = read_run(run_dir)
    assert run.state == "no step done"
    report_page([run], attached_files([run_dir], []))
    with pytest.raises(SettingError, match=r"bench\.json cannot be shown"):
        attached_files([], [run_dir / "bench.json"])
    with pytest.raises(SettingError, match="no run directory"):
        read_run(tmp_path / "nothing")


def test_values_that_are_nested_deeply_end():
    value = []
    for _ in range(500):
        value = [{"x": value}]
    assert shown(value).endswith("</div>")


def test_curves_are_the_metrics(tmp_path):
    run = read_run(write_run(tmp_path / "run"))
    charts = {chart["title"]: chart for chart in metric_charts([run, run])}
    assert list(charts) == ["steps per second", "loss", "accuracy"]
    first, second = charts["loss"]["lines"]
    assert first == second
    assert first["value"] == [1 / step for step in range(1, 41)]
    assert charts["accuracy"]["lines"][0]["value"][2] is None
    assert set(charts["steps per second"]["lines"][0]["value"]) == {1 / 3}
    kinds = [event["kind"] for event in charts["loss"]["events"]]
    assert kinds.count("generation") == 4
    assert kinds.count("fault") == 2


def test_where_the_time_went(tmp_path):
    run = read_run(write_run(tmp_path / "run"))
    assert pytest.approx(run.metrics[0]["wall_s"]) == BEGAN_S
    first, second = run.generations()
    assert (first.first_s - first.began_s, second.began_s - first.began_s) == pytest.approx((8, 70))
    for before, after in zip(run.generations(), run.generations()[1:], strict=False):
        assert before.began_s <= before.first_s <= before.last_s <= before.ended_s == after.began_s
    assert [chart["title"] for chart in run_charts(run)] == [
        "Where the time went", "How long each rank waited for others", "Memory"
    ]  # fmt: skip


@given(st.lists(st.floats(allow_nan=False), max_size=60).map(lambda some: some * 100))
def test_thinned_curves_keep_their_ends(values):
    points = [(step, float(step), value) for step, value in enumerate(values)]
    kept = list(_thinned(points))
    assert len(kept) <= 2001
    assert kept == sorted(kept)
    assert set(kept) <= set(points)
    if points:
        assert {f(value for _, _, value in kept) for f in (min, max)} == {min(values), max(values)}


def test_a_curve_of_nan_is_drawn_with_gaps():
    kept = list(_thinned([(step, float(step), math.nan) for step in range(10_000)]))
    assert 0 < len(kept) <= 2001


def test_the_list_links_reports(tmp_path):
    for name in ("a", "b/<b>&c"):
        write_run(tmp_path / name)
    (tmp_path / "b/<b>&c/report.html").write_text("")
    page = list_page(tmp_path)
    assert re.findall(r'<a href="([^"]*)">(.*?)</a>', page) == [
        ("./b/%3Cb%3E%26c/report.html", html.escape("b/<b>&c"))
    ]  # fmt: skip
    assert len(scripts(page)) == 3
    with pytest.raises(SettingError, match="no run below"):
        list_page(tmp_path / "b/<b>&c/hangs")


def test_without_plotly_the_error_says_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    lockstep.html_report.page._plotly.cache_clear()
    with pytest.raises(SettingError, match="pip install"):
        report_page([read_run(write_run(tmp_path / "run"))])
