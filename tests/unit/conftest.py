"""What stands here starts no process; what does belongs to `tests/ranks`."""

import multiprocessing.process
import os
import subprocess

import pytest

from lockstep import provenance


@pytest.fixture(autouse=True)
def no_process(monkeypatch):
    def refused(*args, **options):
        pytest.fail("a test in tests/unit starts a process: its file belongs to tests/ranks")

    monkeypatch.setattr(os, "fork", refused)
    monkeypatch.setattr(subprocess.Popen, "__init__", refused)
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", refused)
    monkeypatch.setattr(provenance, "_git", lambda *_: None)  # of git see `tests/ranks/test_provenance.py`
