"""Starts the ranks of a run on this machine, or its part of them on several, and says why they failed.

    Request ─► prepare ─► Job ─► Agent ═► crew ═► nursery ═► ranks
    asked for             checked  │ ║
                                   │ ╚══ table ══ the agents of other nodes, if there are any; council: what all do
                                   └─► screen: the leader's lines, its progress, the true cause

The launcher itself needs no torch: it lives on when whatever torch does goes wrong. Only one of several machines loads
it, for the store where they meet.
"""

from lockstep.launch.launcher import launch, start
from lockstep.launch.request import Function, Module, Nodes, Request, Script
from lockstep.launch.run_directory import check_program
from lockstep.launch.schedulers import JOB_SCRIPT_SCHEDULERS, job_script
from lockstep.launch.schedulers.scheduler import JobCommand, JobRequest
from lockstep.launch.schedulers.script_text import SITE_FILE

__all__ = [
    "JOB_SCRIPT_SCHEDULERS",
    "SITE_FILE",
    "Function",
    "JobCommand",
    "JobRequest",
    "Module",
    "Nodes",
    "Request",
    "Script",
    "check_program",
    "job_script",
    "launch",
    "start",
]
