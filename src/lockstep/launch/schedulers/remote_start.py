"""Starts one launcher on each node of an allocation, and passes requests to stop on to them.

lockstep run ─► srun ─┬─► lockstep run on node 0 ─► ranks          Slurm
└─► lockstep run on node 1 ─► ranks

lockstep run ─┬─► lockstep run on node 0 ─► ranks                  Grid Engine
└─► qrsh ─► lockstep run on node 1 ─► ranks
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from lockstep.errors import LaunchError
from lockstep.launch.host.child_process import die_with_parent
from lockstep.launch.schedulers.scheduler import StartCommand, StopSignals

_TICK_S = 0.1


def run_start_commands(
    commands: Sequence[StartCommand], env: Mapping[str, str], stops: Callable[[], int], stop_signals: StopSignals
) -> int:
    """Carry out ``commands``; returns when all have ended, with the first one's exit code, or else the highest.

    Args:
        commands: the one for the first node, or for all nodes, comes first.
        env: the environment of each of them.
        stops: how often this process was asked to stop. Once: the launchers are asked to save and leave. Twice: they
            are ended.
        stop_signals: what is sent to the commands the first and the second time.

    Raises:
        LaunchError: if one of the commands cannot be started.
    """
    running: list[subprocess.Popen[bytes]] = []
    try:
        running.extend(_started(command, env) for command in commands)
        sent = 0
        while any(each.poll() is None for each in running):
            if stops() > sent:
                sent = stops()
                for each in running:
                    if each.poll() is None:
                        each.send_signal(stop_signals[0 if sent == 1 else 1])
            time.sleep(_TICK_S)
    finally:
        for each in running:
            if each.poll() is None:
                each.kill()
                each.wait()
    codes = [each.returncode if each.returncode >= 0 else 128 - each.returncode for each in running]
    return codes[0] or max(codes)


def _started(command: StartCommand, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    parent = os.getpid()
    try:
        return subprocess.Popen(
            command.argv,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            # A terminal's Ctrl-C is for this process, which hands it on in a way that lets them save.
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509  there are no threads yet
        )
    except OSError as error:
        where = f" on {command.host}" if command.host else ""
        raise LaunchError(
            f"no launcher could be started{where}: {command.argv[0]}: {error.strerror}; "
            f"start it there yourself: {command}"
        ) from error
