"""``python -m lockstep``: the command ``lockstep``."""

import sys

from lockstep.cli import run_command

if __name__ == "__main__":
    sys.exit(run_command())
