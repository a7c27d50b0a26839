# /// script
# requires-python = ">=3.11"
# dependencies = ["torch-lockstep", "torchvision"]
# ///
"""The ConvNet that guides to distributed training show, on MNIST.

python mnist.py --data data
lockstep run --nproc-per-node 2 mnist.py --data data --epochs 2

It downloads 12 MB into --data, once on each machine.
"""

import argparse
import math

import torch
from torch import Tensor, nn

import lockstep
from vision import torchvision

GLOBAL_BATCH = 256


class ConvNet(nn.Module):
    """Two convolutions of 5x5, with 16 and 32 channels, and one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
        self.layer2 = nn.Sequential(nn.Conv2d(16, 32, 5, padding=2), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2))
        self.fc = nn.Linear(7 * 7 * 32, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Scores of the ten digits, for bytes of shape (n, 28, 28)."""
        scaled = images.unsqueeze(1).float() / 255
        return self.fc(self.layer2(self.layer1(scaled)).flatten(1))


def main(data: str = "data", epochs: int = 1) -> float:
    """Train; the accuracy on the test images."""
    with lockstep.Run(seed=0) as run:
        with run.leader_first():  # the leader of each machine downloads; the others find it done
            sets = [torchvision("datasets").MNIST(data, train=train, download=True) for train in (True, False)]
        # Bytes in memory, turned into numbers by the model: micro-batches are cut out of them without a loader process.
        train, test = [(images.data, images.targets) for images in sets]
        model = run.model(ConvNet())
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
        steps = epochs * math.ceil(len(train[0]) / GLOBAL_BATCH)
        run.scheduler(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps))
        batches = run.loader(train, global_batch=GLOBAL_BATCH, micro_batch=GLOBAL_BATCH // 4)
        held_out = run.loader(test, global_batch=1024, shuffle=False)
        for epoch in run.epochs(epochs):
            for images, labels in run.train(batches):
                run.step(nn.functional.cross_entropy(model(images), labels))
            run.log(epoch=epoch + 1)  # the loss here is the mean over all samples of all ranks
        loss, right, samples = 0.0, 0, 0
        for images, labels in run.evaluate(held_out):
            scores = model(images)
            if not run.counts:  # under some strategies a rank computes along only to meet the others
                continue
            loss += nn.functional.cross_entropy(scores, labels, reduction="sum").item()
            right += int((scores.argmax(1) == labels).sum())
            samples += len(labels)
        # Each rank has seen its part of the test images, each image once: sums over ranks make means over images.
        loss, right, samples = run.sum(loss), run.sum(right), run.sum(samples)
        run.say(f"{right} of {samples} test images are right, mean loss {loss / samples:.4f}")
    assert samples == len(test[0])
    return right / samples


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="data", help="where MNIST is, or is downloaded to")
    parser.add_argument("--epochs", type=int, default=1)
    accuracy = main(**vars(parser.parse_args()))
    assert accuracy >= 0.97, f"accuracy {accuracy:.4f}, expected 0.97 or more"
