# /// script
# requires-python = ">=3.11"
# dependencies = ["torch-lockstep"]
# ///
"""A recurrent language model cut over two machines by RPC, with a distributed optimizer: for models as large as that.

lockstep run --nproc-per-node 2 rnn_rpc.py

    rank 0, trainer    characters ──────────────►  LSTM  ──────────────► loss
                                 │             ▲        │             ▲
    rank 1, server               └► embedding ─┘        └► decoder ───┘

The backward pass follows the calls (`dist_autograd`), and each rank updates the parameters that lie on it
(`DistributedOptimizer`). There is no `lockstep.Run` here, only the launcher.
"""

import argparse
import math
import os
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer
from torch.nn import functional as F

import lockstep

CHARACTERS = 128
COLUMNS, STRETCH = 16, 32  # pieces of text side by side, and how far back the gradient goes


class Embedding(nn.Module):
    """On the server: rows for characters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(CHARACTERS, width)

    def forward(self, characters: Tensor) -> Tensor:
        """(columns, length, width), for (columns, length)."""
        return self.table(characters)


class Decoder(nn.Module):
    """On the server: scores of the next character."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scores = nn.Linear(width, CHARACTERS)

    def forward(self, states: Tensor) -> Tensor:
        """(columns, length, CHARACTERS), for (columns, length, width)."""
        return self.scores(states)


def parameters_of(module: rpc.RRef) -> list[rpc.RRef]:
    """Run where the module lies: references to its parameters."""
    return [rpc.RRef(parameter) for parameter in module.local_value().parameters()]


class Model(nn.Module):
    """On the trainer: the LSTM, and references to what lies on the server."""

    def __init__(self, server: str, width: int = 64) -> None:
        super().__init__()
        self.embedding = rpc.remote(server, Embedding, (width,))
        self.rnn = nn.LSTM(width, width, batch_first=True)
        self.decoder = rpc.remote(server, Decoder, (width,))

    def forward(self, characters: Tensor, hidden: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Scores of the next characters, and the state to go on from."""
        states, hidden = self.rnn(self.embedding.rpc_sync().forward(characters), hidden)
        return self.decoder.rpc_sync().forward(states), hidden

    def all_parameters(self) -> list[rpc.RRef]:
        """References to the parameters of both ranks."""
        remote = [rpc.rpc_sync(part.owner(), parameters_of, (part,)) for part in (self.embedding, self.decoder)]
        return [*(rpc.RRef(parameter) for parameter in self.rnn.parameters()), *remote[0], *remote[1]]


def train(steps: int) -> float:
    """On the trainer: bits per character over the last tenth of the steps."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")
    columns = torch.tensor(list(text[: len(text) // COLUMNS * COLUMNS])).view(COLUMNS, -1)
    model = Model("server")
    optimizer = DistributedOptimizer(torch.optim.Adam, model.all_parameters(), lr=5e-3)
    hidden, losses = None, []
    for step in range(steps):
        here = step * STRETCH % (columns.shape[1] - STRETCH)
        stretch = columns[:, here : here + STRETCH + 1]
        with dist_autograd.context() as context:
            scores, hidden = model(stretch[:, :-1], hidden)
            loss = F.cross_entropy(scores.flatten(0, 1), stretch[:, 1:].flatten())
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        hidden = tuple(state.detach() for state in hidden)
        losses.append(loss.item() / math.log(2))
        if step % 50 == 49:
            print(f"step {step + 1}: {losses[-1]:.3f} bits per character", flush=True)
    last = losses[-max(1, steps // 10) :]
    return sum(last) / len(last)


def main(steps: int = 300) -> float | None:
    """Train; on the trainer the bits per character at the end."""
    world = lockstep.World.from_env(os.environ)
    if world.size != 2:
        raise SystemExit("one rank trains and one serves: lockstep run --nproc-per-node 2 rnn_rpc.py")
    os.environ.update(world.rank_variables())  # whichever launcher it was: what torch reads
    torch.manual_seed(world.rank)
    torch.set_num_threads(1)
    rpc.init_rpc("trainer" if world.leads else "server", rank=world.rank, world_size=world.size)
    bits = train(steps) if world.leads else None
    rpc.shutdown()  # when both have come to it
    return bits


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    bits = main(**vars(options))
    if bits is not None:
        print(f"{bits:.3f} bits per character over the last tenth of the steps")
        if options.steps >= 300:  # fewer are for a try
            assert bits <= 3.6, f"{bits:.3f} bits per character, expected 3.6 or fewer"
