"""The trained model has the same bits twice, and on 1, 2, 3 and 4 ranks that share a GPU, whatever it computes with.

Sizes are odd where GPUs have other kernels for aligned memory, and large enough that a sum is divided among threads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lockstep.run import Run
from lockstep.testing import run_ranks, state_hash

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(280),
]

# ---- models ----------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """One layer of a transformer over words."""

    def __init__(self, width: int = 128, dropout: float = 0.1) -> None:
        super().__init__()
        self.dropout = dropout
        self.words, self.qkv = nn.Embedding(50, width), nn.Linear(width, 3 * width)
        self.out, self.head = nn.Linear(width, width), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.words(x)
        q, k, v = self.qkv(hidden).view(*x.shape, 3, 2, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout * self.training, is_causal=True)
        return self.head((hidden + self.out(seen.transpose(1, 2).flatten(2))).mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(50, 64), kind(64, 64, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.words(x))[0][:, -1])


class Bags(nn.Module):
    """Rows of a table that are added up, which a GPU does by atomic additions unless it is told not to."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(50, 33, mode="sum"), nn.Linear(33, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gathered = self.bag.weight.index_select(0, x[:, 0]) + torch.zeros_like(self.bag(x)).index_add(
            0, torch.zeros(len(x), dtype=torch.long, device=x.device), self.bag(x)
        )
        return self.head(gathered)


def mlp(width: int = 301) -> nn.Module:
    """A bias of an odd size, so that all gradients behind it begin at odd places of a bucket."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(3 * 17 * 17, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 10)
    )


def cnn(*, batchnorm: bool = True) -> nn.Module:
    def norm(width: int) -> nn.Module:
        return nn.BatchNorm2d(width) if batchnorm else nn.GroupNorm(3, width)

    return nn.Sequential(
        *(nn.Conv2d(3, 33, 3, padding=1), norm(33), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(33, 66, 3, padding=1), norm(66), nn.ReLU(), nn.Dropout(0.1)),
        *(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(264, 10)),
    )


# ---- optimizers ------------------------------------------------------------------------------------------------------


class OfNorms(torch.optim.Optimizer):
    """SGD whose step depends on norms of each gradient and parameter, as those of LARS and LAMB."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                trust = p.norm() / (p.grad.norm() + 1e-3)
                p.sub_(p.grad * trust, alpha=0.01 * group["lr"])


class Sam(torch.optim.Optimizer):
    """Steps by the gradient at the parameters moved by the norm of the gradient, which the closure computes again."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:
        closure = torch.enable_grad()(closure)
        loss, parameters = closure(), [p for group in self.param_groups for p in group["params"]]
        moves = [p.grad * (0.05 / (p.grad.norm() + 1e-6)) for p in parameters]
        torch._foreach_add_(parameters, moves)
        closure()
        torch._foreach_sub_(parameters, moves)
        for p in parameters:
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"])
        return loss


def adamw(parameters: Iterable[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, **options)


def fused(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return adamw(parameters, fused=torch.cuda.is_available())


# ---- trainings -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Training:
    """What is trained, and how."""

    model: Callable[[], nn.Module]
    data: str = "images"  #: or "words"
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = adamw
    strategy: str = "ddp"
    samples: int = 96  #: in steps of 32
    words: int = 257  #: of a sample
    counts: bool = False  #: whether the loss is weighed by a count that varies
    channels_last: bool = False
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


TRAININGS = {
    "attention in fp32": Training(Attention, "words"),
    "attention in bf16": Training(Attention, "words", settings={"precision": "bf16"}),
    # For which torch chooses cuDNN's attention where nothing forbids that, whose backward pass adds in any order.
    "attention as in GPT-2, bf16": Training(
        lambda: Attention(dropout=0.0), "words", words=1024, settings={"precision": "bf16"}
    ),
    "attention as in GPT-2, fsdp": Training(
        lambda: Attention(dropout=0.0), "words", words=512, strategy="fsdp", settings={"precision": "bf16"}
    ),
    "attention of odd heads in fp16": Training(lambda: Attention(2 * 40), "words", settings={"precision": "fp16"}),
    "an LSTM": Training(lambda: Recurrent(nn.LSTM), "words"),
    "a GRU": Training(lambda: Recurrent(nn.GRU), "words"),
    "bags of words, index_add": Training(Bags, "words"),
    "odd sizes": Training(mlp),
    "odd sizes, a short last step": Training(mlp, samples=95),
    "odd sizes, clip_norm": Training(mlp, settings={"clip_norm": 0.1}),
    "counts that vary": Training(Attention, "words", counts=True),
    "LARS and LAMB": Training(mlp, optimizer=OfNorms),
    "SAM": Training(mlp, optimizer=Sam),
    "a CNN with BatchNorm, SGD": Training(cnn, optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
    "a CNN in bf16, fused AdamW": Training(cnn, optimizer=fused, settings={"precision": "bf16"}),
    "a CNN in fp16": Training(cnn, settings={"precision": "fp16"}),
    "a CNN, channels_last": Training(lambda: cnn(batchnorm=False), channels_last=True),
    "a CNN, zero": Training(cnn, strategy="zero"),
    "a CNN, zero:stage=2": Training(cnn, strategy="zero:stage=2"),
    "a CNN, fsdp": Training(cnn, strategy="fsdp"),
    "a CNN, fsdp:offload": Training(cnn, strategy="fsdp:offload=true"),
    "attention in bf16, fsdp by layers": Training(
        Attention, "words", optimizer=fused, strategy="fsdp:wrap=Linear", settings={"precision": "bf16"}
    ),
    "torch.compile": Training(mlp, settings={"compile": True}),
    "torch.compile, a short last step": Training(mlp, samples=95, settings={"compile": True}),
    "torch.compile of attention": Training(Attention, "words", settings={"compile": True, "precision": "bf16"}),
}


def trained(name: str) -> str:
    """The hash of the model that ``name`` of `TRAININGS` trains, on the leader."""
    given = TRAININGS[name]
    random = torch.Generator().manual_seed(1)
    x = torch.randn(given.samples, 3, 17, 17, generator=random)
    if given.data == "words":
        x = torch.randint(50, (given.samples, given.words), generator=random)
    y = torch.randint(10, (given.samples,), generator=random)
    with Run(seed=3, strategy=given.strategy, rehearse=True, track="none", **given.settings) as run:
        model = run.model(given.model())
        if given.channels_last:
            model = model.to(memory_format=torch.channels_last)
        run.optimizer(given.optimizer(model.parameters()))
        for _ in run.epochs(2):
            for inputs, labels in run.train(run.loader((x, y), global_batch=32, micro_batch=4)):
                if given.counts:
                    heavy = labels < 7
                    losses = F.cross_entropy(model(inputs), labels, reduction="none")
                    run.step((losses * heavy).sum(), count=int(heavy.sum()), loss_is="sum")
                else:
                    run.step(F.cross_entropy, inputs, labels)
        state = run.state_dict(model)
        return state_hash({key: value.cpu() for key, value in state.items()}) if run.leads else ""


@pytest.mark.parametrize("name", [name for name in TRAININGS if "offload" not in name])
def test_the_same_bits_twice_and_on_any_number_of_ranks(name: str):
    found = {"again": run_ranks(trained, 1, name, timeout_s=200)[0]}
    found |= {str(world): run_ranks(trained, world, name, timeout_s=200)[0] for world in (1, 2, 3, 4)}
    assert len(set(found.values())) == 1, found


def test_an_optimizer_on_the_cpu_has_the_same_bits_on_any_number_of_ranks():
    """Though not those of an optimizer on the GPU, which rounds differently."""
    assert len({run_ranks(trained, world, "a CNN, fsdp:offload")[0] for world in (2, 3)}) == 1
