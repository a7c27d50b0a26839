"""Pages and metrics over HTTP, and pages in a real browser."""

import contextlib
import json
import re
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

import browser
from written_runs import write_run

pytest.importorskip("plotly")
in_browser = pytest.mark.skipif(browser.PROGRAM is None, reason="no Chromium is installed")


@contextlib.contextmanager
def command(*words):
    """The command, and the address that it prints."""
    process = subprocess.Popen([sys.executable, "-m", "lockstep", *words], stdout=subprocess.PIPE, text=True)
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


def status(address, **headers):
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""


def test_a_page_is_served_to_who_knows_its_address_only(tmp_path):
    write_run(tmp_path / "run")
    with command("report", "--watch", str(tmp_path / "run")) as address:
        place, secret = re.fullmatch(r"(http://127\.0\.0\.1:\d+)/([\w-]{32})/", address).groups()
        assert status(address)[0] == 200
        told = json.loads(status(f"{address}news")[1])
        assert told["over"] is True
        assert set(told["charts"]) == {"curves", "run-0"}
        for wrong in ("/", "/news", f"/{secret[:-1]}/", f"/{secret}x/news", f"/{secret}/../{secret}/", f"/{secret}/x"):
            assert status(place + wrong)[0] == 403, wrong


@in_browser
def test_a_page_that_is_served_follows_its_run(tmp_path):
    write_run(tmp_path / "run")
    with command("report", "--watch", str(tmp_path / "run")) as address:
        found, console = browser.document(address)
    assert not console
    assert "The run has ended." in found


def test_metrics_are_given_to_who_bears_the_token(tmp_path):
    pytest.importorskip("prometheus_client")
    write_run(tmp_path / "run")
    (tmp_path / "token").write_text("sesame\n")
    with command("top", "--prometheus", "0", "--token-file", str(tmp_path / "token"), str(tmp_path)) as address:
        assert status(address)[0] == 401
        assert status(address, Authorization="Bearer sesam")[0] == 401
        assert 'lockstep_steps{run="run"} 40.0' in status(address, Authorization="Bearer sesame")[1]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs")
    runs = [str(write_run(place / name, name)) for name in ("<img src=x onerror=alert(1)>", "b" * 60)]
    out = place / "report.html"
    subprocess.run([sys.executable, "-m", "lockstep", "report", "-o", out, *runs], check=True)
    return out


@in_browser
def test_a_page_is_drawn_without_an_error_of_its_scripts(page):
    found, console = browser.document(page.as_uri())
    assert not console
    assert 'data-drawn="true"' in found
    assert found.count('class="plot-container plotly"') == 3 + 2 * 3
    assert "onerror=alert(1)>" not in re.sub(r"<script.*?</script>", "", found, flags=re.DOTALL)
    assert "hare chart" not in re.sub(r"<script.*?</script>", "", found, flags=re.DOTALL), "nothing leaves the page"


@in_browser
@pytest.mark.parametrize("width", [320, 800, 1600])
def test_nothing_reaches_over_the_edge(page, width, tmp_path):
    inner, taken, reaching = json.loads(
        browser.too_wide(page, width, tmp_path).replace("&lt;", "<").replace("&gt;", ">")
    )
    assert inner == width
    assert taken <= width
    assert not reaching


def test_a_search_is_shown_with_its_pictures(tmp_path):
    (tmp_path / "search.py").write_text(
        "import lockstep\nfrom lockstep.tune import Float\n"
        "lockstep.tune(lambda run, params: params['x'] ** 2, {'x': Float(-5, 5)}, trials=4)\n"
    )
    lockstep = [sys.executable, "-m", "lockstep"]
    subprocess.run([*lockstep, "tune", "--run-dir", "search", "search.py"], cwd=tmp_path, check=True)
    subprocess.run([*lockstep, "report", "search"], cwd=tmp_path, check=True)
    page = (tmp_path / "search" / "report.html").read_text()
    assert "<h2>Search in search</h2>" in page
    assert page.count("data:image/svg+xml;base64,") >= 2
    assert page.count(">done</td>") >= 4
