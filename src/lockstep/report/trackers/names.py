"""The trackers that a run knows by name; their libraries are imported when one is opened."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Protocol

from lockstep.errors import SettingError
from lockstep.formatting import did_you_mean
from lockstep.report.trackers.tracker import Tracker, TrackerContext


class NamedTracker(Tracker, Protocol):
    """A tracker with an identity of its own for the run."""

    run_id: str  #: for `TrackerContext.run_id` of the next life; "": it needs none


#: By name: the module beside this one that opens it.
TRACKERS: Mapping[str, str] = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}


def refuse_unknown(track: str) -> list[str]:
    """The names in ``track``, which commas separate.

    Raises:
        SettingError: for a name that is no tracker's.
    """
    names = [name.strip() for name in track.split(",") if name.strip()]
    for name in names:
        if name not in TRACKERS:
            raise SettingError(
                f"track={track!r}: {name} is no tracker; {did_you_mean(name, TRACKERS)} (several: with commas; "
                "in the script also an object with log(values, step))"
            )
    return names


def opener(name: str) -> Callable[[TrackerContext], NamedTracker]:
    """What opens the tracker ``name``; imports its library when it is called."""

    def open_named(context: TrackerContext) -> NamedTracker:
        module = importlib.import_module(f"{__package__}.{TRACKERS[name]}")
        tracker: NamedTracker = module.open_tracker(context)
        return tracker

    return open_named
