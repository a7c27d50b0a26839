# /// script
# requires-python = ">=3.11"
# dependencies = ["torch-lockstep", "scikit-learn>=1.5"]
# ///
"""A GAN with two optimizers, on real handwritten digits: a generator learns to write what a discriminator believes.

python gan.py
lockstep run --nproc-per-node 2 gan.py

How well it writes is told by a classifier that was trained on real digits only and judges held-out ones, too: whether
each digit is one that it knows for sure, and whether all ten of them come.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep

NOISE = 32
WRITTEN = 1024


class Generator(nn.Sequential):
    """Digits of shape (n, 64) from noise of shape (n, NOISE)."""

    def __init__(self, width: int = 128) -> None:
        super().__init__(
            nn.Linear(NOISE, width),
            nn.BatchNorm1d(width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, width),
            nn.BatchNorm1d(width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, 64),
            nn.Sigmoid(),
        )


class Discriminator(nn.Sequential):
    """How real each of n digits looks, shape (n, 1): above 0, rather real than written."""

    def __init__(self, width: int = 128) -> None:
        super().__init__(
            nn.Linear(64, width),
            nn.LeakyReLU(0.2),
            nn.Dropout(0.3),
            nn.Linear(width, width),
            nn.LeakyReLU(0.2),
            nn.Dropout(0.3),
            nn.Linear(width, 1),
        )


class Judge:
    """A classifier of real digits, and what it says of others."""

    def __init__(self, digits: Tensor, labels: Tensor) -> None:
        self.classifier = LogisticRegression(max_iter=200).fit(digits.numpy(), labels.numpy())

    def score(self, digits: Tensor) -> float:
        """The inception score, from 1 to 10: e to the power of how much one digit tells of which of the ten it is.

        10 where each digit is surely one of the ten, and each of the ten is as frequent as the others. 1 where no
        digit can be read, and where all are the same one. Salimans et al., Improved techniques for training GANs, 2016.
        """
        each = torch.from_numpy(self.classifier.predict_proba(digits.double().numpy())).clamp_min(1e-12)
        overall = each.mean(0, keepdim=True)
        return float((each * (each / overall).log()).sum(1).mean().exp())


def main(epochs: int = 120) -> tuple[float, float]:
    """Train; the scores of held-out real digits and of written ones."""
    with lockstep.Run(seed=0) as run:
        raw = load_digits()
        digits, labels = torch.tensor(raw.data, dtype=torch.float32) / 16, torch.tensor(raw.target)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        train, test = order[360:], order[:360]
        judge = Judge(digits[train], labels[train])

        generator, discriminator = run.model(Generator()), run.model(Discriminator())
        writes = run.optimizer(torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999)))
        judges = run.optimizer(torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999)))
        batches = run.loader(digits[train], global_batch=64, micro_batch=16)

        def written() -> Tensor:
            noise = torch.randn(WRITTEN, NOISE, generator=torch.Generator().manual_seed(1))
            generator.eval()
            with torch.no_grad():
                return generator(noise.to(run.device)).cpu()

        for epoch in run.epochs(epochs):
            for real in run.train(batches):
                fake = generator(torch.randn(len(real), NOISE, device=run.device))
                # Both losses see the same parameters: the optimizers step at the end of the step, and so, on whichever
                # rank its last micro-batch is, none is ahead of the other.
                on_real, on_fake = discriminator(real), discriminator(fake.detach())
                run.step(F.softplus(-on_real).mean() + F.softplus(on_fake).mean(), optimizer=judges)
                run.step(F.softplus(-discriminator(fake)).mean(), optimizer=writes)
                run.measure(believed=(on_fake > 0).squeeze(1))
            if (epoch + 1) % 20 == 0:
                run.log(epoch=epoch + 1, score=judge.score(written()))
        held_out, fakes = judge.score(digits[test]), written()
        score = judge.score(fakes)
        run.say(f"inception score of written digits: {score:.2f}, of held-out real ones: {held_out:.2f}")
        run.say(drawn(fakes[:8]))
    return held_out, score


def drawn(digits: Tensor) -> str:
    """Digits of shape (n, 64) beside each other, in characters."""
    rows = (digits.view(-1, 8, 8) * 4.99).long().permute(1, 0, 2).tolist()
    return "\n".join("  ".join("".join(" .:*#"[shade] * 2 for shade in row) for row in line) for line in rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=120)
    options = parser.parse_args()
    held_out, score = main(**vars(options))
    if options.epochs >= 120:  # fewer are for a try
        assert score >= 0.6 * held_out, f"score {score:.2f}, expected 0.6 of {held_out:.2f} or more"
