"""Where else a run's record goes: TensorBoard, Weights & Biases, MLflow, or an object of the script's.

metrics.jsonl ──► row ──► TrackerThread, one for each tracker ──► its library
                          a queue of bounded length; what fails or hangs is dropped, and reported once;
                          what a disk or a network does not take waits there, and is tried again

The record is what counts: row n is row n in every life of a run, so a tracker that has had n rows gets the ones after.
"""

from lockstep.report.trackers.names import TRACKERS, refuse_unknown
from lockstep.report.trackers.tracker import LogsValues, Row, Tracker, TrackerContext
from lockstep.report.trackers.tracker_thread import TrackerThread, open_trackers

__all__ = [
    "TRACKERS",
    "LogsValues",
    "Row",
    "Tracker",
    "TrackerContext",
    "TrackerThread",
    "open_trackers",
    "refuse_unknown",
]
