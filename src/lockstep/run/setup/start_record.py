"""What the leader records of a start in ``run.json``: the settings, those of the script among them, and the hardware.

Below a launcher the start stands there already. Without one, as under ``python train.py`` or torchrun, the file is in
the directory of the checkpoints, and the leader writes all of it.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from lockstep.formatting import command_line
from lockstep.launch_contract import RUN_DIR
from lockstep.provenance import hardware, settings_record, surroundings
from lockstep.report import about_run, change_about_run
from lockstep.run.setup.run_context import RunContext
from lockstep.trial_contract import current_trial


def record_start(context: RunContext, env: Mapping[str, str]) -> None:
    """Record with which settings, and on what, this run starts. Collective.

    Only of a script's first run, and of no trial of a search; a file that cannot be written stops no run.
    """
    directory, world, group = context.directory, context.world, context.group
    launched = bool(env.get(RUN_DIR))
    if directory is None or current_trial() is not None or (launched and directory != env[RUN_DIR]):
        return
    nodes: dict[str, Any] = {}
    if world.nodes > 1:
        own = {socket.gethostname(): hardware()} if world.local_rank == 0 else {}
        for told in group.gather_objects(own, "the hardware of each node"):
            nodes |= told
    path = Path(directory)
    if not group.leads or (launched and about_run(path) is None):
        return

    def change(about: dict[str, Any]) -> None:
        if not launched:
            about["starts"].append(_begun(path, group.size))
        start = about["starts"][-1]
        start["settings"] = settings_record(context.resolved)
        start["nodes"] = {**start["nodes"], **nodes}

    with contextlib.suppress(OSError, LookupError, TypeError):  # of a file that somebody has changed
        path.mkdir(parents=True, exist_ok=True)
        change_about_run(path, change)


def _begun(run_dir: Path, ranks: int) -> dict[str, Any]:
    script = getattr(sys.modules["__main__"], "__file__", None)
    return {
        "command": command_line(sys.orig_argv),
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "ranks": ranks,
        **surroundings(Path(script).parent if script else Path.cwd(), run_dir),
    }
