"""The options of ``lockstep run``."""

from __future__ import annotations

import argparse

from lockstep.cli.command import Parser
from lockstep.cli.option_formatting import option_lines
from lockstep.cli.rendezvous_options import add_rendezvous_options
from lockstep.cli.setting_options import add_setting_options
from lockstep.cpython_private import actions_by_option


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
