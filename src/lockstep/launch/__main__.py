"""The processes that the launcher starts: ``python -m lockstep.launch fork-server|rank|tcp-store ...``.

Users call `lockstep run` instead.
"""

import sys

from lockstep.launch.workers import fork_server, rank_process, tcp_store

if __name__ == "__main__":
    role, *args = sys.argv[1:]
    {"fork-server": fork_server.main, "rank": rank_process.main, "tcp-store": tcp_store.main}[role](args)
