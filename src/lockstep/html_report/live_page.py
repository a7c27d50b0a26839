"""A page served to this machine alone while its runs go on; it asks for news by itself."""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Callable
from datetime import datetime
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from lockstep.errors import SettingError
from lockstep.html_report.page import attached_files, content, report_page
from lockstep.html_report.run_record import read_run

_ADDRESS = "127.0.0.1"


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
        written = f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}"
        return json.dumps({**told, "over": over, "written": written}, allow_nan=False)

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
