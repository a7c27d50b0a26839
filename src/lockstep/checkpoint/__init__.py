"""Checkpoints, which are visible only when whole, and do not depend on the number of ranks that wrote them.

Modules that need torch are imported at their first use, so that listing and verifying work without torch.
"""

from typing import TYPE_CHECKING

from lockstep.checkpoint.commit import Committed, expired, list_checkpoints, read_manifest, remove, verify
from lockstep.checkpoint.filesystem import LOCAL, FileSystem
from lockstep.checkpoint.json_state import SavedTree, StateTree, Tree
from lockstep.checkpoint.lock import Holder, lock_root
from lockstep.checkpoint.manifest import FORMAT, MANIFEST, Manifest, Piece, TensorRecord
from lockstep.checkpoint.model_files import (
    SafetensorsWriter,
    SavedModel,
    averaged_state,
    check_writable,
    tensors_file,
    write_beside,
)
from lockstep.checkpoint.next_step import NEXT_STEP
from lockstep.checkpoint.reader import CheckpointReader
from lockstep.checkpoint.safetensors_file import FileTensor

if TYPE_CHECKING:
    from lockstep.checkpoint.async_save import Checkpoints, Saved
    from lockstep.checkpoint.part_file import (
        PartCopies,
        PartHead,
        PartWriter,
        load_part,
        merge_parts,
        read_part_head,
    )
    from lockstep.checkpoint.save_thread import Outcome
    from lockstep.checkpoint.tensors import (
        Tensors,
        content_of,
        in_file,
        load_tree,
        stored_tree,
        tensor_of,
        write_torch_file,
    )
    from lockstep.checkpoint.weights_file import checksum_of_first_rows, read_weights
    from lockstep.checkpoint.whole_save import FlatTree, checksums_in, save_whole
else:
    # In the else branch, since a type checker would otherwise accept every misspelt name.
    import importlib

    def __getattr__(name):  # noqa: ANN001, ANN202 - no type checker looks here
        homes = {"Checkpoints": "async_save", "Saved": "async_save", "Outcome": "save_thread"} | dict.fromkeys(
            ("Tensors", "content_of", "in_file", "load_tree", "stored_tree", "tensor_of", "write_torch_file"), "tensors"
        )
        homes |= dict.fromkeys(("checksum_of_first_rows", "read_weights"), "weights_file")
        homes |= dict.fromkeys(
            ("PartCopies", "PartHead", "PartWriter", "load_part", "merge_parts", "read_part_head"), "part_file"
        )
        homes |= dict.fromkeys(("FlatTree", "checksums_in", "save_whole"), "whole_save")
        if name not in homes:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{homes[name]}"), name)
        globals()[name] = value
        return value


__all__ = [
    "FORMAT",
    "LOCAL",
    "MANIFEST",
    "NEXT_STEP",
    "CheckpointReader",
    "Checkpoints",
    "Committed",
    "FileSystem",
    "FileTensor",
    "FlatTree",
    "Holder",
    "Manifest",
    "Outcome",
    "PartCopies",
    "PartHead",
    "PartWriter",
    "Piece",
    "SafetensorsWriter",
    "Saved",
    "SavedModel",
    "SavedTree",
    "StateTree",
    "TensorRecord",
    "Tensors",
    "Tree",
    "averaged_state",
    "check_writable",
    "checksum_of_first_rows",
    "checksums_in",
    "content_of",
    "expired",
    "in_file",
    "list_checkpoints",
    "load_part",
    "load_tree",
    "lock_root",
    "merge_parts",
    "read_manifest",
    "read_part_head",
    "read_weights",
    "remove",
    "save_whole",
    "stored_tree",
    "tensor_of",
    "tensors_file",
    "verify",
    "write_beside",
    "write_torch_file",
]
