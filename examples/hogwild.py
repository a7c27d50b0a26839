# /// script
# requires-python = ">=3.11"
# dependencies = ["torch-lockstep", "scikit-learn>=1.5"]
# ///
"""Hogwild: the ranks of one machine train the same parameters in shared memory, without waiting and without locks.

lockstep run --nproc-per-node 2 hogwild.py

The parameters are views of one file in /dev/shm that all ranks map. Each rank trains on its own part of the digits and
adds to what it finds, also while others do: the result is another one each time. There is no `lockstep.Run` here, only
the launcher. Recht et al., Hogwild!, 2011.
"""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep

HELD_OUT = 360


def share_parameters(model: nn.Module) -> None:
    """Move the model's parameters into memory that all ranks of this machine have in common. Collective.

    They hold what rank 0 had. The file is gone from /dev/shm at once; the memory, when the last rank ends.
    """
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    path = [tempfile.mktemp(dir="/dev/shm", prefix="hogwild-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(path)
    if dist.get_rank() == 0:
        shared = torch.from_file(path[0], shared=True, size=flat.numel())
        shared.copy_(flat)
    dist.barrier()
    if dist.get_rank() > 0:
        shared = torch.from_file(path[0], shared=True, size=flat.numel())
    dist.barrier()
    if dist.get_rank() == 0:
        os.unlink(path[0])
    place = 0
    for parameter in model.parameters():
        parameter.data = shared[place : place + parameter.numel()].view_as(parameter)
        place += parameter.numel()


def digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """1437 images and their labels to train on and 360 held out, always the same ones."""
    raw = load_digits()
    images, labels = torch.tensor(raw.data, dtype=torch.float32) / 16, torch.tensor(raw.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[HELD_OUT:], order[:HELD_OUT]
    return (images[train], labels[train]), (images[test], labels[test])


def main(epochs: int = 15) -> float:
    """Train; the accuracy on the held-out images, the same on all ranks."""
    world = lockstep.World.from_env(os.environ)
    os.environ.update(world.rank_variables())  # whichever launcher it was: what torch reads
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=world.rank, world_size=world.size)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    share_parameters(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (images, labels), (test_images, test_labels) = digits()
    images, labels = images[world.rank :: world.size], labels[world.rank :: world.size]
    torch.manual_seed(world.rank)  # the order of its own part
    for epoch in range(epochs):
        for picks in torch.randperm(len(images)).split(16):
            optimizer.zero_grad()
            F.cross_entropy(model(images[picks]), labels[picks]).backward()
            optimizer.step()
        if world.leads and epoch % 5 == 4:
            with torch.no_grad():
                here = (model(test_images).argmax(1) == test_labels).float().mean()
            print(f"epoch {epoch + 1} of rank 0: accuracy {here:.4f}", flush=True)
    dist.barrier()  # nobody writes any more
    with torch.no_grad():
        accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
    dist.barrier()
    dist.destroy_process_group()
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=15)
    options = parser.parse_args()
    accuracy = main(**vars(options))
    if lockstep.World.from_env(os.environ).leads:
        print(f"accuracy on {HELD_OUT} held-out digits: {accuracy:.4f}")
    if options.epochs >= 15:  # fewer are for a try
        assert accuracy >= 0.9, f"accuracy {accuracy:.4f}, expected 0.9 or more"
