"""What a run tells people and programs: its record, its status, and the view of it on a screen or in a log.

    Run, on the leader                                    lockstep run
       │  Record.write(...)     ─►  metrics.jsonl
       │  StatusFile.write(...) ─►  status file  ─►  StatusFile.read(...)
       └─ alone: View.show(status)                        └─ View.show(status), View.line(text of a rank)

Nothing here needs torch, and rich is imported only for a terminal.
"""

from lockstep.report.pace import Pace
from lockstep.report.ranks import RanksFile, RankStatus, lateness
from lockstep.report.record import Record
from lockstep.report.status import State, Status, StatusFile
from lockstep.report.top import top
from lockstep.report.views import SilentView, View, choose_view
from lockstep.report.words import count, duration, size

__all__ = [
    "Pace",
    "RankStatus",
    "RanksFile",
    "Record",
    "SilentView",
    "State",
    "Status",
    "StatusFile",
    "View",
    "choose_view",
    "count",
    "duration",
    "lateness",
    "size",
    "top",
]
