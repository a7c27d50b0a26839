# /// script
# requires-python = ">=3.11"
# dependencies = ["torch-lockstep", "scikit-learn>=1.5"]
# ///
"""Contrastive learning over the whole global batch, exact on any number of ranks: digits, without their labels.

python contrastive.py
lockstep run --nproc-per-node 2 contrastive.py

Each image must find its other view among those of all images of the step, not only of its micro-batch (SimCLR). So a
step takes two passes. First the ranks share out the embedding of all views, without gradients, and gather them. Then
each micro-batch embeds its own views again, with gradients, and puts them in their places among the others: the
gradients of all micro-batches add up to that of the loss of the whole batch. That is one more forward pass, and no
rank ever holds the activations of more than a micro-batch. The encoder must give the same in both passes: no dropout,
and no BatchNorm.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep

GLOBAL_BATCH, MICRO_BATCH = 256, 64
HELD_OUT = 360
TEMPERATURE = 0.2


def encoder() -> nn.Sequential:
    """From images of shape (n, 1, 8, 8) to embeddings of shape (n, 32)."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.GroupNorm(4, 32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.GroupNorm(4, 64),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 32),
    )


def views(images: Tensor, epoch: int) -> Tensor:
    """Two views of each image, (n, 2, 1, 8, 8): moved, lighter or darker, with noise. The same on any rank."""
    generator = torch.Generator().manual_seed(epoch)
    n, both = len(images), []
    for _ in range(2):
        moves = torch.randint(-1, 2, (n, 2), generator=generator)
        rows = (torch.arange(8) - moves[:, :1]) % 8
        columns = (torch.arange(8) - moves[:, 1:]) % 8
        moved = images[torch.arange(n)[:, None, None], 0, rows[:, :, None], columns[:, None, :]]
        light = 0.6 + 0.8 * torch.rand(n, 1, 1, generator=generator)
        both.append((moved * light + 0.1 * torch.randn(n, 8, 8, generator=generator))[:, None])
    return torch.stack(both, 1)


def loss_of(first: Tensor, second: Tensor) -> Tensor:
    """SimCLR's loss of n images from the embeddings of their two views, each (n, width): a mean over all 2n views."""
    embedded = F.normalize(torch.cat([first, second]), dim=1)
    scores = embedded @ embedded.T / TEMPERATURE
    scores = scores.masked_fill(torch.eye(len(scores), dtype=torch.bool, device=scores.device), float("-inf"))
    n = len(first)
    return F.cross_entropy(scores, torch.arange(2 * n, device=scores.device).roll(n))


def embed(model: nn.Module, pairs: Tensor) -> Tensor:
    """Of views of shape (n, 2, 1, 8, 8): (n, 2, width)."""
    return model(pairs.flatten(0, 1)).unflatten(0, (-1, 2))


def main(epochs: int = 30) -> float:
    """Train; how many held-out digits have a nearest training image of their own kind."""
    with lockstep.Run(seed=0) as run:
        raw = load_digits()
        images = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1) / 16
        labels = torch.tensor(raw.target)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        train, test = order[HELD_OUT:], order[:HELD_OUT]
        known, known_labels = images[train].to(run.device), labels[train].to(run.device)

        model = run.model(encoder())
        run.optimizer(torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4))
        # What the loader hands out is places in an order that all ranks know, so each knows what else is in the step.
        # The short step at the end is left out: in it, each view would have fewer others to be told from.
        places = run.loader(
            torch.arange(len(train)), global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH, shuffle=False, drop_last=True
        )
        held_out = run.loader((images[test], labels[test]), global_batch=HELD_OUT, shuffle=False)

        def embed_step(pairs: Tensor) -> Tensor:
            """All embeddings of a step, (GLOBAL_BATCH, 2, width), without gradients. Collective."""
            parts = pairs.split(MICRO_BATCH)  # as the micro-batches are: other sizes may give other bits
            with torch.no_grad():
                mine = {n: embed(model, parts[n]) for n in range(run.rank, len(parts), run.world_size)}
            found = {n: part.to(run.device) for rank in run.gather(mine) for n, part in rank.items()}
            return torch.cat([found[n] for n in range(len(parts))])

        def evaluate() -> float:
            model.eval()
            with torch.no_grad():
                table = F.normalize(model(known), dim=1)
            for digits, digit in run.evaluate(held_out):
                nearest = (F.normalize(model(digits), dim=1) @ table.T).argmax(1)
                run.measure(accuracy=known_labels[nearest] == digit)
            return run.metrics["accuracy"]

        for epoch in run.epochs(epochs):
            shuffled = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))]
            pairs = views(images[shuffled], epoch)
            embedded_step = -1
            for mine in run.train(places):
                start = int(mine[0]) // GLOBAL_BATCH * GLOBAL_BATCH
                if embedded_step != run.progress.step:  # this rank's first micro-batch of the step
                    embedded_step = run.progress.step
                    embedded = embed_step(pairs[start : start + GLOBAL_BATCH].to(run.device))
                own = embed(model, pairs[mine.cpu()].to(run.device))
                everything = embedded.clone()
                everything[mine - start] = own
                loss = loss_of(everything[:, 0], everything[:, 1])
                # `run.step` weighs the micro-batch by its part of the step, but these gradients are to be added up: so
                # the gradient is taken as many times as there are micro-batches, and the loss stays what it is.
                run.step(loss.detach() + (loss - loss.detach()) * (GLOBAL_BATCH / len(mine)))
            if (epoch + 1) % 10 == 0:
                evaluate()
                run.log(epoch=epoch + 1)
        accuracy = evaluate()
        run.say(f"{accuracy:.4f} of {HELD_OUT} held-out digits have a nearest training image of their own kind")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30)
    options = parser.parse_args()
    accuracy = main(**vars(options))
    if options.epochs >= 30:  # fewer are for a try
        assert accuracy >= 0.9, f"accuracy {accuracy:.4f}, expected 0.9 or more"
