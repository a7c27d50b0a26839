"""The whole page: sections of HTML, the numbers of its charts, and the scripts, all in one file.

It is also served to this machine alone while its runs go on, and then asks for news by itself.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from lockstep.errors import SettingError
from lockstep.formatting import duration, plural, size
from lockstep.html_report.charts import Chart, metric_charts, metric_names, run_charts
from lockstep.html_report.run_record import RunRecord, read_run
from lockstep.html_report.tables import block, folded, link, plain_text, shown, table, text
from lockstep.launch_contract import RUN_FILE
from lockstep.records import read_bytes, value_in
from lockstep.report import table as rank_table

#: What other commands write under these names in a run directory or beside it, and what each of them is.
BESIDE = {
    "verify": "Is the script the same however it is run? (lockstep verify)",
    "bench": "How fast it is with other ranks and settings (lockstep bench)",
    "predict": "What it would take elsewhere (lockstep predict)",
    "tune": "Search for hyperparameters (lockstep tune)",
    "doctor": "What is wrong with the machine or the script (lockstep doctor)",
}
REPORT = "report.html"
_ADDRESS = "127.0.0.1"
_CHARTS = '<div class="charts"></div>'
_HERE = Path(__file__).parent


class Attachment(NamedTuple):
    """What is shown beside runs."""

    title: str
    value: Any = None  #: as JSON has it
    pictures: tuple[bytes, ...] = ()  #: SVG


def attached_files(runs: Sequence[Path], others: Sequence[Path]) -> list[Attachment]:
    """The files of other commands in or beside the directories of ``runs``, and ``others``: JSON and SVG.

    Raises:
        SettingError: for one of ``others`` that cannot be read.
    """
    places = dict.fromkeys(place for run in runs for place in (run.absolute(), run.absolute().parent))
    found = []
    for place in places:
        for name in BESIDE:
            with suppress(SettingError):
                found.append(_attachment(place / f"{name}.json"))
    return found + [_attachment(path) for path in others]


def _attachment(path: Path) -> Attachment:
    try:
        content = read_bytes(path)
        if path.suffix == ".svg":
            return Attachment(path.name, pictures=(content,))
        pictures = [read_bytes(path.with_suffix(".svg"))] if path.with_suffix(".svg").is_file() else []
        return Attachment(f"{BESIDE.get(path.stem, 'File')}: {path}", value_in(content), tuple(pictures))
    except (OSError, ValueError) as error:
        raise SettingError(f"{path} cannot be shown: {error}; give JSON or SVG") from None


def report_page(runs: Sequence[RunRecord], attached: Sequence[Attachment] = (), *, live: bool = False) -> str:
    """The page over ``runs``; all of them in each chart. Takes as many bytes as plotly packed, and the numbers.

    Raises:
        SettingError: if plotly is not installed.
    """
    packed, script = _plotly()
    return _filled(
        ", ".join(run.name for run in runs) or "Lockstep",
        content(runs, attached),
        script=script,
        plotly=packed,
        live="true" if live else "",
    )


def content(runs: Sequence[RunRecord], attached: Sequence[Attachment]) -> dict[str, object]:
    """What changes of a page while runs go on: its sections as HTML, and its charts as numbers."""
    sections = {"runs": _overview(runs)} if runs else {}
    charts: dict[str, list[Chart]] = {}
    if runs:
        charts["curves"] = metric_charts(runs)
        sections["curves"] = _curves(runs, len(charts["curves"]))
    for number, run in enumerate(runs):
        charts[f"run-{number}"] = run_charts(run)
        sections[f"run-{number}"] = f"<h2>{text(run.name)}</h2>{_run(run)}"
    for number, one in enumerate(attached):
        pictures = "".join(
            f'<img alt="{text(one.title)}, drawn" src="data:image/svg+xml;base64,{base64.b64encode(svg).decode()}">'
            for svg in one.pictures
        )
        told = "" if one.value is None else folded("as a table", shown(one.value), is_open=not pictures)
        sections[f"file-{number}"] = f"<h2>{text(one.title)}</h2>{pictures}{told}"
    return {"sections": sections, "charts": charts}


def list_page(folder: Path) -> str:
    """A page over all runs below ``folder``, the newest first, each with a link to its report where there is one.

    Raises:
        SettingError: if there is none.
    """
    found = [path.parent for path in folder.rglob(RUN_FILE) if path.is_file()]
    if not found:
        raise SettingError(f"no run below {folder}: no directory there holds a {RUN_FILE}")
    runs = sorted((read_run(path) for path in found), key=lambda run: -run.began_s)
    lines = []
    for run in runs:
        name, report = os.path.relpath(run.path, folder), run.path / REPORT
        address = os.path.relpath(report, folder) if report.is_file() else ""
        lines.append({"run": link(address, name) if address else name, **_line(run)})
    return _filled(f"Runs below {folder}", {"sections": {"runs": f"<h2>Runs</h2>{table(lines)}"}, "charts": {}})


def _line(run: RunRecord) -> dict[str, object]:
    """What one wants to know of each of many runs."""
    status = run.status
    return {
        "state": run.state,
        "step": status.step if status else (run.metrics[-1]["step"] if run.metrics else None),
        "of": status.steps_total if status else None,
        "loss": status.loss if status else None,
        "samples/s": status.samples_per_s if status else None,
        "ranks": status.world_size if status else None,
        "restarts": max(0, len(run.about["generations"]) - 1),
        "faults": len(run.faults),
        "began": _moment(run.began_s),
    }


def _overview(runs: Sequence[RunRecord]) -> str:
    lines = [{"run": run.name, **_line(run)} for run in runs]
    measured = []
    for name in metric_names(runs):
        for run in runs:
            if values := [row[name] for row in run.metrics if name in row]:
                told = {"metric": name, "run": run.name, "first": values[0], "last": values[-1]}
                measured.append({**told, "least": min(values), "greatest": max(values), "records": len(values)})
    return f"<h2>Overview</h2>{table(lines)}{table(measured, 'What was logged') if measured else ''}"


def _curves(runs: Sequence[RunRecord], drawn: int) -> str:
    count = len(metric_names(runs))
    note = "" if drawn > count else f"<p>{plural(drawn, 'chart')}, of {plural(count, 'metric')}.</p>"
    return f"<h2>Curves</h2>{note}{_CHARTS}"


def _run(run: RunRecord) -> str:
    starts = [folded(f"Start {number}: {start.get('command', '')}", _start(start, run.patches), is_open=number == 1)
              for number, start in enumerate(run.about["starts"], 1)]  # fmt: skip
    generations = [
        {
            "generation": one.number,
            "ranks": one.ranks,
            "hosts": one.hosts,
            "began": _moment(one.began_s),
            "first record after": duration(one.first_s - one.began_s),
            "trained": duration(one.last_s - one.first_s),
            "steps": f"{run.step_at(one.began_s):g} to {run.step_at(one.ended_s):g}",
        }
        for one in run.generations()
    ]
    saved = [
        {
            "step": row.step,
            "epoch": row.epoch,
            "saved": _moment(wall_s),
            "size": size(row.size_bytes),
            "written by": f"{row.strategy} on {plural(row.ranks or 0, 'rank')}",
            "metrics": ", ".join(f"{name} {plain_text(value)}" for name, value in row.metrics.items()),
            "": row.damaged or ("best" if row.best else ""),
        }
        for row, wall_s in zip(run.checkpoints, run.saved_at_s, strict=True)
    ]
    status = [] if run.status is None else [folded("status.json", shown(asdict(run.status)))]
    parts: list[tuple[str, Sequence[Any], Callable[[Any], str]]] = [
        ("What was run", [*starts, *status], "".join),
        ("Time, ranks and memory", [_CHARTS], "".join),
        ("Generations", generations, table),
        ("Ranks, as they were last heard", rank_table(run.ranks), lambda lines: block("\n".join(lines))),
        ("Checkpoints", saved, table),
        ("Faults on purpose", [{"at": _moment(one.wall_s), "what": one.what} for one in run.faults], table),
        ("Failures", run.failures, table),
    ]
    told = "".join(f"<h3>{title}</h3>{show(rows)}" for title, rows, show in parts if rows)
    files = "".join(folded(name, block(content)) for name, content in run.texts.items() if content)
    return told + (f"<h3>Hangs and logs</h3>{files}" if files else "")


def _start(start: Mapping[str, object], patches: Mapping[str, str]) -> str:
    """What was run: all that is said of a start, the settings as a table, and the changes that no commit holds."""
    rest, settings, source = dict(start), start.get("settings"), start.get("source")
    told = ""
    if isinstance(settings, dict) and settings:
        del rest["settings"]
        # In records of before sources were noted, the texts of the command line.
        each = {
            name: one if isinstance(one, dict) else {"value": one, "source": "command line"}
            for name, one in settings.items()
        }
        rows = [
            {"setting": name, "value": plain_text(one.get("value"), name), "source": one.get("source")}
            for name, one in each.items()
        ]
        told += folded("settings, and where each comes from", table(rows))
    nodes = start.get("nodes")
    if isinstance(nodes, dict) and nodes:
        del rest["nodes"]
        told += table([{"node": name, **(one if isinstance(one, dict) else {"": one})} for name, one in nodes.items()])
    patch = source.get("patch") if isinstance(source, dict) else None
    if isinstance(patch, str) and patch in patches:
        told += folded(patch, block(patches[patch]))
    return shown(rest) + told


def _filled(title: str, inside: Mapping[str, Any], script: str = "", plotly: str = "", live: str = "") -> str:
    own = (_HERE / "page.js").read_text(encoding="utf-8")
    allowed = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(one.encode()).digest()).decode()}'"
                       for one in (own, script) if one)  # fmt: skip
    sections = "".join(f'<section id="{name}">{told}</section>' for name, told in inside["sections"].items())
    return Template((_HERE / "template.html").read_text(encoding="utf-8")).substitute(
        title=text(title),
        allowed=allowed,
        sections=sections,
        # What is within a script element ends with the next tag that ends one, wherever that stands.
        charts=json.dumps(inside["charts"], allow_nan=False).replace("<", "\\u003c"),
        plotly=plotly,
        live=live,
        script=own,
        written=_now(),
    )


@cache
def _plotly() -> tuple[str, str]:
    """Plotly's script, packed so that a page has two fifths of its bytes, and as it is."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise SettingError("reports are drawn by plotly: pip install 'torch-lockstep[report]', or plotly") from None
    script = str(get_plotlyjs())
    return base64.b64encode(gzip.compress(script.encode(), mtime=0)).decode(), script


def _moment(wall_s: float) -> str:
    return f"{datetime.fromtimestamp(wall_s).astimezone():%Y-%m-%d %H:%M:%S}" if wall_s else "–"


def _now() -> str:
    return f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}"


def serve(runs: list[Path], others: list[Path], port: int, say: Callable[[str], None]) -> None:
    """Serve the page over ``runs`` until this process is interrupted; ``say`` gets its address.

    The address holds a secret, and every request without it is refused, so that other users of the machine and pages
    of other sites cannot read it. Each look at the page reads the files of the runs again.

    Raises:
        SettingError: if there is no run, plotly is missing, or the port is taken.
    """
    secret = secrets.token_urlsafe(24)

    def page() -> str:
        return report_page([read_run(run) for run in runs], attached_files(runs, others), live=True)

    def news() -> str:
        records = [read_run(run) for run in runs]
        told = content(records, attached_files(runs, others))
        over = all(record.is_over for record in records)
        return json.dumps({**told, "over": over, "written": _now()}, allow_nan=False)

    page()  # raises here what would else be an answer
    served = {"": (page, "text/html"), "news": (news, "application/json")}

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            given, _, name = self.path.removeprefix("/").partition("/")
            if not hmac.compare_digest(given.encode(), secret.encode()) or name not in served:
                self.send_error(HTTPStatus.FORBIDDEN)
                return
            make, kind = served[name]
            body = make().encode()
            self.send_response(HTTPStatus.OK)
            for header, value in (
                ("Content-Type", f"{kind}; charset=utf-8"),
                ("Content-Length", str(len(body))),
                ("Cache-Control", "no-store"),
                ("Referrer-Policy", "no-referrer"),
                ("X-Content-Type-Options", "nosniff"),
                ("X-Frame-Options", "DENY"),
            ):
                self.send_header(header, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing: each request holds the secret."""

    try:
        server = ThreadingHTTPServer((_ADDRESS, port), Answer)
    except OSError as error:
        raise SettingError(f"--port {port}: {error.strerror}; leave it out for a free one") from None
    with server:
        say(f"http://{_ADDRESS}:{server.server_port}/{secret}/")
        server.serve_forever()
