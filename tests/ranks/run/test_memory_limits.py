"""Larger than a rank: each rank in a control group of its own, whose limit the kernel keeps by killing."""

import contextlib
import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

GROUPS = Path("/sys/fs/cgroup")
V1 = GROUPS / "memory"

SCRIPT = """
import ctypes, os, sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
import lockstep
from lockstep.checkpoint import SafetensorsWriter, content_of, in_file

ctypes.CDLL(None).mallopt(-3, 64 * 1024)  # freed blocks go back to the system at once
form, width, layers, place = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])

def build():
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))

def weights():
    torch.manual_seed(0)
    spec = in_file("w", torch.float32, (width, width))
    with SafetensorsWriter(place, [spec.__class__(f"{n}.weight", spec.dtype, spec.shape, spec.length)
                                   for n in range(layers)]) as out:
        for _ in range(layers):
            out.write(content_of(torch.randn(width, width) / width))

if form == "write":
    weights()
    sys.exit()

with lockstep.Run() as run:
    torch.optim.AdamW(nn.Linear(1, 1).parameters())  # loads much of torch, which is not counted
    # What this process has now is counted elsewhere.
    (Path(os.environ["LIMITED"]) / f"rank-{run.rank}" / "cgroup.procs").write_text(str(os.getpid()))
    if form == "meta":
        with torch.device("meta"):
            model = build()
        model = run.model(model)
    else:
        model = run.model(build, weights=place if form == "file" else None)
    run.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
    inputs = torch.arange(12.0 * 8).reshape(12, 8)
    for epoch in run.epochs(2 if os.environ.get("LOCKSTEP_RESUME") == "1" else 1):
        for (x,) in run.train(run.loader((inputs,), global_batch=6, micro_batch=2, workers=0)):
            run.step(F.mse_loss(model(x.repeat(1, width // 8)), torch.zeros(len(x), width)))
        run.log()
"""


@contextlib.contextmanager
def limited(ranks, bytes_of_a_rank):
    """A directory with a control group for each rank; the reason where there can be none."""
    version_1 = (V1 / "memory.limit_in_bytes").exists()
    place = (V1 if version_1 else GROUPS) / f"lockstep-{uuid.uuid4().hex[:8]}"
    groups = [place / f"rank-{rank}" for rank in range(ranks)]
    made = []
    try:
        try:
            for one in (place, *groups):
                one.mkdir()
                made.append(one)
                if not version_1 and one == place:
                    (one / "cgroup.subtree_control").write_text("+memory")
            for one in groups:
                limits = (
                    ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
                    if version_1
                    else ("memory.max", "memory.swap.max")
                )
                (one / limits[0]).write_text(str(bytes_of_a_rank))
                if (one / limits[1]).exists():  # not where the kernel counts no swap
                    (one / limits[1]).write_text(str(bytes_of_a_rank if version_1 else 0))
        except OSError as error:
            pytest.skip(f"no control groups with a limit of memory can be made here: {error}")
        yield place
    finally:
        for one in reversed(made):
            one.rmdir()


def most(place, ranks):
    """The most bytes that a rank has held."""
    names = ("memory.max_usage_in_bytes", "memory.peak")
    return max(
        int((place / f"rank-{rank}" / name).read_text())
        for rank in range(ranks)
        for name in names
        if (place / f"rank-{rank}" / name).exists()
    )


class Job:
    def __init__(self, tmp_path, width, layers):
        self.script, self.tmp_path, self.width, self.layers = tmp_path / "train.py", tmp_path, width, layers
        self.file = tmp_path / "weights.safetensors"
        self.script.write_text(SCRIPT)

    def arguments(self, form):
        return [str(self.script), form, str(self.width), str(self.layers), str(self.file)]

    def run(self, place, strategy, form, *options, ranks=3):
        words = ["run", "--nproc-per-node", str(ranks), "--run-dir", str(self.tmp_path / f"{strategy}-{form}")]
        return subprocess.run(
            [sys.executable, "-m", "lockstep", *words, "--strategy", strategy, *options, *self.arguments(form)],
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(sys.path), "LIMITED": str(place), "LOCKSTEP_VIEW": "silent"},
            capture_output=True,
            text=True,
            timeout=900,
        )

    def starts_and_resumes(self, place, form):
        for options in ((), ("--resume",)):
            done = self.run(place, "fsdp", form, *options)
            assert done.returncode == 0, f"{form} {options}, at most {most(place, 3):,}: {done.stdout}{done.stderr}"
        rows = (self.tmp_path / f"fsdp-{form}" / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(row)["step"] for row in rows]
        assert steps == [2, 4], "the second one went on from where the first one had ended"


@pytest.mark.campaign
@pytest.mark.long
def test_a_model_trains_and_resumes_within_a_limit_at_which_replicas_are_killed(tmp_path):
    job = Job(tmp_path, width=1024, layers=12)  # 50 MB of parameters
    with limited(3, 152 << 20) as place:
        killed = job.run(place, "ddp", "made")
        assert killed.returncode == 137, killed.stdout + killed.stderr
        job.starts_and_resumes(place, "made")


@pytest.mark.campaign
@pytest.mark.timeout(2000)  # a minute on an idle machine
@pytest.mark.parametrize("form", ["made", "meta", "file"])
def test_300_mb_of_parameters(form, tmp_path):
    """Held on each of three ranks: 16 / 3 bytes a parameter while it steps, 12 / 3 more for the copy of a save."""
    job = Job(tmp_path, width=1536, layers=32)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    if form == "file":
        subprocess.run([sys.executable, *job.arguments("write")], check=True, env=environment)
    with limited(3, 900 << 20) as place:
        if form == "made":
            killed = job.run(place, "ddp", form)
            assert killed.returncode == 137, killed.stdout + killed.stderr
        job.starts_and_resumes(place, form)
