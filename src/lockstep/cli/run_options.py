"""The options of ``lockstep run``, and those of other launchers with what one says instead.

The others are options of torchrun, ``accelerate launch``, ``fabric run``, ``deepspeed``, ``horovodrun`` and ``mpirun``
that a user may have in the fingers, and that ours does not take in the same spelling.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Mapping
from datetime import datetime, time, timedelta
from typing import TYPE_CHECKING, Final

from lockstep.cli.command import Parser, option_lines
from lockstep.cli.setting_options import add_setting_options
from lockstep.cpython_private import actions_by_option
from lockstep.errors import SettingError

if TYPE_CHECKING:
    from lockstep.launch import NodeOptions, Nodes


_EACH_LOG = "leave it out: rank 0 is shown, and each rank has a file in RUN_DIR/logs"
_BY_STRATEGY = "say --strategy NAME, such as fsdp or zero:stage=2"
_HOSTS = "leave it out: start lockstep run on each machine, with --nnodes N --rdzv-endpoint HOST:PORT"
_RANKS = "say --nproc-per-node N, the ranks of each machine"
_ENDPOINT = "say --rdzv-endpoint HOST:PORT, the same on each machine"
_NO_CONFIG = "leave it out: lockstep run has no configuration file; its options are in: lockstep run -h"
_VISIBLE = "say which GPUs with CUDA_VISIBLE_DEVICES=0,1 before the command"
_BATCHES = "leave it out: global_batch and micro_batch of run.loader say it, or --set global_batch=N"

#: By option, with hyphens: what to say instead.
INSTEAD: Final[Mapping[str, str]] = {
    # torchrun
    "--log-dir": "leave it out: each rank writes to RUN_DIR/logs; say which directory with --run-dir",
    "--tee": _EACH_LOG,
    "--redirects": _EACH_LOG,
    "-t": _EACH_LOG,
    "-r": _EACH_LOG,
    "--local-ranks-filter": _EACH_LOG,
    "--duplicate-stdout-filters": _EACH_LOG,
    "--duplicate-stderr-filters": _EACH_LOG,
    "--role": "leave it out: all ranks have the same role",
    "--monitor-interval": "leave it out: a rank that ends is noticed at once",
    "--start-method": "say --start fork or --start plain",
    "--local-addr": "leave it out: ranks take the interface that leads to --rdzv-endpoint; or set GLOO_SOCKET_IFNAME",
    "--run-path": "say the script itself; -m runs a module",
    "--numa-binding": "say --bind, which gives each rank CPUs of its own",
    "--virtual-local-rank": "leave it out: each rank finds its GPU by LOCAL_RANK",
    "--signals-to-handle": "leave it out: all signals that ask a job to stop are handled",
    # accelerate launch
    "--num-processes": _RANKS,
    "--num-machines": "say --nnodes N",
    "--machine-rank": "say --node-rank N",
    "--main-process-ip": _ENDPOINT,
    "--main-process-port": _ENDPOINT,
    "--multi-gpu": _RANKS,
    "--gpu-ids": _VISIBLE,
    "--mixed-precision": "say --precision bf16, fp16 or fp32",
    "--config-file": _NO_CONFIG,
    "--use-fsdp": "say --strategy fsdp",
    "--use-deepspeed": _BY_STRATEGY,
    "--cpu": "leave it out: without a GPU ranks use CPUs; or set CUDA_VISIBLE_DEVICES= before the command",
    "--num-cpu-threads-per-process": "say --set threads=N",
    "--dynamo-backend": "say --set compile=true",
    "--gradient-accumulation-steps": _BATCHES,
    # fabric run
    "--accelerator": "leave it out: ranks use GPUs where there are some",
    "--devices": _RANKS,
    "--num-nodes": "say --nnodes N",
    "--main-address": "say --master-addr HOST",
    "--main-port": "say --master-port PORT",
    # deepspeed
    "--num-gpus": _RANKS,
    "--gpus": _RANKS,
    "--include": _VISIBLE,
    "--exclude": _VISIBLE,
    "--deepspeed": _BY_STRATEGY,
    "--deepspeed-config": _BY_STRATEGY,
    "--bind-cores-to-rank": "say --bind, which gives each rank CPUs of its own",
    # horovodrun, mpirun
    "-n": _RANKS,
    "-np": _RANKS,
    "--np": _RANKS,
    "--num-proc": _RANKS,
    "--min-np": "say --nnodes MIN:MAX, machines that come and go",
    "--max-np": "say --nnodes MIN:MAX, machines that come and go",
    "-H": _HOSTS,
    "--host": _HOSTS,
    "--hosts": _HOSTS,
    "--hostfile": _HOSTS,
    "--host-discovery-script": _HOSTS,
    "--oversubscribe": "leave it out: there may be more ranks than CPUs",
    "--bind-to": "say --bind, which gives each rank CPUs of its own",
    "-x": "leave it out: ranks have the environment of the launcher",
}


def add_rendezvous_options(parser: argparse.ArgumentParser) -> None:
    """Add them to ``parser``, as a group of their own."""
    meet = parser.add_argument_group("several machines: the same on each")
    meet.add_argument("--rdzv-endpoint", metavar="HOST[:PORT]", help="where they meet, on one of them (port: 29400)")
    meet.add_argument("--rdzv-id", metavar="ID", help="a word that must be the same on all of them")
    meet.add_argument(
        "--rdzv-conf",
        metavar="NAME=SECONDS",
        help="join_timeout=600,last_call_timeout=3,suspect_after=5,lost_after=30 unless given",
    )
    meet.add_argument(
        "--max-changes", type=int, metavar="N", help="starts after machines were lost, came or left (default: 10)"
    )
    meet.add_argument(
        "--spares", type=int, default=0, metavar="N", help="of MAX machines, those that wait to replace another one"
    )
    meet.add_argument(
        "--rdzv-takeover", action="store_true", help="if the endpoint's host is lost, another one takes its place"
    )
    # Torchrun's other words for it.
    meet.add_argument("--rdzv-backend", choices=("c10d", "static"), help=argparse.SUPPRESS)  # there is one way only
    meet.add_argument("--master-addr", metavar="HOST", help=argparse.SUPPRESS)
    meet.add_argument("--master-port", type=int, metavar="PORT", help=argparse.SUPPRESS)
    meet.add_argument("--node-rank", type=int, metavar="N", help=argparse.SUPPRESS)


def nodes_of(parsed: argparse.Namespace) -> Nodes | None:
    """The machines of which these options and ``--nnodes`` speak.

    Raises:
        SettingError: as `Nodes.of`.
    """
    # Late, for help and usage errors do without it.
    from lockstep.launch import Nodes

    return Nodes.of(
        parsed.nnodes,
        parsed.rdzv_endpoint,
        parsed.rdzv_id,
        node_options(parsed),
        node_rank=parsed.node_rank,
        master_addr=parsed.master_addr,
        master_port=parsed.master_port,
    )


def node_options(parsed: argparse.Namespace) -> NodeOptions:
    """What of it holds whichever the machines are."""
    from lockstep.launch import NodeOptions

    return NodeOptions(parsed.rdzv_conf, parsed.max_changes, parsed.spares, parsed.rdzv_takeover)


def run_options() -> Parser:
    """The options of ``lockstep run``."""
    parser = Parser(
        prog="lockstep run",
        usage="lockstep run [options] script.py [script options]",
        description="Start a script on several ranks of this machine, or of several, and watch over them.",
        allow_abbrev=False,
        add_help=False,
        formatter_class=option_lines(34),
        epilog="Options after the script are the script's own. Exit codes: 0 done, 1 a rank failed, 2 usage, 74 "
        "trained but not saved, 75 stopped with a checkpoint, 130 or 143 stopped without one, 137 a rank was killed by "
        "the system.",
    )
    ranks = parser.add_argument_group("ranks")
    ranks.add_argument(
        "--nproc-per-node",
        "--ranks",
        metavar="N",
        help="a number, gpu, cpu or auto (default: one for each GPU, else 1)",
    )
    ranks.add_argument("--max-restarts", type=int, default=0, metavar="N", help="starts after a failure (default: 0)")
    ranks.add_argument(
        "--refill-after",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="of new steps, until restarts and changes count from 0 again (default: 600)",
    )
    ranks.add_argument(
        "--nnodes", default="1", metavar="N|MIN:MAX", help="machines, each with a lockstep run of its own (default: 1)"
    )
    ranks.add_argument("--standalone", action="store_true", help="this machine alone, also in an allocation of several")
    ranks.add_argument(
        "--requeue", action="store_true", help="in a Slurm or Grid Engine job that stopped: start the job again"
    )
    ranks.add_argument("--bind", action="store_true", help="each rank keeps to its own part of the CPUs")
    ranks.add_argument("--grace", type=float, default=10.0, metavar="SECONDS", help="from TERM to KILL (default: 10)")
    ranks.add_argument(
        "--hang-after",
        type=float,
        metavar="SECONDS",
        help="without progress until a hang is reported (default: by their pace)",
    )
    ranks.add_argument(
        "--on-hang",
        choices=("wait", "abort", "restart"),
        metavar="WHAT",
        help="then wait, abort or restart (default: end what cannot go on)",
    )
    ranks.add_argument("--ends-at", metavar="TIME", help="when the job ends, if no scheduler says: 18:30, or a date")
    ranks.add_argument(
        "--fault", action="append", default=[], metavar="PLAN", help="on purpose, such as 'kill rank 1 at step 7'"
    )
    ranks.add_argument(
        "--start", choices=("fork", "plain"), help="ranks as copies of one process, or each as its own Python"
    )
    add_rendezvous_options(parser)
    files = parser.add_argument_group("files")
    files.add_argument("--run-dir", metavar="DIR", help="logs, record, checkpoints (default: a new one under runs/)")
    files.add_argument("--resume", action="store_true", help="from the newest whole checkpoint of the run directory")
    files.add_argument("--resume-from", metavar="best|STEP", help="from that checkpoint, with the later ones set aside")
    files.add_argument("--fresh", action="store_true", help="move an earlier run in the run directory aside")
    settings = parser.add_argument_group("settings of the run, over what the script says")
    add_setting_options(settings)
    settings.add_argument(
        "--fit", action="store_true", help="with the largest micro_batch that fits, found by short runs"
    )
    what = parser.add_argument_group("what to run")
    what.add_argument("-m", "--module", action="store_true", help="script.py is the name of a module, as in python -m")
    what.add_argument("--no-python", action="store_true", help="script.py is any program, started as it is")
    what.add_argument(
        "--attach", type=int, metavar="RANK", help="this rank has the terminal: breakpoint() (default: the only one)"
    )
    what.add_argument(
        "--pass-local-rank", action="store_true", help="the script gets --local-rank=N, as torch.distributed.launch did"
    )
    what.add_argument("--use-env", action="store_true", help=argparse.SUPPRESS)  # of that launcher, which is so always
    what.add_argument("-h", "--help", action="help", help="show these options")
    what.add_argument("script", nargs="?", metavar="script.py", help=argparse.SUPPRESS)  # named in the usage
    what.add_argument("args", nargs=argparse.REMAINDER, metavar="...", help="the script's own options")
    accept_underscores(parser)
    return parser


def accept_underscores(parser: argparse.ArgumentParser) -> None:
    """Take each option in the spelling with underscores, too, as torchrun does; the help shows the other one."""
    options = actions_by_option(parser)
    for option, action in list(options.items()):
        options.setdefault(f"--{option[2:].replace('-', '_')}" if option.startswith("--") else option, action)


def moment(text: str, now: datetime) -> float:
    """The next time that ``text`` tells as people write it on a command line, in seconds since 1970.

    Raises:
        SettingError: if it tells none.
    """
    if text.isdigit():
        return float(text)
    with contextlib.suppress(ValueError):
        return datetime.fromisoformat(text).timestamp()
    with contextlib.suppress(ValueError):
        today = datetime.combine(now.date(), time.fromisoformat(text))
        return (today if today > now else today + timedelta(days=1)).timestamp()
    raise SettingError(f"--ends-at {text}: give a time as 18:30, a date and time as 2030-12-31T18:30, or date +%s")
