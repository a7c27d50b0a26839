# /// script
# requires-python = ">=3.11"
# dependencies = ["torch-lockstep", "transformers>=4.56", "datasets>=3.0"]
# ///
"""A causal language model of `transformers` on a stream of `datasets`, shuffled again in each epoch.

python streaming.py
lockstep run --nproc-per-node 2 streaming.py

The text is in every Python (``pydoc_data.topics``) and the model, a small GPT-2, begins with random weights: nothing to
download. The stream is read as it is, without a word about ranks: every rank reads it and keeps its share.
"""

import argparse
import math
from collections.abc import Iterator
from pydoc_data.topics import topics
from typing import Any

import torch
from datasets import IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, default_data_collator

import lockstep

END = 0  #: the token that ends a text; the others are its bytes, and only 7 bits of them


def texts(names: list[str]) -> Iterator[dict[str, str]]:
    """The topics of these names, one by one."""
    for name in names:
        yield {"text": topics[name]}


def tokenize(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
    """Each text as numbers below 128, one for each character."""
    return {"input_ids": [[*text.encode("ascii", "replace"), END] for text in rows["text"]]}


def in_blocks(rows: dict[str, list[list[int]]], length: int) -> dict[str, list[list[int]]]:
    """The texts laid end to end, cut into blocks of ``length`` tokens; what is left at the end is left out."""
    tokens = [token for text in rows["input_ids"] for token in text]
    blocks = [tokens[start : start + length] for start in range(0, len(tokens) - length + 1, length)]
    return {"input_ids": blocks, "labels": blocks}


def stream(names: list[str], length: int) -> IterableDataset:
    """Blocks of the topics' text, made while they are read."""
    rows = IterableDataset.from_generator(texts, gen_kwargs={"names": names})
    rows = rows.map(tokenize, batched=True, batch_size=16, remove_columns=["text"])
    return rows.map(in_blocks, batched=True, batch_size=16, fn_kwargs={"length": length})


def main(epochs: int = 4, length: int = 128, limit: int | None = None) -> float:
    """Train on the first so many topics (None: all but the held-out ones); bits per character of those held out."""
    with lockstep.Run(seed=0, clip_norm=1.0) as run:
        names = sorted(topics)
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=128,
                n_positions=length,
                n_embd=96,
                n_layer=3,
                n_head=4,
                bos_token_id=END,
                eos_token_id=END,
            )
        )
        model = run.model(model)
        run.optimizer(torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1))
        # The seed is the stream's own, and `run.loader` tells it the epoch: another order in each, on all ranks alike.
        train = stream([name for n, name in enumerate(names) if n % 10][:limit], length).shuffle(
            seed=0, buffer_size=1000
        )
        test = stream(names[::10][:limit], length)
        batches = run.loader(train, global_batch=32, micro_batch=8, collate_fn=default_data_collator)
        held_out = run.loader(test, global_batch=32, micro_batch=8, collate_fn=default_data_collator)

        def evaluate() -> float:
            for batch in run.evaluate(held_out):
                # Blocks are equally long, so a mean over blocks is one over characters.
                run.measure(bits=model(**batch).loss / math.log(2))
            return run.metrics["bits"]

        for epoch in run.epochs(epochs):
            for batch in run.train(batches):
                run.step(model(**batch).loss)
            evaluate()
            run.log(epoch=epoch + 1)
        bits = evaluate()
        run.say(written(model, run.device))
        run.say(f"{bits:.3f} bits per character of the held-out topics")
    return bits


def written(model: Any, device: torch.device) -> str:
    """What the model writes. All ranks draw the same: a model that is spread over ranks needs all of them."""
    torch.manual_seed(0)
    model.eval()
    beginning = torch.tensor([[ord("T"), ord("h"), ord("e")]], device=device)
    tokens = model.generate(
        beginning,
        attention_mask=torch.ones_like(beginning),
        do_sample=True,
        max_new_tokens=min(100, model.config.n_positions - 3),
    )
    return bytes(tokens[0].tolist()).decode("ascii")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--limit", type=int, help="so many topics only")
    options = parser.parse_args()
    bits = main(**vars(options))
    if options.limit is None and options.epochs >= 4:  # less is for a try
        assert bits <= 3.4, f"{bits:.3f} bits per character, expected 3.4 or fewer"
