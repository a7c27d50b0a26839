# /// script
# requires-python = ">=3.11"
# dependencies = ["torch-lockstep"]
# ///
"""A small GPT that learns to write, character by character, as Python's own documentation does.

python gpt.py
lockstep run --nproc-per-node 2 gpt.py

The text is in every Python (``pydoc_data.topics``): nothing to download. Every tenth topic is held out; how well the
model foretells those is told in bits per character, which do not depend on the number of ranks.
"""

import argparse
import math
from dataclasses import dataclass, replace
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep


@dataclass(frozen=True)
class Size:
    """How large the model is, how long it trains, and what it must then reach."""

    context: int = 64  #: characters that it sees
    width: int = 96
    layers: int = 3
    heads: int = 4
    windows: int = 64  #: per step
    every: int = 16  #: a window of the training text begins at every so many characters
    epochs: int = 2
    bits: float = 2.4  #: per character of the held-out topics, at most


QUICK = Size(context=32, width=64, layers=1, every=64, epochs=1, bits=3.9)


class Block(nn.Module):
    """Attention to what came before, then a layer of two linear maps; each adds to what it was given."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.before_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """``x`` of shape (n, characters, width), and the same comes back."""
        n, length, width = x.shape
        apart = self.queries_keys_values(self.before_attention(x)).view(n, length, 3, self.heads, width // self.heads)
        queries, keys, values = apart.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(n, length, width))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    """From characters to scores of the character that follows each of them."""

    def __init__(self, size: Size, characters: int) -> None:
        super().__init__()
        self.context = size.context
        self.what = nn.Embedding(characters, size.width)
        self.where = nn.Parameter(0.02 * torch.randn(size.context, size.width))
        self.blocks = nn.Sequential(*(Block(size.width, size.heads) for _ in range(size.layers)))
        self.last = nn.LayerNorm(size.width)
        self.scores = nn.Linear(size.width, characters, bias=False)
        nn.init.normal_(self.what.weight, std=0.02)

    def forward(self, characters: Tensor) -> Tensor:
        """Scores of shape (n, length, characters of the alphabet), for numbers of shape (n, length)."""
        x = self.what(characters) + self.where[: characters.shape[1]]
        return self.scores(self.last(self.blocks(x)))


def text() -> tuple[str, Tensor, Tensor]:
    """The alphabet, and the texts to train on and held out, each a row of the alphabet's numbers."""
    names = sorted(topics)
    alphabet = "".join(sorted({character for name in names for character in topics[name]}))
    number_of = {character: number for number, character in enumerate(alphabet)}

    def numbers(of: list[str]) -> Tensor:
        return torch.tensor([number_of[character] for name in of for character in topics[name]])

    return alphabet, numbers([n for i, n in enumerate(names) if i % 10]), numbers(names[::10])


def write(model: nn.Module, beginning: Tensor, characters: int, context: int) -> Tensor:
    """``beginning`` and ``characters`` more, drawn one by one from what ``model`` expects."""
    written = beginning
    for _ in range(characters):
        scores = model(written[None, -context:])[0, -1]
        written = torch.cat([written, torch.multinomial(F.softmax(scores / 0.8, dim=0), 1)])
    return written


def main(size: Size | None = None) -> float:
    """Train; bits per character on the held-out topics."""
    size = size or Size()
    with lockstep.Run(seed=0, clip_norm=1.0) as run:
        alphabet, train, test = text()
        model = run.model(GPT(size, len(alphabet)))
        optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1))
        # Windows are views of one text: as many as wanted cost no memory. The held-out ones do not overlap but by the
        # character that one window ends with and the next begins with, so that each is foretold once.
        windows = train.unfold(0, size.context + 1, size.every)
        batches = run.loader(windows, global_batch=size.windows, micro_batch=size.windows // 4)
        held_out = run.loader(test.unfold(0, size.context + 1, size.context), global_batch=256, shuffle=False)
        steps = size.epochs * math.ceil(len(windows) / size.windows)
        run.scheduler(torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps + 1, pct_start=0.1))

        def evaluate() -> float:
            for characters in run.evaluate(held_out):
                scores = model(characters[:, :-1]).flatten(0, 1)
                nats = F.cross_entropy(scores, characters[:, 1:].flatten(), reduction="none")
                run.measure(bits=nats.view(len(characters), -1).mean(1) / math.log(2))
            return run.metrics["bits"]

        for epoch in run.epochs(size.epochs):
            for characters in run.train(batches):
                scores = model(characters[:, :-1]).flatten(0, 1)
                run.step(F.cross_entropy(scores, characters[:, 1:].flatten()))
            evaluate()
            run.log(epoch=epoch + 1)
        bits = evaluate()
        # All ranks write the same, for a model that is spread over ranks needs all of them; the leader tells.
        model.eval()
        with torch.no_grad():
            torch.manual_seed(0)
            sample = write(model, test[:20].to(run.device), 300, size.context)
        run.say("".join(alphabet[number] for number in sample.tolist()))
        run.say(f"{bits:.3f} bits per character of the held-out topics")
    return bits


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smaller model, for seconds")
    parser.add_argument("--epochs", type=int, help="2, or 1 with --quick")
    options = parser.parse_args()
    documented = QUICK if options.quick else Size()
    size = replace(documented, epochs=options.epochs or documented.epochs)
    bits = main(size)
    if size.epochs >= documented.epochs:  # fewer are for a try
        assert bits <= size.bits, f"{bits:.3f} bits per character, expected {size.bits} or fewer"
