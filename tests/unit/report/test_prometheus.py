"""What Prometheus is told of runs, and that the dashboard asks for it."""

import json
import re
from pathlib import Path

import pytest

from lockstep.errors import SettingError
from lockstep.report import export_metrics
from lockstep.report.prometheus import RunCollector
from written_runs import write_run

core = pytest.importorskip("prometheus_client")
DASHBOARD = Path(__file__).parents[3] / "examples" / "grafana.json"


def samples(*places):
    return [one for family in RunCollector(places).collect() for one in family.samples]


def test_the_values_are_those_of_the_files(tmp_path):
    run_dir = write_run(tmp_path / "run")
    found = {(one.name, one.labels.get("rank"), one.labels.get("kind")): one.value for one in samples(run_dir)}
    assert found["lockstep_steps", None, None] == 40
    assert found["lockstep_loss", None, None] == 1 / 40
    assert found["lockstep_samples_per_second", None, None] == 120
    assert found["lockstep_running", None, None] == 0
    assert found["lockstep_ranks_alive", None, None] == 0
    assert found["lockstep_rank_wait_ratio", "1", None] == 0.1
    assert found["lockstep_rank_memory_bytes", "0", "host_peak"] == 2 << 30
    assert ("lockstep_left_seconds", None, None) not in found, "what is not known is left out"


def test_runs_of_a_directory_are_found_as_they_come_and_told_apart(tmp_path):
    collector = RunCollector([tmp_path / "here", tmp_path / "there"])
    (tmp_path / "here").mkdir()
    assert not [one for family in collector.collect() for one in family.samples]
    write_run(tmp_path / "here" / "same")
    write_run(tmp_path / "there" / "same")
    write_run(tmp_path / "there" / "other")
    names = {one.labels["run"] for family in collector.collect() for one in family.samples}
    assert names == {str(tmp_path / "here" / "same"), str(tmp_path / "there" / "same"), "other"}


def test_the_dashboard_asks_for_metrics_that_there_are():
    offered = {family.name for family in RunCollector([]).collect()}
    asked = set(re.findall(r"lockstep_\w+", DASHBOARD.read_text()))
    assert asked <= offered
    assert len(asked) > 10
    labels = {label for family in RunCollector([]).collect() for label in family._labelnames}
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel["targets"]:
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= labels


def test_grafana_reads_the_whole_dashboard():
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder")
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    written = json.loads(DASHBOARD.read_text())

    def left(value, read):
        """What of ``value`` is in ``read``: Grafana adds its defaults, and leaves out what it does not know."""
        if isinstance(value, dict):
            return {key: left(value[key], read[key]) for key in value if key in read}
        return [left(*pair) for pair in zip(value, read, strict=True)] if isinstance(value, list) else read

    def as_read(dashboard):
        return left(dashboard, json.loads(encoder.JSONEncoder().encode(Dashboard.from_json(dashboard))))

    assert as_read(written) == written
    assert as_read(written | {"panes": []}) == written


def test_a_text_file_is_one_that_others_parse(tmp_path):
    from prometheus_client.parser import text_string_to_metric_families

    run_dir = write_run(tmp_path / 'a "run"\\n')
    file = tmp_path / "lockstep.prom"
    export_metrics([run_dir], str(file), "", print, once=True)
    parsed = {family.name: family for family in text_string_to_metric_families(file.read_text())}
    assert parsed["lockstep_steps"].samples[0].labels == {"run": 'a "run"\\n'}


@pytest.mark.parametrize("to", ["", "nowhere", "127.0.0.1:", "127.0.0.1:99999", ":-1", "missing/x.prom"])
def test_a_place_that_cannot_be_is_refused(tmp_path, monkeypatch, to):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingError, match="--prometheus"):
        export_metrics([write_run(tmp_path / "run")], to, "", print, once=to.endswith(".prom"))


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(SettingError, match="no run directory"):
        export_metrics([tmp_path], "9400", "", print, once=False)
