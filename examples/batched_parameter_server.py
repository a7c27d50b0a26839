# /// script
# requires-python = ">=3.11"
# dependencies = ["torch-lockstep", "scikit-learn>=1.5"]
# ///
"""A parameter server over RPC that answers all trainers at once: it waits for a gradient of each, and steps once.

lockstep run --nproc-per-node 3 batched_parameter_server.py

Rank 0 holds the model, the others train. The function that they call is `rpc.functions.async_execution`: it returns a
promise, so no thread of the server is kept waiting, and the call that brings the last gradient keeps the promises of
all. There is no `lockstep.Run` here, only the launcher; `--strategy parameter-server` does this for any script, and
exactly.
"""

import argparse
import os
import threading

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed import rpc
from torch.futures import Future
from torch.nn import functional as F

import lockstep

BATCH = 32  # of each trainer
HELD_OUT = 360


def network() -> nn.Sequential:
    """Scores of the ten digits, for images of shape (n, 64)."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


class Server:
    """The model and its optimizer; trainers bring gradients and take parameters."""

    def __init__(self, trainers: int) -> None:
        torch.manual_seed(0)
        self.model = network()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.trainers = trainers
        self.lock = threading.Lock()
        self.answer: Future[list[Tensor]] = Future()
        self.came: dict[int, list[Tensor]] = {}

    def parameters(self) -> list[Tensor]:
        """As they are."""
        return [parameter.detach() for parameter in self.model.parameters()]

    def step(self, trainer: int, gradients: list[Tensor]) -> "Future[list[Tensor]]":
        """A promise of the parameters after the step that takes a gradient of each trainer."""
        with self.lock:
            answer = self.answer
            self.came[trainer] = gradients
            if len(self.came) < self.trainers:
                return answer
            # By number, not in the order in which they came: so the sum has the same bits each time.
            for parameter, *parts in zip(
                self.model.parameters(), *(self.came[n] for n in sorted(self.came)), strict=True
            ):
                parameter.grad = torch.stack(parts).mean(0)
            self.optimizer.step()
            self.answer, self.came = Future(), {}
        answer.set_result(self.parameters())
        return answer


served: list[Server] = []  #: on rank 0, the one that is there


def fetch() -> list[Tensor]:
    """Called by trainers, run on the server."""
    (server,) = served
    return server.parameters()


@rpc.functions.async_execution
def push(trainer: int, gradients: list[Tensor]) -> "Future[list[Tensor]]":
    """Called by trainers, run on the server: the parameters after the step."""
    (server,) = served
    return server.step(trainer, gradients)


def digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """1437 images and their labels to train on and 360 held out, always the same ones."""
    raw = load_digits()
    images, labels = torch.tensor(raw.data, dtype=torch.float32) / 16, torch.tensor(raw.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[HELD_OUT:], order[:HELD_OUT]
    return (images[train], labels[train]), (images[test], labels[test])


def train(rank: int, trainers: int, steps: int) -> None:
    """So many steps on this trainer's part of the images, each as long as all others need."""
    model, ((images, labels), _) = network(), digits()
    images, labels = images[rank - 1 :: trainers], labels[rank - 1 :: trainers]
    generator = torch.Generator().manual_seed(rank)
    current = rpc.rpc_sync("server", fetch)
    for _ in range(steps):
        for parameter, value in zip(model.parameters(), current, strict=True):
            parameter.data.copy_(value)
        picks = torch.randint(len(images), (BATCH,), generator=generator)
        loss = F.cross_entropy(model(images[picks]), labels[picks])
        current = rpc.rpc_sync("server", push, (rank, list(torch.autograd.grad(loss, list(model.parameters())))))


def main(steps: int = 200) -> float | None:
    """Train; on the server the accuracy on the held-out images."""
    world = lockstep.World.from_env(os.environ)
    if world.size < 2:
        raise SystemExit("a server needs a trainer: lockstep run --nproc-per-node 3 batched_parameter_server.py")
    os.environ.update(world.rank_variables())  # whichever launcher it was: what torch reads
    torch.set_num_threads(1)
    if world.leads:
        served.append(Server(world.size - 1))
    name = "server" if world.leads else f"trainer-{world.rank}"
    rpc.init_rpc(name, rank=world.rank, world_size=world.size)
    if not world.leads:
        train(world.rank, world.size - 1, steps)
    rpc.shutdown()  # when all have come to it
    if not world.leads:
        return None
    _, (images, labels) = digits()
    with torch.no_grad():
        return (served[0].model(images).argmax(1) == labels).float().mean().item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    accuracy = main(**vars(options))
    if accuracy is not None:
        print(f"accuracy on {HELD_OUT} held-out digits: {accuracy:.4f}")
        if options.steps >= 200:  # fewer are for a try
            assert accuracy >= 0.9, f"accuracy {accuracy:.4f}, expected 0.9 or more"
