"""Metrics of runs for Prometheus, from the small files that their launchers keep: nothing changes in a run.

status.json, ranks-*.json of each run ─► `RunCollector` ─► a page that Prometheus scrapes, or a text file of
node_exporter
"""

from __future__ import annotations

import hmac
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, Final

from lockstep.errors import SettingError
from lockstep.formatting import harmless
from lockstep.launch_contract import RUN_FILE
from lockstep.report.status import RanksFile, StatusFile
from lockstep.report.top import ended, require_run

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

_WRITE_EVERY_S = 5.0  # a text file; node_exporter is asked about every 15 s
_HEARD_S = 10.0  # a rank that was heard before that is alive
#: Each metric of a run: what it is, and the field of `Status` that it is, if it is one.
_OF_RUN: Final = {
    "lockstep_steps": ("optimizer steps done", "step"),
    "lockstep_steps_planned": ("optimizer steps of the whole run", "steps_total"),
    "lockstep_epoch": ("epochs done", "epoch"),
    "lockstep_samples_per_second": ("samples per second, over all ranks", "samples_per_s"),
    "lockstep_loss": ("loss of the leader's last micro-batch, or the mean of the last pass", "loss"),
    "lockstep_left_seconds": ("seconds until the run is done", "eta_s"),
    "lockstep_job_left_seconds": ("seconds until the run must stop for the end of its job", "job_left_s"),
    "lockstep_saved_step": ("step of the newest whole checkpoint", "last_saved_step"),
    "lockstep_restarts": ("worlds that the run had before this one", "generation"),
    "lockstep_ranks": ("ranks of the world", "world_size"),
    "lockstep_ranks_alive": ("ranks that were heard in the last ten seconds", ""),
    "lockstep_running": ("1 while a launcher works on the run", ""),
    "lockstep_status_age_seconds": ("seconds since the run has said where it is", ""),
}
#: Each metric of a rank: what it is, and where in `RankStatus` it is.
_OF_RANK: Final = {
    "lockstep_rank_steps": ("optimizer steps done, as the rank counts them", "step"),
    "lockstep_rank_wait_ratio": ("part of its last seconds in which the rank waited for others", "waits"),
    "lockstep_rank_silent_seconds": ("seconds for which the rank had not been heard", "silent_s"),
}


class RunCollector:
    """What `prometheus_client` asks for the metrics of runs; each time it reads their files.

    Args:
        places: run directories, or directories of those; runs that begin there later are found, too.
    """

    def __init__(self, places: Sequence[Path]) -> None:
        self._places = places

    def collect(self) -> Iterable[Any]:
        """The metrics, in Prometheus' own types; of a run that cannot be read none."""
        from prometheus_client.core import GaugeMetricFamily

        of_run = {name: GaugeMetricFamily(name, what, labels=["run"]) for name, (what, _) in _OF_RUN.items()}
        of_run["lockstep_state"] = GaugeMetricFamily(
            "lockstep_state", "1 for what the run does", labels=["run", "state"]
        )
        labels = ["run", "rank"]
        of_rank = {name: GaugeMetricFamily(name, what, labels=labels) for name, (what, _) in _OF_RANK.items()}
        of_rank["lockstep_rank_memory_bytes"] = GaugeMetricFamily(
            "lockstep_rank_memory_bytes", "memory of the rank's host and device", labels=[*labels, "kind"]
        )
        for run_dir, run in self._runs():
            for name, words, value in self._samples(run_dir):
                (of_run if name in of_run else of_rank)[name].add_metric([run, *words], value)
        return [*of_run.values(), *of_rank.values()]

    def _runs(self) -> Iterator[tuple[Path, str]]:
        """Each run once, with what it is called: its directory's name, and what is before it where two share that."""
        found = dict.fromkeys(
            path.parent.absolute()
            for place in self._places
            for path in ([place / RUN_FILE] if (place / RUN_FILE).exists() else sorted(place.glob(f"*/{RUN_FILE}")))
        )
        names = [path.name for path in found]
        for path in found:
            yield path, harmless(path.name if names.count(path.name) == 1 else str(path))

    def _samples(self, run_dir: Path) -> Iterator[tuple[str, list[str], float]]:
        status, ranks = StatusFile.read(run_dir / "status.json"), RanksFile.read_all(run_dir)
        running = not ended(run_dir)
        silent_s = self._age_s(run_dir.glob("ranks-*.json"))
        alive = sum(one.silent_s + silent_s < _HEARD_S for one in ranks) if running else 0
        known: dict[str, float | None] = {"lockstep_running": running, "lockstep_ranks_alive": alive}
        if status is not None:
            known |= {name: getattr(status, field) for name, (_, field) in _OF_RUN.items() if field}
            known["lockstep_status_age_seconds"] = self._age_s([run_dir / "status.json"])
            yield "lockstep_state", [status.state], 1
        yield from ((name, [], float(value)) for name, value in known.items() if value is not None)
        for one in ranks:
            rank = str(one.rank)
            told = {name: getattr(one, field) for name, (_, field) in _OF_RANK.items()}
            yield from ((name, [rank], float(value)) for name, value in told.items() if value is not None)
            for kind, held in one.memory.values().items():
                if held is not None:
                    yield "lockstep_rank_memory_bytes", [rank, kind], float(held)

    def _age_s(self, files: Iterable[Path]) -> float:
        """Since the newest of ``files`` was written; infinite if there is none."""
        return time.time() - max((_written_s(path) for path in files), default=float("-inf"))


def _written_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # replaced just now
        return float("-inf")


def export_metrics(places: Sequence[Path], to: str, token: str, say: Callable[[str], None], *, once: bool) -> None:
    """Offer the metrics of the runs in ``places`` until this process is interrupted.

    Args:
        places: as those of `RunCollector`.
        to: ``HOST:PORT``, or ``PORT`` of this machine alone, where Prometheus asks; or ``FILE.prom``, which is written
            whole every five seconds, for the text files that node_exporter reads.
        token: what each request must bear; "" for none.
        say: gets the address.
        once: write the file once and return.

    Raises:
        SettingError: if it cannot be served or written there, or `prometheus_client` is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry, make_wsgi_app, write_to_textfile
    except ImportError:
        raise SettingError(
            "metrics for Prometheus need its package: pip install 'torch-lockstep[prometheus]', or prometheus-client"
        ) from None
    for place in places:
        if not any(place.glob(f"*/{RUN_FILE}")):
            require_run(place)
    registry = CollectorRegistry()
    registry.register(RunCollector(places))
    if to.endswith(".prom"):
        while True:
            try:
                write_to_textfile(to, registry)
            except OSError as error:
                raise SettingError(
                    f"--prometheus {to} cannot be written: {error.strerror}; give another file"
                ) from None
            if once:
                return
            time.sleep(_WRITE_EVERY_S)
    host, _, port = to.rpartition(":")
    if not port.isdecimal() or int(port) >= 1 << 16 or once:
        raise SettingError(f"--prometheus {to}: give HOST:PORT, or FILE.prom, which --once writes once")
    answer = make_wsgi_app(registry)

    def guarded(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        given = environ.get("HTTP_AUTHORIZATION", "")
        if token and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer")])
            return []
        found: Iterable[bytes] = answer(environ, start_response)
        return found

    try:
        server = _server(host.strip("[]") or "127.0.0.1", int(port), guarded)
    except OSError as error:
        raise SettingError(f"--prometheus {to}: {error.strerror}; give another address or port") from None
    with server:
        say(f"http://{host or '127.0.0.1'}:{server.server_port}/metrics")
        server.serve_forever()


def _server(address: str, port: int, application: Callable[..., Any]) -> WSGIServer:
    """One that answers several at a time, so that one who keeps a connection open keeps out nobody."""
    # Late, for a run itself does without it.
    from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

    class Server(ThreadingMixIn, WSGIServer):
        daemon_threads = True
        address_family = socket.AF_INET6 if ":" in address else socket.AF_INET

    class Quiet(WSGIRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Say nothing: a request comes every few seconds."""

    return make_server(address, port, application, Server, Quiet)
