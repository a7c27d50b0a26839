"""What takes several GPUs; skipped with fewer."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lockstep.run import Run
from lockstep.testing import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


class Halves(nn.Module):
    """Two layers, each on a device of its own."""

    def __init__(self, first, second):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)).to(first)
        self.second = nn.Linear(8, 3).to(second)

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return self.second(hidden.to(self.second.weight.device)).to(x.device)


def trained(strategy, several):
    random = torch.Generator().manual_seed(1)
    x, labels = torch.randn(40, 6, generator=random), torch.randint(3, (40,), generator=random)
    with Run(seed=2, strategy=strategy) as run:
        other = torch.device("cuda", run.rank + run.world_size) if several else run.device
        model = run.model(Halves(run.device, other))
        devices = {p.device for p in model.parameters()}
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches = run.loader((x, labels), global_batch=16, micro_batch=4)
        for _ in run.epochs(2):
            for inputs, targets in run.train(batches):
                run.step(F.cross_entropy(model(inputs), targets))
        state = getattr(model, "module", model).state_dict()
        return {name: tensor.cpu() for name, tensor in state.items()}, len(devices)


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="fewer than four GPUs")
def test_a_model_may_span_several_gpus_of_each_rank():
    ((reference, on),) = run_ranks(trained, 1, "none", False)
    assert on == 1
    for found, on in run_ranks(trained, 2, "ddp", True):
        assert on == 2
        torch.testing.assert_close(found, reference)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_one_process_divides_batches_among_gpus():
    ((reference, _),) = run_ranks(trained, 1, "none", False)
    ((found, _),) = run_ranks(trained, 1, "dp", False)
    for name in reference:
        if "weight" in name and "second" in name:  # statistics are those of the first GPU's rows
            torch.testing.assert_close(found[name], reference[name], rtol=0.2, atol=0.05)
