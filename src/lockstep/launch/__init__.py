"""Starts the ranks of a run on this machine, or its part of them on several, and says why they failed.

    Request ─► prepare ─► Job ─► Agent ═► WorkerGroup ═► fork server ═► ranks
    asked for             checked  │ ║
                                   │ ╚══ rendezvous: the agents of other nodes, if there are any, and what all do
                                   └─► console: the leader's lines, its progress, the true cause

    launcher      starts a run and sees it end, also as one of several nodes; agent: the loop of one node
    job/          what is started                     workers/      ranks of this node, and the fork server
    run_dir/      its files, on disk and in memory    rendezvous/   how the nodes of a job agree
    terminal/     what the user sees                  diagnosis/    root cause, hangs, memory
    host/         this machine and its processes      schedulers/   Slurm, Grid Engine, PBS; job scripts

The launcher itself does not need torch, so it outlives whatever goes wrong in torch. On several machines it loads torch
for the store where the launchers meet.
"""

from lockstep.launch.agent import AfterFailure, Stops
from lockstep.launch.diagnosis.error_record import Failure, first_failure
from lockstep.launch.diagnosis.root_cause import RankExit, failure_line, how_it_ended
from lockstep.launch.host.child_process import die_with_parent, name_process, require_linux, without_ignored_hangup
from lockstep.launch.host.machine import Machine
from lockstep.launch.job.program import asks_for_help, check_program, show_help
from lockstep.launch.job.program_sources import mentions_lockstep, own_sources, sources_hash, unread_options
from lockstep.launch.job.quiet_run import QuietEnd, QuietRun, launch_quietly
from lockstep.launch.job.request import (
    Executable,
    Function,
    Module,
    NodeOptions,
    Nodes,
    Request,
    Script,
    kind_options,
    without_options,
)
from lockstep.launch.launcher import launch, start, watch
from lockstep.launch.run_dir.run_directory import next_generation, ranks_of
from lockstep.launch.schedulers import JOB_SCRIPT_SCHEDULERS, allocation, job_script
from lockstep.launch.schedulers.scheduler import Allocation, JobCommand, JobRequest
from lockstep.launch.workers.fork_server import import_torch
from lockstep.launch.workers.rank_process import entry_point
from lockstep.launch_contract import STOP_SIGNALS

__all__ = [
    "JOB_SCRIPT_SCHEDULERS",
    "STOP_SIGNALS",
    "AfterFailure",
    "Allocation",
    "Executable",
    "Failure",
    "Function",
    "JobCommand",
    "JobRequest",
    "Machine",
    "Module",
    "NodeOptions",
    "Nodes",
    "QuietEnd",
    "QuietRun",
    "RankExit",
    "Request",
    "Script",
    "Stops",
    "allocation",
    "asks_for_help",
    "check_program",
    "die_with_parent",
    "entry_point",
    "failure_line",
    "first_failure",
    "how_it_ended",
    "import_torch",
    "job_script",
    "kind_options",
    "launch",
    "launch_quietly",
    "mentions_lockstep",
    "name_process",
    "next_generation",
    "own_sources",
    "ranks_of",
    "require_linux",
    "show_help",
    "sources_hash",
    "start",
    "unread_options",
    "watch",
    "without_ignored_hangup",
    "without_options",
]
