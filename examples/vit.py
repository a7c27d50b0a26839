# /// script
# requires-python = ">=3.11"
# dependencies = ["torch-lockstep", "scikit-learn>=1.5"]
# ///
"""A small vision transformer on handwritten digits, for every way of keeping ranks in step: one word chooses.

python vit.py
lockstep run --nproc-per-node 2 --strategy ddp vit.py
lockstep run --nproc-per-node 2 --strategy fsdp vit.py

Nothing in this file knows of strategies.
"""

import argparse
import math

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep

GLOBAL_BATCH = 64
HELD_OUT = 360
PATCH = 4  # pixels, each way


class Block(nn.Module):
    """Attention of all patches to all patches, then a layer of two linear maps; each adds to what it was given."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.before_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """``x`` of shape (n, patches, width), and the same comes back."""
        n, patches, width = x.shape
        apart = self.queries_keys_values(self.before_attention(x)).view(n, patches, 3, self.heads, width // self.heads)
        queries, keys, values = apart.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(queries, keys, values)
        x = x + self.out(seen.transpose(1, 2).reshape(n, patches, width))
        return x + self.mlp(self.before_mlp(x))


class Patches(nn.Module):
    """Cuts images into patches, and tells each where it lies."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, width, PATCH, stride=PATCH)
        self.where = nn.Parameter(0.02 * torch.randn((8 // PATCH) ** 2, width))

    def forward(self, images: Tensor) -> Tensor:
        """Shape (n, patches, width), for images of shape (n, 1, 8, 8)."""
        return self.embed(images).flatten(2).transpose(1, 2) + self.where


class Head(nn.Module):
    """Scores of the ten digits from the mean over the patches."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (n, 10), for ``x`` of shape (n, patches, width)."""
        return self.scores(self.norm(x).mean(1))


def vit(width: int = 48, heads: int = 4, blocks: int = 4) -> nn.Sequential:
    """A row of modules, so that a pipeline can cut it between any two."""
    return nn.Sequential(Patches(width), *(Block(width, heads) for _ in range(blocks)), Head(width))


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1437 images to train on and 360 held out, always the same ones."""
    raw = load_digits()
    images = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(raw.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[HELD_OUT:], order[:HELD_OUT]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def main(epochs: int = 10) -> float:
    """Train; the accuracy on the held-out images."""
    with lockstep.Run(seed=0) as run:
        train, test = digits()
        model = run.model(vit())
        optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05))
        steps = epochs * math.ceil(len(train) / GLOBAL_BATCH)
        run.scheduler(torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps + 1, pct_start=0.2))
        batches = run.loader(train, global_batch=GLOBAL_BATCH, micro_batch=16)
        held_out = run.loader(test, global_batch=HELD_OUT, shuffle=False)

        def evaluate() -> float:
            for images, labels in run.evaluate(held_out):
                run.measure(accuracy=model(images).argmax(1) == labels)
            return run.metrics["accuracy"]

        for epoch in run.epochs(epochs):
            for images, labels in run.train(batches):
                run.step(F.cross_entropy, images, labels)
            run.log(epoch=epoch + 1)
        accuracy = evaluate()
        run.say(f"accuracy on {HELD_OUT} held-out digits: {accuracy:.4f}")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    accuracy = main(**vars(options))
    if options.epochs >= 10:  # fewer are for a try
        assert accuracy >= 0.92, f"accuracy {accuracy:.4f}, expected 0.92 or more"
