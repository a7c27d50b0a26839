"""The processes that the launcher starts: ``python -m lockstep.launch fork-server|rank|tcp-store ...``.

Users call `lockstep run` instead.
"""

import sys

from lockstep.launch.workers.fork_server import main as fork_server
from lockstep.launch.workers.rank_process import main as rank_process
from lockstep.launch.workers.tcp_store import main as tcp_store

if __name__ == "__main__":
    role, *args = sys.argv[1:]
    {"fork-server": fork_server, "rank": rank_process, "tcp-store": tcp_store}[role](args)
