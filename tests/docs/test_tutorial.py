"""The tutorial: its blocks run one after the other, in one directory, and print what the page says."""

import os
import re
import shlex
import subprocess
import sys

import pytest

from doc_blocks import HOUSE, blocks_of, environment

PAGE = HOUSE / "docs" / "tutorial.md"


def told(line):
    """A line of the page as a pattern: figures, which depend on the CPU and on torch, may be others."""
    return re.sub(r"\d+\\\.\d+", r"\\d+\\.\\d+", re.escape(line))


@pytest.mark.campaign
@pytest.mark.long
@pytest.mark.timeout(600)
def test_each_block_of_the_tutorial_does_what_the_page_says(tmp_path):
    for name, words in {"lockstep": "-m lockstep", "python": ""}.items():
        (tmp_path / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words} "$@"\n')
        (tmp_path / name).chmod(0o755)
    said, compared = "", 0
    for block in blocks_of(PAGE):
        if block.language == "python":
            (tmp_path / block.file).write_text(block.text)
        elif block.language == "sh":
            env = environment(PATH=f"{tmp_path}:{os.environ['PATH']}")
            command = ["bash", "-e", "-c", block.text]
            done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
            said = done.stdout + done.stderr
            assert done.returncode == 0, f"{block}: {said}"
        elif block.language == "text":
            for line in block.text.splitlines():
                assert line == "..." or re.search(told(line), said), f"{block}: {line!r} is not in:\n{said}"
                compared += 1
    assert compared > 15


def test_a_line_of_the_page_may_have_other_figures_and_no_other_words():
    assert re.search(told("step 16: loss 0.5178 (a)"), "step 16: loss 0.51 (a)")
    assert not re.search(told("step 16: loss 0.5178"), "step 17: loss 0.5178")
