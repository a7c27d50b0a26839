# /// script
# requires-python = ">=3.11"
# dependencies = ["torch-lockstep", "transformers>=4.56", "datasets>=3.0"]
# ///
"""Fine-tuning of a model of `transformers` on a data set of `datasets`: it learns to read numbers out.

python finetune.py
lockstep run --nproc-per-node 2 finetune.py
lockstep run --nproc-per-node 2 finetune.py --model DIRECTORY

Without ``--model`` it starts from a tiny T5 with random weights, and the text is made on the spot: nothing to download.
Each micro-batch is padded to its own longest text. The loss is a mean over the tokens that are not padding, and
``count=`` says how many these are. The model writes with ``model.generate``, and what counts is whether it is right.
"""

import argparse
import random
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    get_linear_schedule_with_warmup,
)

import lockstep

ONES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
ONES += [f"{word}teen" for word in ("thir", "four", "fif", "six", "seven", "eigh", "nine")]
TENS = [f"{word}ty" for word in ("twen", "thir", "for", "fif", "six", "seven", "eigh", "nine")]
HELD_OUT = 256


def in_words(number: int) -> str:
    """How one says a number below 10,000."""
    if number < 20:
        return ONES[number]
    for size, word in ((1000, "thousand"), (100, "hundred")):
        if number >= size:
            rest = f" {in_words(number % size)}" if number % size else ""
            return f"{in_words(number // size)} {word}{rest}"
    return TENS[number // 10 - 2] + (f" {ONES[number % 10]}" if number % 10 else "")


def numbers(samples: int) -> Dataset:
    """``samples`` different numbers below 10,000, small ones more often than large ones; in digits and in words."""
    draw, found = random.Random(0), dict[int, None]()
    while len(found) < samples:
        found[int(10 ** draw.uniform(0, 4)) if draw.random() < 0.3 else draw.randrange(10_000)] = None
    return Dataset.from_dict({"digits": [str(n) for n in found], "words": [in_words(n) for n in found]})


def tokenized(data: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """The same in tokens: `input_ids`, `attention_mask` and `labels`, each row as long as its text."""

    def tokenize(rows: dict[str, list[str]]) -> dict[str, Any]:
        return dict(tokenizer(rows["digits"], text_target=rows["words"], return_token_type_ids=False))

    return data.map(tokenize, batched=True, remove_columns=["digits", "words"])


def tiny() -> tuple[T5ForConditionalGeneration, PreTrainedTokenizerBase]:
    """A T5 with random weights, and a tokenizer whose tokens are the ten digits and the words for numbers."""
    words = ["<pad>", "</s>", "<unk>", *"0123456789", *ONES, *TENS, "hundred", "thousand"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Digits(individual_digits=True)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    config = T5Config(
        vocab_size=len(words),
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        initializer_factor=0.5,
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=32
    )
    return T5ForConditionalGeneration(config), fast


def main(model: str | None = None, epochs: int = 12, samples: int = 2048) -> float:
    """Train; the part of the held-out numbers that are read out without a mistake."""
    with lockstep.Run(seed=0, clip_norm=1.0) as run:
        if model is None:
            net, tokenizer = tiny()
        else:
            net, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)

        data = tokenized(numbers(samples + HELD_OUT), tokenizer)
        train, test = data.select(range(samples)), data.select(range(samples, samples + HELD_OUT))
        net = run.model(net)
        pad = DataCollatorForSeq2Seq(tokenizer, model=net)  # each micro-batch to its longest; labels with -100
        optimizer = run.optimizer(torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.01))
        batches = run.loader(train, global_batch=64, micro_batch=16, collate_fn=pad)
        held_out = run.loader(test, global_batch=HELD_OUT, micro_batch=HELD_OUT // 4, shuffle=False, collate_fn=pad)
        steps = epochs * len(batches)
        run.scheduler(get_linear_schedule_with_warmup(optimizer, steps // 10, steps + 1))

        def right(batch: Any) -> Tensor:
            written = net.generate(batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=12)
            said = tokenizer.batch_decode(written, skip_special_tokens=True)
            meant = tokenizer.batch_decode(
                batch["labels"].masked_fill(batch["labels"] == -100, tokenizer.pad_token_id), skip_special_tokens=True
            )
            return torch.tensor([each == other for each, other in zip(said, meant, strict=True)])

        def evaluate() -> float:
            for batch in run.evaluate(held_out):
                run.measure(right=right(batch))
            return run.metrics["right"]

        for epoch in run.epochs(epochs):
            for batch in run.train(batches):
                # The model's own loss is the mean over the micro-batch's tokens: those that are not padding.
                run.step(net(**batch).loss, count=(batch["labels"] != -100).sum())
            evaluate()
            run.log(epoch=epoch + 1)
        part = evaluate()
        run.say(f"{part:.4f} of {HELD_OUT} held-out numbers are read out without a mistake")
    return part


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a directory with a model and its tokenizer, as save_pretrained leaves it")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--samples", type=int, default=2048)
    options = parser.parse_args()
    part = main(**vars(options))
    if options.model is None and options.epochs >= 12 and options.samples >= 2048:  # less is for a try
        assert part >= 0.9, f"{part:.4f} are right, expected 0.9 or more"
