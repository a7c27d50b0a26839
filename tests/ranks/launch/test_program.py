"""What is known of a program before any rank runs it."""

import os
import socket
import subprocess
import sys
import textwrap

import pytest

from lockstep.errors import SettingError
from lockstep.launch.job.program import check_program
from lockstep.launch.job.program_sources import mentions_lockstep, needs_only_python, unread_options
from lockstep.launch.job.request import Executable, Function, Module, Script
from lockstep.launch.workers.tcp_store import UNUSED, USED, serve_store
from lockstep.testing import run_ranks

SERVED = """
    import socket, sys
    from lockstep.launch.job.request import Script
    from lockstep.launch.workers.fork_server import _import_once
    print(_import_once(socket.socketpair()[0], Script(sys.argv[1]), True, False), "lockstep.run.run" in sys.modules)
"""


@pytest.mark.parametrize(
    ("text", "mentions"), [("import lockstep\n", True), ("import torch\n", False), ("# Lockstep\n", False)]
)
def test_what_run_needs_is_imported_once_for_scripts_that_mention_it(tmp_path, monkeypatch, text, mentions):
    (tmp_path / "train.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert mentions_lockstep(Script(str(tmp_path / "train.py"))) == mentions
    assert mentions_lockstep(Module("train")) == mentions
    (tmp_path / "outer.py").write_text("import train")
    assert mentions_lockstep(Script(str(tmp_path / "outer.py"))) == mentions
    assert not mentions_lockstep(Script("gone.py"))
    assert not mentions_lockstep(Executable("true"))
    assert mentions_lockstep(Function(print))


def test_a_process_that_has_imported_it_can_still_be_copied(tmp_path):
    (tmp_path / "train.py").write_text("import lockstep")
    script = [sys.executable, "-c", textwrap.dedent(SERVED), str(tmp_path / "train.py")]
    assert subprocess.run(script, capture_output=True, text=True, check=True, timeout=110).stdout == "fork True\n"


@pytest.mark.parametrize(
    ("text", "only"),
    [
        ("import os, json.decoder\nfrom concurrent import futures", True),
        ("", True),
        ("import torch", False),
        ("import numpy.linalg", False),
        ("from yaml import load", False),
        ("import importlib\nimportlib.import_module('torch')", False),
        ("import inner.deep", True),
        ("from inner import heavy", False),
        ("import broken", False),
    ],
)
def test_of_a_program_that_imports_only_python_and_itself_nothing_else_is_loaded(tmp_path, monkeypatch, text, only):
    (tmp_path / "inner").mkdir()
    sources = {"inner/__init__.py": "", "inner/deep.py": "from . import sibling", "inner/sibling.py": "import csv"}
    sources |= {"inner/heavy.py": "import pandas", "broken.py": "import os, (", "train.py": text}
    for name, source in sources.items():
        (tmp_path / name).write_text(source)
    monkeypatch.chdir(tmp_path)
    assert needs_only_python(Script("train.py")) == needs_only_python(Module("train")) == only
    assert not needs_only_python(Script("gone.py"))
    assert not needs_only_python(Executable("true"))
    assert not needs_only_python(Function(print))


def served_when_used():
    """What a store says of itself before a rank connects, and after one has written to it."""
    from torch.distributed import TCPStore

    ours, theirs = socket.socketpair()
    with ours, theirs, socket.create_server(("127.0.0.1", 0)) as listening:
        port, parent = listening.getsockname()[1], os.getpid()
        if not os.fork():
            ours.close()
            serve_store(listening.detach(), port, parent, theirs, when_used=True)
        said = [ours.send(b"?") and ours.recv(1) for _ in range(2)]
        store = TCPStore("127.0.0.1", port, is_master=False)
        store.set("key", "value")
        return b"".join([*said, ours.send(b"?") and ours.recv(1)]), store.get("key")


def test_a_store_that_begins_when_it_is_used_says_so_before_and_serves_after():
    assert run_ranks(served_when_used, 1) == [(UNUSED + UNUSED + USED, b"value")]


def test_a_notebook_is_no_script(tmp_path):
    (tmp_path / "a.ipynb").write_text('{"cells": []}')
    with pytest.raises(SettingError, match=r"is a notebook: call lockstep\.launch.*jupyter nbconvert --to script"):
        check_program(Script(str(tmp_path / "a.ipynb")))


@pytest.mark.parametrize(
    ("text", "unread"),
    [
        ("import train_lib", ["--nproc-per-node"]),
        ("parser.add_argument('--nproc_per_node')", []),
        ("from lightning.pytorch.cli import LightningCLI", []),
        ("import helper", []),
    ],
)
def test_options_of_ours_behind_the_script_are_noticed_where_it_knows_none_of_them(tmp_path, text, unread):
    (tmp_path / "train.py").write_text(text)
    (tmp_path / "helper.py").write_text("print(sys.argv['--nproc-per-node'])")
    args = ("--nproc-per-node", "2", "--lr=1", "--nproc-per-node=3", "-m")
    assert unread_options(Script(str(tmp_path / "train.py"), args), ["--nproc-per-node", "-m", "--fresh"]) == unread
