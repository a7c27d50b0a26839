"""What only a GPU can show; skipped without one. `pytest tests/gpu` on a machine that has one or more."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lockstep.batch import BatchPlan, MicroBatchPosition
from lockstep.collectives import Group, NativeAllReduce
from lockstep.collectives.all_reduce import NcclAllReduce
from lockstep.data import MicroBatch
from lockstep.errors import UsageError
from lockstep.launch_contract import MEASURE
from lockstep.run import Run
from lockstep.run.batches.to_device import on_device
from lockstep.step_record import MeasureRequest, RankRecord
from lockstep.testing import StrategyLaws, run_ranks, state_hash
from lockstep.world import World

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(300),
]

BITS = ("ddp", "zero", "fsdp", "parameter-server:servers=1", "hybrid:servers=1")
#: Those that compute something else, and how far they may be from one rank, as in tests/promises/test_laws.py.
NEAR = {
    "ddp:compress=bf16": 0.1,
    "ddp:compress=powersgd,rank=2": 0.9,
    "local-sgd:period=2": 0.8,
    "diloco:period=2": 1.1,
}


def check(law: str, laws: StrategyLaws) -> None:
    getattr(laws, law)()


@pytest.mark.parametrize("law", StrategyLaws.ALL)
@pytest.mark.parametrize("word", ["ddp", "zero", "fsdp", "local-sgd:period=2"])
def test_laws_on_one_gpu(word: str, law: str, tmp_path: Path):
    check(law, StrategyLaws(word, tmp_path, worlds=(1,)))


@pytest.mark.parametrize("law", StrategyLaws.ALL)
def test_laws_of_threads_on_all_gpus(law: str, tmp_path: Path):
    laws = StrategyLaws("dp", tmp_path, worlds=(1,), bits=False, tolerance=1e-3, dropout=0, batchnorm=False)
    check(law, laws)


@pytest.mark.parametrize("law", StrategyLaws.ALL)
@pytest.mark.parametrize("word", BITS)
def test_laws_for_ranks_that_share_a_gpu(word: str, law: str, tmp_path: Path):
    check(law, StrategyLaws(word, tmp_path, worlds=(2, 3), rehearse=True))


@pytest.mark.parametrize("law", StrategyLaws.ALL)
def test_laws_for_stages_that_share_a_gpu(law: str, tmp_path: Path):
    check(law, StrategyLaws("pipeline:stages=2", tmp_path, worlds=(2, 4), rehearse=True))


@pytest.mark.parametrize("law", StrategyLaws.ALL)
@pytest.mark.parametrize("word", NEAR)
def test_laws_of_strategies_that_compute_something_else(word: str, law: str, tmp_path: Path):
    laws = StrategyLaws(word, tmp_path, worlds=(2, 3), bits=False, tolerance=NEAR[word], rehearse=True)
    check(law, laws)


def on_nccl():
    """One rank, with torch's process group on NCCL all the same: the streams and collectives are the real ones."""
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", device_id=device)
    world = World.from_env(os.environ)
    group = Group(world, device, dist.distributed_c10d._get_default_store(), None, 60, over_cpu=False)
    plan = BatchPlan(8, 1, 1)
    exchange, fast = NcclAllReduce(group, plan.run), NativeAllReduce(group)
    gradient = torch.randn(1003, device=device)
    out, summed = torch.empty(1003, device=device), gradient.clone()
    exchange.begin(out, [gradient.clone()], 8)
    exchange.finish()
    fast.begin(summed)
    fast.finish()
    exchange.close()
    same = torch.equal(out, gradient) and torch.equal(summed, gradient)
    dist.destroy_process_group()
    return same


def test_the_exchange_on_a_stream_of_its_own():
    assert run_ranks(on_nccl, 1) == [True]


def train_two_layers() -> None:
    with Run(seed=0) as run:
        model = run.model(nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10)))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        batches = run.loader(torch.randn(2048, 256), global_batch=128, micro_batch=64, workers=0)
        for _ in run.epochs(3):
            for x in run.train(batches):
                run.step(model(x).square().mean())


def test_a_step_is_taken_apart_by_events_of_the_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    request = MeasureRequest(str(tmp_path), 8, gradients=True, memory=True, flops=True)
    monkeypatch.setenv(MEASURE, request.to_text())
    with pytest.raises(SystemExit):
        train_two_layers()
    record = RankRecord.read(request.record(0))
    assert (record.on_gpu, len(record.steps), len(record.gradients)) == (True, 8, 4)
    assert record.peak_bytes >= record.parameter_bytes + record.gradient_bytes
    for step, following in zip(record.steps, record.steps[1:], strict=False):
        assert min(*step.forward_s, *step.backward_s, step.optimizer_s) > 0
        assert abs(step.began_s + step.total_s - following.began_s) < 1e-3
    assert {gradient.name for gradient in record.gradients[:2]} == {"2.weight", "2.bias"}


class Nest(NamedTuple):
    """Of tensors, and of what is none."""

    images: torch.Tensor
    more: dict[str, list[torch.Tensor] | str]


def batches_of_nests(count: int) -> Iterator[MicroBatch]:
    for number in range(count):
        image = torch.full((256, 4096), float(number)).pin_memory()
        yield MicroBatch(MicroBatchPosition(0, 1, True, step=number), Nest(image, {"x": [image[:2]], "name": "n"}))


def test_batches_are_copied_ahead_on_a_stream_of_its_own():
    """Much is computed with each, so that a copy which did not wait, or memory used again too early, would be seen."""
    device = torch.device("cuda", 0)
    square = torch.randn(2048, 2048, device=device)
    sums = []
    for batch in on_device(batches_of_nests(40), device, ahead=True):
        assert isinstance(batch.data, Nest)
        assert batch.data.images.is_cuda
        assert batch.data.more["x"][0].is_cuda
        for _ in range(10):
            square = torch.tanh(square @ square)
        sums.append(batch.data.images.double().mean() + batch.data.more["x"][0].double().mean())
        del batch  # its memory is free for the next copies while the GPU still computes with it
    assert torch.stack(sums).tolist() == [2.0 * number for number in range(40)]


class MovesItself:
    """A batch of some other package's."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def to(self, device: torch.device) -> "MovesItself":
        return MovesItself(self.tensor.to(device))


@pytest.mark.parametrize("ahead", [True, False])
def test_what_moves_itself_and_what_is_there_already_comes_too(ahead: bool):
    device = torch.device("cuda", 0)
    there = torch.arange(5, device=device)
    data = [MovesItself(torch.arange(3)), there, {"x": there}]
    got = [
        b.data for b in on_device((MicroBatch(MicroBatchPosition(0, 1, True), d) for d in data), device, ahead=ahead)
    ]
    assert got[0].tensor.tolist() == [0, 1, 2]
    assert got[0].tensor.is_cuda
    assert got[1].data_ptr() == got[2]["x"].data_ptr() == there.data_ptr()


def test_a_look_for_gpus_starts_no_cuda_and_ranks_can_be_copied_after_it(tmp_path: Path):
    """As in a notebook, where a cell asks for GPUs before another one starts ranks."""
    script = tmp_path / "looks.py"
    script.write_text(
        "import torch, lockstep\n"
        "from lockstep.gpu_driver import has_started_cuda\n"
        "def device():\n"
        "    with lockstep.Run(seed=0, track='none') as run:\n"
        "        return str(run.device)\n"
        "print(torch.cuda.is_available(), torch.cuda.device_count() > 0, has_started_cuda())\n"
        "print(lockstep.launch(device, 1))\n"
        "torch.ones(1, device='cuda')\n"
        "print(has_started_cuda())\n"
        "lockstep.launch(device, 1)\n"
    )
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["True True False", "['cuda:0']", "True"], done.stderr
    assert "LaunchError: CUDA is in use in this process" in done.stderr


def upsampled(nondeterministic: Literal["refuse", "warn"]) -> bool:
    """A training through an operation whose backward pass adds in any order."""
    with Run(seed=1, nondeterministic=nondeterministic, track="none") as run:
        model = run.model(nn.Conv2d(3, 4, 3))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for x in run.train(run.loader(torch.randn(64, 3, 33, 33), global_batch=16, micro_batch=8)):
            larger = nn.functional.interpolate(model(x), scale_factor=2.5, mode="bilinear")
            run.step(larger.square().mean())
        return run.progress.step == 4


def test_an_operation_without_a_deterministic_kernel_is_refused_or_trains_with_other_bits_each_time():
    with pytest.raises(UsageError, match=r"^upsample_bilinear2d_backward.*, which the backward pass calls"):
        run_ranks(upsampled, 1, "refuse")
    assert run_ranks(upsampled, 1, "warn") == [True]


def on_data(workers: int) -> str:
    with Run(seed=3) as run:
        model = run.model(nn.Linear(16, 4))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=1e-2))
        data = [torch.full((16,), float(number)) for number in range(50)]
        batches = run.loader(data, global_batch=16, micro_batch=4, workers=workers, collate_fn=torch.stack)
        for _ in run.epochs(2):
            for x in run.train(batches):
                assert x.is_cuda
                run.step(model(x).square().mean())
            for x in run.evaluate(batches):
                run.measure(mean=x.mean(1))
        assert abs(run.metrics["mean"] - 24.5) < 1e-4
        return state_hash(model)


def test_samples_copied_ahead_train_the_same_model_with_any_loader_processes():
    assert run_ranks(on_data, 1, 0) == run_ranks(on_data, 1, 2)
