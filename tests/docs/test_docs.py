"""What the documentation says is so: its scripts run, its commands exist, its tables agree with the code."""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields

import pytest
import torch

import gpu_counts
import gpu_tried
from doc_blocks import BLOCKS, HOUSE, PAGES, SCRIPTS, Block, environment, free_port
from gpu_operations import PAGE as GPU_PAGE
from gpu_operations import page_with, tables
from lockstep import launch_contract
from lockstep.report import MetricsFile
from lockstep.settings import Settings


def of(language):
    return pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == language], ids=str)


@of("python")
def test_python_compiles(block):
    compile(block.text, str(block), "exec")


def run(command, cwd, **more):
    done = subprocess.run(command, cwd=cwd, env=environment(**more), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_scripts_run_on_one_rank(tmp_path):
    for file, block in SCRIPTS.items():
        (tmp_path / file).write_text(block.text)
    # In one process, since importing torch is what takes time; with the variables that torchrun would set.
    code = "import runpy, sys\nfor file in sys.argv[1:]: runpy.run_path(file, run_name='__main__')"
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    said = run([sys.executable, "-W", "error", "-c", code, *SCRIPTS], tmp_path, **alone)
    assert said.count("accuracy 0.9") >= 8, said  # those that print it themselves learn


@of("diff")
def test_a_diff_leads_from_one_script_to_the_other(block):
    before, after = (SCRIPTS[name].text for name in block.file.split("->"))
    lines = block.text.splitlines()
    assert [line[1:] for line in lines if line[:1] in (" ", "-", "")] == before.splitlines()
    assert [line[1:] for line in lines if line[:1] in (" ", "+", "")] == after.splitlines()


def commands_of(block):
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"\w+=.*", words[0]):
            words = words[1:]
        if words:
            yield words


def inline_commands():
    """The commands in running text and tables of all pages: code that begins as one."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    return re.findall(r"`((?:make|lockstep run|(?:\.venv/bin/)?(?:pytest|python)) [^`\n]+)`", text)


COMMANDS = [Block("inline", number, "sh", None, text) for number, text in enumerate(inline_commands())]
COMMANDS += [block for block in BLOCKS if block.language == "sh"]


@pytest.mark.parametrize("block", COMMANDS, ids=str)
def test_commands_exist(block, option_words):
    targets = re.findall(r"^([\w-]+):", (HOUSE / "Makefile").read_text(), re.MULTILINE)
    for words in commands_of(block):
        name, *arguments = words
        if name.endswith("make"):
            assert {a for a in arguments if "=" not in a} <= set(targets)
        elif name.endswith("pytest"):
            for test in (a for a in arguments if a.startswith("tests")):
                path, _, case = test.partition("::")
                assert (HOUSE / path).exists(), test
                assert not case or f"def {case}(" in (HOUSE / path).read_text(), test
        elif name.endswith("python") and "/" in arguments[0]:
            assert (HOUSE / arguments[0]).exists(), words
        elif name.endswith("lockstep"):
            command, *rest = arguments
            if command in ("job", "checkpoints", "ckpt"):
                command, *rest = " ".join(arguments[:2]), *arguments[2:]
            script = next((n for n, a in enumerate(rest) if a.endswith(".py")), len(rest))
            for option in (a for a in rest[:script] if a.startswith("--")):
                assert option in option_words(command), words


@pytest.fixture(scope="module")
def option_words():
    known = {}

    def of_command(command):
        if command not in known:
            page = run([sys.executable, "-m", "lockstep", *command.split(), "--help"], HOUSE)
            known[command] = set(re.findall(r"--[\w-]+", page))
        return known[command]

    return of_command


def rows_below(page, heading):
    """The rows of the table below a heading of a page of the documentation, as lists of cells."""
    text = (HOUSE / "docs" / page).read_text(encoding="utf-8").split(f"# {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return rows[2:]


def test_the_table_of_settings_is_the_code():
    assert [(row[0], row[1]) for row in rows_below("settings.md", "Settings")] == [
        (f"`{field.name}`", "" if field.default is None else f"`{field.default}`") for field in fields(Settings)
    ]


def test_the_table_of_exit_codes_is_the_code():
    said = {int(row[0]) for row in rows_below("exit_codes.md", "Exit codes")}
    assert said == {value for name, value in vars(launch_contract).items() if name.startswith("EXIT_")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        there = page.parent / path if path else page
        assert there.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", there.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}, target


@pytest.mark.long
@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "sh" and b.file], ids=str)
def test_commands_that_work_on_a_script_do_what_they_say(block, tmp_path):
    (tmp_path / block.file).write_text(SCRIPTS[block.file].text)
    command = tmp_path / "lockstep"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m lockstep "$@"\n')
    command.chmod(0o755)
    said = run(["bash", "-e", "-c", block.text], tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert "resumed at step" in said
    assert not re.search(r"^[<>]", said, re.MULTILINE), said
    for name in ("one", "three", "killed"):
        rows = MetricsFile.read(tmp_path / "runs" / name / "metrics.jsonl")
        assert [row["step"] for row in rows] == [16, 32, 48, 64, 80]
        assert rows[-1]["accuracy"] > 0.9


def test_the_operations_of_gpus_are_those_of_this_torch():
    page = GPU_PAGE.read_text()
    if f"torch {torch.__version__.partition('+')[0]} refuses" in page:
        assert page_with(tables()) == page
    assert page.count("| `torch.") > 40


def test_the_page_of_gpus_says_what_a_step_launches():
    assert "\n".join(gpu_counts.table()) in GPU_PAGE.read_text()


def test_the_page_of_gpus_says_of_each_test_whether_it_was_tried():
    page = GPU_PAGE.read_text()
    assert gpu_tried.page_with(page, gpu_tried.table(page, {})) == page
    name, title = next(iter(gpu_tried.titles().items()))
    found = gpu_tried.in_words(["passed", "failed", "passed"], "2026-11-24, a GPU")
    after = gpu_tried.page_with(page, gpu_tried.table(page, {name: found}))
    assert gpu_tried.told(after) == gpu_tried.told(page) | {title: "2 passed, 1 failed: 2026-11-24, a GPU"}


def test_each_path_of_the_tests_that_is_named_is_there():
    files = [
        *PAGES,
        *HOUSE.glob("*.md"),
        HOUSE / "pyproject.toml",
        HOUSE / "Makefile",
        *(HOUSE / "benchmarks").glob("*.*"),
    ]
    files += [file for folder in ("src", "tests", "examples") for file in (HOUSE / folder).rglob("*.py")]
    named = {(path, file) for file in files for path in re.findall(r"\btests/[\w/.-]*\w", file.read_text("utf-8"))}
    assert len(named) > 100
    missing = [f"{file.relative_to(HOUSE)}: {path}" for path, file in named if not (HOUSE / path).exists()]
    assert not missing, "\n".join(sorted(missing))


def test_each_test_that_the_page_on_security_names_is_there():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (HOUSE / "SECURITY.md").read_text())
    assert len(named) > 15
    for file, test in named:
        assert f"def {test}(" in (HOUSE / file).read_text(), f"{file} has no {test}"
