"""What a run tells people and programs: its record, its status, and the view of it on a screen or in a log.

    Run, on the leader                                    lockstep run
       │  MetricsFile.write(..) ─►  metrics.jsonl
       │  StatusFile.write(...) ─►  status file  ─►  StatusFile.read(...)
       └─ alone: View.show(status)                 │      └─ View.show(status), View.line(text of a rank)
                                                   └─ lockstep top: on another terminal, or for Prometheus

Nothing here needs torch, and rich is imported only for a terminal.
"""

from lockstep.report.figure import new_figure, save_svg, write_table
from lockstep.report.metrics_file import MetricsFile, record_row
from lockstep.report.prometheus import export_metrics
from lockstep.report.run_file import about_run, change_about_run
from lockstep.report.status import RanksFile, RankStatus, State, Status, StatusFile, Throughput, epoch_number, lateness
from lockstep.report.top import ended, newest_run, require_run, table, top
from lockstep.report.trackers import LogsValues, TrackerContext, TrackerThread, open_trackers
from lockstep.report.trackers import refuse_unknown as refuse_unknown_trackers
from lockstep.report.views import (
    SilentView,
    View,
    ViewOf,
    choose_view,
    ignoring_write_errors,
    is_notebooks,
    line_interval_s,
    view_on,
)

__all__ = [
    "LogsValues",
    "MetricsFile",
    "RankStatus",
    "RanksFile",
    "SilentView",
    "State",
    "Status",
    "StatusFile",
    "Throughput",
    "TrackerContext",
    "TrackerThread",
    "View",
    "ViewOf",
    "about_run",
    "change_about_run",
    "choose_view",
    "ended",
    "epoch_number",
    "export_metrics",
    "ignoring_write_errors",
    "is_notebooks",
    "lateness",
    "line_interval_s",
    "new_figure",
    "newest_run",
    "open_trackers",
    "record_row",
    "refuse_unknown_trackers",
    "require_run",
    "save_svg",
    "table",
    "top",
    "view_on",
    "write_table",
]
