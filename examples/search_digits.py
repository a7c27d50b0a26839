# /// script
# requires-python = ">=3.11"
# dependencies = ["torch-lockstep", "scikit-learn>=1.5"]
# ///
"""A search for the hyperparameters of a small network on real handwritten digits, done in a minute on two CPU cores.

python search_digits.py                                   one trial at a time
lockstep tune --workers 2 search_digits.py                two at a time
lockstep tune --workers 1 --ranks-per-worker 2 search_digits.py

The losses of a trial are the same bits on any number of ranks.
"""

import argparse
import functools
import itertools

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import lockstep
from lockstep.tune import Choice, Float, Int

SPACE = {
    "hidden": Int(8, 256, log=True),
    "layers": Int(1, 4),
    "activation": Choice("relu", "tanh", "sigmoid"),
    "lr": Float(1e-2, 1.0, log=True),
    "momentum": Float(0.0, 0.95),
}
ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid}
HELD_OUT = 360


@functools.cache  # once in each process, however many trials it evaluates
def digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """1437 images to train on and 360 to judge by, always the same ones."""
    raw = load_digits()
    images, labels = torch.tensor(raw.data, dtype=torch.float32) / 16, torch.tensor(raw.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[HELD_OUT:], order[:HELD_OUT]
    return (images[train], labels[train]), (images[test], labels[test])


def net(hidden: int, layers: int, activation: str) -> nn.Module:
    """A network of ``layers`` hidden layers."""
    sizes = [64] + [hidden] * layers
    inner = [(nn.Linear(before, after), ACTIVATIONS[activation]()) for before, after in itertools.pairwise(sizes)]
    return nn.Sequential(*(part for pair in inner for part in pair), nn.Linear(hidden, 10))


def objective(run: lockstep.Run, params: dict) -> float:
    """The loss on the held-out digits after eight epochs; every rank of the trial calls it, with equal parameters."""
    train, test = digits()
    model = run.model(net(params["hidden"], params["layers"], params["activation"]))
    run.optimizer(torch.optim.SGD(model.parameters(), lr=params["lr"], momentum=params["momentum"]))
    batches = run.loader(train, global_batch=128, micro_batch=32)
    held_out = run.loader(test, global_batch=HELD_OUT, shuffle=False)
    for _ in run.epochs(8):
        for images, labels in run.train(batches):
            run.step(nn.functional.cross_entropy(model(images), labels))
        for images, labels in run.evaluate(held_out):
            run.measure(val_loss=nn.functional.cross_entropy(model(images), labels))
        run.report(run.metrics["val_loss"])  # a hopeless trial ends here, on all of its ranks
    return run.metrics["val_loss"]


def main(trials: int = 60) -> None:
    """Search, and say what was found."""
    result = lockstep.tune(objective, SPACE, trials=trials, seed=0, stopping="asha:eta=3,min=2")
    print(f"{result.counts['done']} trials were trained to their end, {result.counts['stopped']} were stopped early")
    for trial in result.top(3):
        print(f"trial {trial.number}: loss {trial.loss:.4f} with {dict(trial.params)}")
    if len(result.trials) >= 60:  # fewer, as with --trials, are for a try
        assert result.best.loss <= 0.25, f"loss {result.best.loss:.4f}, expected 0.25 or less"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=60)
    main(**vars(parser.parse_args()))
