# /// script
# requires-python = ">=3.11"
# dependencies = ["torch-lockstep"]
# ///
"""Word embeddings of a real text that every Python brings along: the language reference behind `help()`.

python embedding.py
lockstep run --nproc-per-node 3 --strategy hybrid embedding.py

From the three words on either side it learns to guess the one between them. Under ``hybrid`` the table of words lies
on the last rank: the others look up the rows that they need, and divide the rest of the work. Either way it ends with
the same words in the same places, bit for bit.
"""

import argparse
import re
from collections import Counter
from pydoc_data import topics

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep

AROUND = 3  #: words on either side
COMMON = 5  #: how often a word must come to be learned
GLOBAL_BATCH, MICRO_BATCH = 512, 128
HELD_OUT = 20  #: one of so many windows is


def read() -> list[str]:
    """The words of the reference, a thousand or more different ones."""
    return [word for _, text in sorted(topics.topics.items()) for word in re.findall(r"[a-z_]+", text.lower())]


def windows(words: list[str]) -> tuple[list[str], Tensor, Tensor]:
    """The words that are learned, by number; the numbers around each place, and the one at it. Number 0 is all others.

    The second is of shape (places, 2 * AROUND), the third of (places,).
    """
    known = ["", *(word for word, times in Counter(words).most_common() if times >= COMMON)]
    numbers = {word: number for number, word in enumerate(known)}
    text = torch.tensor([numbers.get(word, 0) for word in words]).unfold(0, 2 * AROUND + 1, 1)
    text = text[text[:, AROUND] > 0]
    return known, torch.cat([text[:, :AROUND], text[:, AROUND + 1 :]], 1), text[:, AROUND].clone()


class Guess(nn.Module):
    """Scores of all words, from those around."""

    def __init__(self, words: int, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.scores = nn.Sequential(nn.Flatten(), nn.Linear(2 * AROUND * width, 64), nn.ReLU(), nn.Linear(64, words))

    def forward(self, around: Tensor) -> Tensor:
        """Of shape (places, words), for the numbers of words of shape (places, 2 * AROUND)."""
        return self.scores(self.embedding(around))

    def neighbours(self, word: int, count: int) -> list[int]:
        """The words that lie in the most similar direction, the nearest first."""
        table = self.embedding(torch.arange(self.embedding.num_embeddings))
        likeness = nn.functional.cosine_similarity(table, table[word], dim=1)
        return likeness.topk(count + 1).indices.tolist()[1:]


def main(epochs: int = 6, places: int | None = None) -> tuple[float, float]:
    """Train on the first so many places (None: all); the accuracy on those held out, and that of the commonest word."""
    known, around, middle = windows(read())
    held_out = torch.arange(len(middle[:places])) % HELD_OUT == 0
    train, test = (TensorDataset(around[:places][m], middle[:places][m]) for m in (~held_out, held_out))
    with lockstep.Run(seed=0) as run:
        net = Guess(len(known))
        model = run.model(net)
        run.optimizer(torch.optim.Adagrad(model.parameters(), lr=0.05))
        batches = run.loader(train, global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH)
        tests = run.loader(test, global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH, shuffle=False)

        def evaluate() -> float:
            for words, word in run.evaluate(tests):
                run.measure(accuracy=model(words).argmax(1) == word)
            return run.metrics["accuracy"]

        for epoch in run.epochs(epochs):
            for words, word in run.train(batches):
                run.step(nn.functional.cross_entropy, words, word)
            evaluate()
            run.log(epoch=epoch + 1)
        accuracy = evaluate()  # also where a resumed run had no epoch left to do
        commonest = (test.tensors[1] == train.tensors[1].mode().values).double().mean().item()
        run.say(f"{accuracy:.3f} of the words are guessed; always the commonest one would be {commonest:.3f}")
        if run.leads:
            with torch.no_grad():
                for word in ("integer", "list", "class"):
                    near = [known[n] for n in net.neighbours(known.index(word), 5)]
                    run.say(f"near {word}: {', '.join(near)}")
    return accuracy, commonest


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    options = parser.parse_args()
    accuracy, commonest = main(**vars(options))
    if options.epochs >= 6:  # fewer are for a try
        assert accuracy > 3 * commonest, f"accuracy {accuracy:.3f}, expected more than three times {commonest:.3f}"
