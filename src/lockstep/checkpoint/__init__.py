"""Checkpoints that are visible only when whole, and hold nothing of how many ranks wrote them.

The door. What needs torch is loaded when it is first asked for, so that listing and verifying do without.
"""

from typing import TYPE_CHECKING

from lockstep.checkpoint.commit import Committed, list_checkpoints, verify
from lockstep.checkpoint.disk import LOCAL, Disk, LocalDisk
from lockstep.checkpoint.manifest import FORMAT, MANIFEST, Manifest, Piece, Stored
from lockstep.checkpoint.tree import Tree

if TYPE_CHECKING:
    from lockstep.checkpoint.saving import Checkpoints, Outcome, Saved
    from lockstep.checkpoint.tensors import load_tree
else:
    # In the else branch, for a type checker would otherwise take every misspelt name for one that exists.
    import importlib

    def __getattr__(name):  # noqa: ANN001, ANN202 - no type checker looks here
        homes = {"Checkpoints": "saving", "Outcome": "saving", "Saved": "saving", "load_tree": "tensors"}
        if name not in homes:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{homes[name]}"), name)
        globals()[name] = value
        return value


__all__ = [
    "FORMAT",
    "LOCAL",
    "MANIFEST",
    "Checkpoints",
    "Committed",
    "Disk",
    "LocalDisk",
    "Manifest",
    "Outcome",
    "Piece",
    "Saved",
    "Stored",
    "Tree",
    "list_checkpoints",
    "load_tree",
    "verify",
]
