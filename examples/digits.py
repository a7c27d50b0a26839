# /// script
# requires-python = ">=3.11"
# dependencies = ["torch-lockstep", "scikit-learn>=1.5"]
# ///
"""Real handwritten digits, which scikit-learn ships: nothing to download, done in less than a minute.

python digits.py
lockstep run --nproc-per-node 2 digits.py

On any number of ranks up to 8 it ends with the same model, bit for bit.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import lockstep

GLOBAL_BATCH = 128
HELD_OUT = 360


class Shifted(Dataset[tuple[Tensor, Tensor]]):
    """Images that are moved by up to one pixel each time they are read, at random: the run seeds this augmentation."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = nn.functional.pad(images, (1, 1, 1, 1))
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        down, right = torch.randint(3, (2,)).tolist()
        return self.images[index, :, down : down + 8, right : right + 8], self.labels[index]


class Net(nn.Module):
    """Two convolutions and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.25),
        )
        self.head = nn.Linear(64 * 4 * 4, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Scores of the ten digits, for images of shape (n, 1, 8, 8)."""
        return self.head(self.features(images).flatten(1))


def digits() -> tuple[Shifted, TensorDataset]:
    """1437 images to train on and 360 held out, always the same ones."""
    raw = load_digits()
    images = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(raw.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[HELD_OUT:], order[:HELD_OUT]
    return Shifted(images[train], labels[train]), TensorDataset(images[test], labels[test])


def main(epochs: int = 10) -> float:
    """Train; the accuracy on the held-out images."""
    with lockstep.Run(seed=0) as run:
        train, test = digits()
        batches = run.loader(train, global_batch=GLOBAL_BATCH, micro_batch=16)
        held_out = run.loader(test, global_batch=HELD_OUT, shuffle=False)
        model = run.model(Net())
        optimizer = run.optimizer(
            torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True, weight_decay=5e-4)
        )
        run.scheduler(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs * len(batches)))

        def evaluate() -> float:
            for images, labels in run.evaluate(held_out):
                run.measure(accuracy=model(images).argmax(1) == labels)
            return run.metrics["accuracy"]

        for _ in run.epochs(epochs):
            for images, labels in run.train(batches):
                run.step(nn.functional.cross_entropy, images, labels)
            evaluate()
            run.log()
        accuracy = evaluate()  # also where a resumed run had no epoch left to do
        run.say(f"accuracy on {HELD_OUT} held-out digits: {accuracy:.4f}")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    accuracy = main(**vars(options))
    if options.epochs >= 10:  # fewer are for a try
        assert accuracy >= 0.97, f"accuracy {accuracy:.4f}, expected 0.97 or more"
