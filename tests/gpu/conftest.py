"""After `make test-gpu`, docs/gpu.md says what was tried, on which device, with what, and when."""

import datetime
import os
from collections import defaultdict

import pytest
import torch

import gpu_tried
from lockstep.doctor.probe import nccl_version


def where() -> str:
    """Such as ``2026-11-24, 1 NVIDIA H100, torch 2.13.0, CUDA 13.0, NCCL 2.29.3``."""
    number, version = torch.cuda.device_count(), torch.__version__.partition("+")[0]
    nccl = ".".join(map(str, nccl_version()))
    today = datetime.datetime.now(datetime.UTC).date()
    device = torch.cuda.get_device_name(0)
    return f"{today}, {number} {device}, torch {version}, CUDA {torch.version.cuda}, NCCL {nccl}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    # Asked for by `make test-gpu`: a single test run by hand changes no page.
    if os.environ.get("LOCKSTEP_GPU_TABLE") != "1" or not torch.cuda.is_available():
        return
    outcomes = defaultdict(list)
    for word in ("passed", "failed", "error"):
        for report in terminalreporter.stats.get(word, []):
            if report.when == "call" or word != "passed":
                name = report.nodeid.partition("[")[0].rpartition("/")[2]
                outcomes[name].append("passed" if word == "passed" else "failed")
    found = {name: gpu_tried.in_words(words, where()) for name, words in outcomes.items()}
    page = gpu_tried.PAGE.read_text()
    gpu_tried.PAGE.write_text(gpu_tried.page_with(page, gpu_tried.table(page, found)))
    terminalreporter.write_line(f"docs/gpu.md says what was tried on {where()}")
