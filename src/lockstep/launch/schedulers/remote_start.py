"""Starts one launcher on each node of an allocation, and hands on to them what this process is asked.

lockstep run ─► srun ─┬─► lockstep run on node 0 ─► ranks          Slurm
                      └─► lockstep run on node 1 ─► ranks

lockstep run ─┬─► lockstep run on node 0 ─► ranks                  Grid Engine
              └─► qrsh ─► lockstep run on node 1 ─► ranks
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from lockstep.errors import LaunchError
from lockstep.launch.child_process import die_with_parent
from lockstep.launch.schedulers.allocation import Start

_TICK_S = 0.1


def spread(starts: Sequence[Start], env: Mapping[str, str], stops: Callable[[], int]) -> int:
    """Carry out ``starts`` and return when all have ended, with the first one's exit code, or else the worst.

    Args:
        starts: the first node's, or all nodes', comes first.
        env: for each of them.
        stops: how often this process was asked to stop. Once: the launchers are asked to save and leave. Twice: they
            are killed.

    Raises:
        LaunchError: if one of the commands cannot be started.
    """
    running: list[subprocess.Popen[bytes]] = []
    try:
        running.extend(_started(start, env) for start in starts)
        told = 0
        while any(each.poll() is None for each in running):
            if stops() > told:
                told = stops()
                for each in running:
                    if each.poll() is None:
                        # srun hands on USR1 and USR2. TERM it keeps to itself and kills its tasks.
                        each.send_signal(signal.SIGUSR1 if told == 1 else signal.SIGTERM)
            time.sleep(_TICK_S)
    finally:
        for each in running:
            if each.poll() is None:
                each.kill()
                each.wait()
    codes = [each.returncode if each.returncode >= 0 else 128 - each.returncode for each in running]
    return codes[0] or max(codes)


def _started(start: Start, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    parent = os.getpid()
    try:
        return subprocess.Popen(
            start.words,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            # A terminal's Ctrl-C is for this process, which hands it on in a way that lets them save.
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509  there are no threads yet
        )
    except OSError as error:
        where = f" on {start.host}" if start.host else ""
        raise LaunchError(
            f"no launcher could be started{where}: {start.words[0]}: {error.strerror}; start it there yourself: {start}"
        ) from error
