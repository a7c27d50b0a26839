# /// script
# requires-python = ">=3.11"
# dependencies = ["torch-lockstep", "torchvision", "scikit-learn>=1.5"]
# ///
"""Torchvision's ResNet-50 as a pipeline of two: one half of the layers on each rank.

lockstep run --nproc-per-node 2 --strategy pipeline resnet_pipeline.py
lockstep run --nproc-per-node 4 --strategy pipeline:stages=2 resnet_pipeline.py

The second line is two pipelines side by side. Nothing in this file knows of stages: the model is handed over as it is,
with the loss function, and any other strategy takes it, too. The images are handwritten digits of 32 pixels each way.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep
from vision import torchvision

HELD_OUT = 360


def digits(samples: int | None, pixels: int) -> tuple[TensorDataset, TensorDataset]:
    """Digits in three equal colours, of so many pixels each way; 360 of them held out."""
    raw = load_digits()
    images = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1) / 16 - 0.3
    labels = torch.tensor(raw.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))

    def enlarged(picks: Tensor) -> TensorDataset:
        large = F.interpolate(images[picks], size=(pixels, pixels), mode="bilinear")
        return TensorDataset(large.expand(-1, 3, -1, -1).contiguous(), labels[picks])

    return enlarged(order[HELD_OUT:][:samples]), enlarged(order[:HELD_OUT][:samples])


def main(epochs: int = 3, samples: int | None = None, pixels: int = 32) -> float:
    """Train on the first so many digits (None: all); the accuracy on those held out."""
    with lockstep.Run(seed=0) as run:
        train, test = digits(samples, pixels)
        model = run.model(torchvision("models").resnet50(weights=None, num_classes=10))
        optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=5e-4))
        # A pipeline of two stages is idle for one part in nine with eight micro-batches: more would be better, but
        # BatchNorm needs some images in each.
        batches = run.loader(train, global_batch=128, micro_batch=16, drop_last=len(train) >= 128)
        held_out = run.loader(test, global_batch=128, micro_batch=16, shuffle=False)
        run.scheduler(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs * len(batches)))
        for epoch in run.epochs(epochs):
            for images, labels in run.train(batches):
                run.step(F.cross_entropy, images, labels)
            run.log(epoch=epoch + 1)
        for images, labels in run.evaluate(held_out):
            run.measure(accuracy=model(images).argmax(1) == labels)
        accuracy = run.metrics["accuracy"]
        run.say(f"accuracy on {len(test)} held-out digits: {accuracy:.4f}")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, help="so many digits only")
    parser.add_argument("--pixels", type=int, default=32, help="of an image, each way")
    main(**vars(parser.parse_args()))
