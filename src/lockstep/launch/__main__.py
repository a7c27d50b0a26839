"""What the launcher starts as processes of their own: ``python -m lockstep.launch nursery|rank|store ...``.

Not for people; `lockstep run` is.
"""

import sys

from lockstep.launch import nursery, rank, store

if __name__ == "__main__":
    role, *words = sys.argv[1:]
    {"nursery": nursery.main, "rank": rank.main, "store": store.main}[role](words)
