# /// script
# requires-python = ">=3.11"
# dependencies = ["torch-lockstep", "scikit-learn>=1.5"]
# ///
"""A search over convolutional networks as in Propulate's tutorial, each network trained on several ranks.

python search_convnet.py --trials 4
lockstep tune --workers 2 --ranks-per-worker 2 --islands 2 search_convnet.py

How many convolutions, which activation, learning rate and decay; Adadelta with StepLR, and a trial ends after five
epochs without a better loss. In place of MNIST, which would have to be downloaded, digits that scikit-learn ships,
enlarged to 28 x 28.
"""

import argparse
import functools

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import lockstep
from lockstep.tune import Choice, Float, Int

SPACE = {
    "conv_layers": Int(2, 10),
    "activation": Choice("relu", "sigmoid", "tanh"),
    "lr": Float(1e-2, 2.0, log=True),
    "gamma": Float(0.5, 0.999),
}
ACTIVATIONS = {"relu": nn.ReLU, "sigmoid": nn.Sigmoid, "tanh": nn.Tanh}
HELD_OUT = 360


class ConvNet(nn.Module):
    """Convolutions of 3 x 3 with 8 channels, the first two followed by max-pooling, and a linear layer."""

    def __init__(self, conv_layers: int, activation: str) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for number in range(conv_layers):
            layers += [nn.Conv2d(1 if number == 0 else 8, 8, 3, padding=1), ACTIVATIONS[activation]()]
            layers += [nn.MaxPool2d(2)] if number < 2 else []
        self.convolutions = nn.Sequential(*layers)
        self.head = nn.Linear(8 * 7 * 7, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Scores of the ten digits, for images of shape (n, 1, 28, 28)."""
        return self.head(self.convolutions(images).flatten(1))


@functools.cache
def digits(samples: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """``samples`` images of shape (1, 28, 28) to train on, up to 1437, and 360 to judge by."""
    raw = load_digits()
    images = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1) / 16
    images = nn.functional.interpolate(images, size=28, mode="bilinear", align_corners=False)
    labels = torch.tensor(raw.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[HELD_OUT : HELD_OUT + samples], order[:HELD_OUT]
    return (images[train], labels[train]), (images[test], labels[test])


def objective(run: lockstep.Run, params: dict, epochs: int, samples: int) -> float:
    """The lowest loss on the held-out digits of all epochs."""
    train, test = digits(samples)
    model = run.model(ConvNet(params["conv_layers"], params["activation"]))
    optimizer = run.optimizer(torch.optim.Adadelta(model.parameters(), lr=params["lr"]))
    batches = run.loader(train, global_batch=64, micro_batch=16)
    held_out = run.loader(test, global_batch=HELD_OUT, micro_batch=90, shuffle=False)
    # Schedulers step once for each optimizer step: a decay for each epoch comes every len(batches) steps.
    run.scheduler(torch.optim.lr_scheduler.StepLR(optimizer, step_size=len(batches), gamma=params["gamma"]))
    best = float("inf")
    for _ in run.epochs(epochs):
        for images, labels in run.train(batches):
            run.step(nn.functional.cross_entropy(model(images), labels))
        for images, labels in run.evaluate(held_out):
            run.measure(val_loss=nn.functional.cross_entropy(model(images), labels))
        best = min(best, run.metrics["val_loss"])
        run.report(run.metrics["val_loss"])
    return best


def main(trials: int = 20, epochs: int = 20, samples: int = 1437) -> None:
    """Search, and say what was found."""
    result = lockstep.tune(
        functools.partial(objective, epochs=epochs, samples=samples),
        SPACE,
        trials=trials,
        stopping="patience:5",
    )
    for island, best in result.top_by_island(1).items():
        print(
            f"island {island}: loss {best[0].loss:.4f} with {dict(best[0].params)}" if best else f"island {island}: -"
        )
    if len(result.trials) >= 20 and epochs >= 20 and samples >= 1437:  # fewer are for a try
        assert result.best.loss <= 0.25, f"loss {result.best.loss:.4f}, expected 0.25 or less"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=20, help="of each trial, at most")
    parser.add_argument("--samples", type=int, default=1437, help="to train on")
    main(**vars(parser.parse_args()))
