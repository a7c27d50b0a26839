"""A directory in this host's memory, in which the survivors of a dead rank save the state of the last finished step.

It exists as long as the launcher of this node, so each generation of ranks finds the states of earlier ones. If the
launcher is killed, the fork server removes it; if both are killed, the next launcher on this host does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from lockstep.errors import SettingError
from lockstep.launch.run_dir.owned_directory import (
    SHARED_MEMORY,
    new_owned_directory,
    remove_left,
    remove_owned_directory,
)
from lockstep.launch_contract import LEFT_STATE, PRIVATE

_PREFIX: Final = f"{PRIVATE}emergency-"


@contextlib.contextmanager
def emergency_memory(run_dir: Path, root: Path = SHARED_MEMORY) -> Iterator[Path]:
    """A new directory that only this user can read: below ``root``, or below ``run_dir`` if that is not possible.

    It is removed at the end. What killed launchers have left in these places is removed at the beginning.

    Raises:
        SettingError: if neither is possible.
    """
    remove_left({root, run_dir})
    try:
        memory, owner = new_owned_directory(root, _PREFIX)
    except OSError:
        try:
            memory, owner = new_owned_directory(run_dir, _PREFIX)
        except OSError as error:
            raise SettingError(
                f"ranks cannot save their last step for a restart: neither {root} nor the run directory takes a new "
                f"directory ({error.strerror})"
            ) from error
    try:
        yield memory
    finally:
        remove_owned_directory(memory, owner)


def has_left_state(memory: Path, generation: int) -> bool:
    """Whether ranks of this ``generation`` on this node have left their state when another one died."""
    return any(memory.glob(f"*-generation-{generation}-*/{LEFT_STATE}"))
