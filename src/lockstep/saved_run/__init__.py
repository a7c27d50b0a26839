"""What a run has saved, looked at from outside: without its script, without ranks, and mostly without torch.

The door. A run is named by its run directory, by its directory of checkpoints, or by one checkpoint in it.
"""

from lockstep.saved_run.export import Exported, export, load
from lockstep.saved_run.listed import Row, check, metrics, prune, rows
from lockstep.saved_run.located import BEST, NEWEST

__all__ = ["BEST", "NEWEST", "Exported", "Row", "check", "export", "load", "metrics", "prune", "rows"]
