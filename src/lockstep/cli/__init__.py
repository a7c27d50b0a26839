"""The command ``lockstep``: options and help. It parses, calls one room and prints.

The door. Torch-free, and each command loads its room only when it is called, so that help and usage errors answer at
once.
"""

from lockstep.cli.main import COMMANDS, main, run_command
from lockstep.cli.run_options import run_options

__all__ = ["COMMANDS", "main", "run_command", "run_options"]
