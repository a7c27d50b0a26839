"""What the launcher starts as processes of their own: ``python -m lockstep.launch fork-server|rank|tcp-store ...``.

Not for people; `lockstep run` is.
"""

import sys

from lockstep.launch.workers import fork_server, rank_process, tcp_store

if __name__ == "__main__":
    role, *words = sys.argv[1:]
    {"fork-server": fork_server.main, "rank": rank_process.main, "tcp-store": tcp_store.main}[role](words)
