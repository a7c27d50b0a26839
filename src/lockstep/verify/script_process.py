"""What each rank of a run that is verified begins with: the user's unchanged script, in watched surroundings.

lockstep run ... -m lockstep.verify.script_process train.py its options
"""

from __future__ import annotations

import os
import sys
import time

from lockstep.launch import Module, Script, entry_point
from lockstep.launch_contract import TRANSCRIPT
from lockstep.transcript import TranscriptRequest
from lockstep.verify.plain_script import PlainRecorder
from lockstep.verify.surroundings import Surroundings
from lockstep.verify.written_run import SURROUNDINGS, SurroundingsRequest


def run_script() -> None:
    """Run the script that the arguments name, as Python would."""
    time.tzset()  # a copy of another process has its time zone
    request = SurroundingsRequest.from_text(os.environ.pop(SURROUNDINGS))
    Surroundings(request.file, request.shifted).watch()
    name, *args = sys.argv[1:]
    program = (Module if request.is_module else Script)(name, tuple(args))
    run = entry_point(program)
    if request.is_plain:
        with PlainRecorder(TranscriptRequest.from_text(os.environ[TRANSCRIPT])):
            run()
    else:
        run()


if __name__ == "__main__":
    run_script()
