"""The command, as a user calls it."""

import os
import subprocess
import sys
from pathlib import Path

import lockstep

SOURCE = str(Path(lockstep.__file__).parents[1])
DEADLINE_S = 250  #: for what takes ten seconds on an idle machine


def doctor(*words, cwd, **env):
    """The exit code, what was printed and what was said."""
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "doctor", *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": SOURCE, **env},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr
