"""Checkpoints that are visible only when whole, and hold nothing of how many ranks wrote them.

The door. What needs torch is loaded when it is first asked for, so that listing and verifying do without.
"""

from typing import TYPE_CHECKING

from lockstep.checkpoint.commit import Committed, list_checkpoints, verify
from lockstep.checkpoint.filesystem import LOCAL, FileSystem, LocalFileSystem
from lockstep.checkpoint.json_state import Tree
from lockstep.checkpoint.manifest import FORMAT, MANIFEST, Manifest, Piece, TensorRecord

if TYPE_CHECKING:
    from lockstep.checkpoint.async_save import Checkpoints, Saved
    from lockstep.checkpoint.save_thread import Outcome
    from lockstep.checkpoint.tensors import load_tree
else:
    # In the else branch, for a type checker would otherwise take every misspelt name for one that exists.
    import importlib

    def __getattr__(name):  # noqa: ANN001, ANN202 - no type checker looks here
        homes = {"Checkpoints": "async_save", "Saved": "async_save", "Outcome": "save_thread", "load_tree": "tensors"}
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
    "FileSystem",
    "LocalFileSystem",
    "Manifest",
    "Outcome",
    "Piece",
    "Saved",
    "TensorRecord",
    "Tree",
    "list_checkpoints",
    "load_tree",
    "verify",
]
