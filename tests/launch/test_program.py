"""What is known of a program before any rank runs it."""

import subprocess
import sys
import textwrap

import pytest

from lockstep.launch.program import mentions_lockstep
from lockstep.launch.request import Executable, Function, Module, Script

SERVED = """
    import socket, sys
    from lockstep.launch.request import Script
    from lockstep.launch.workers.fork_server import _import_once
    print(_import_once(socket.socketpair()[0], Script(sys.argv[1])), "lockstep.run.run" in sys.modules)
"""


@pytest.mark.parametrize(
    ("text", "mentions"), [("import lockstep\n", True), ("import torch\n", False), ("# Lockstep\n", False)]
)
def test_what_run_needs_is_imported_once_for_scripts_that_mention_it(tmp_path, monkeypatch, text, mentions):
    (tmp_path / "train.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert mentions_lockstep(Script(str(tmp_path / "train.py"))) == mentions
    assert mentions_lockstep(Module("train")) == mentions
    assert not mentions_lockstep(Script("gone.py"))
    assert not mentions_lockstep(Executable("true"))
    assert mentions_lockstep(Function(print))


def test_a_process_that_has_imported_it_can_still_be_copied(tmp_path):
    (tmp_path / "train.py").write_text("import lockstep")
    script = [sys.executable, "-c", textwrap.dedent(SERVED), str(tmp_path / "train.py")]
    assert subprocess.run(script, capture_output=True, text=True, check=True, timeout=110).stdout == "fork True\n"
