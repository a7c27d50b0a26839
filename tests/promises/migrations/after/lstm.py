"""A language model of LSTMs over text laid in columns: the hidden state is carried from one stretch to the next."""

import argparse
import math
from pydoc_data.topics import topics

import torch
from torch import nn

import lockstep


class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp, nhid, nlayers, dropout):
        super().__init__()
        self.nlayers, self.nhid = nlayers, nhid
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid, nlayers, dropout=dropout, batch_first=True)
        self.decoder = nn.Linear(nhid, ntoken)
        self.init_weights()

    def init_weights(self):
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)

    def forward(self, tokens, hidden):
        emb = self.drop(self.encoder(tokens))
        output, hidden = self.rnn(emb, hidden)
        return self.decoder(self.drop(output)), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        return (weight.new_zeros(self.nlayers, bsz, self.nhid), weight.new_zeros(self.nlayers, bsz, self.nhid))


class Corpus:
    """Characters of Python's own documentation, 7 bits each."""

    def __init__(self, length):
        text = "\n".join(topics[name] for name in sorted(topics))[:length]
        tokens = torch.tensor(list(text.encode("ascii", "replace")))
        self.train, self.valid = tokens[: length * 9 // 10], tokens[length * 9 // 10 :]


def batchify(data, bsz):
    """The text in ``bsz`` columns, one below the other as they were: (bsz, characters)."""
    nbatch = data.size(0) // bsz
    return data[: nbatch * bsz].view(bsz, nbatch)


def repackage_hidden(hidden):
    """The same without its history."""
    return tuple(each.detach() for each in hidden)


def get_batch(source, i, bptt):
    """Stretch ``i`` of every column, and the characters that follow."""
    seq_len = min(bptt, source.size(1) - 1 - i)
    return source[:, i : i + seq_len], source[:, i + 1 : i + 1 + seq_len]


def evaluate(args, model, source, criterion):
    model.eval()
    total_loss, count = 0.0, 0
    hidden = model.init_hidden(source.size(0))
    with torch.no_grad():
        for i in range(0, source.size(1) - 1, args.bptt):
            tokens, targets = get_batch(source, i, args.bptt)
            output, hidden = model(tokens, hidden)
            total_loss += criterion(output.flatten(0, 1), targets.flatten()).item() * targets.numel()
            count += targets.numel()
    return total_loss / count


def stretches(run, source, bptt):
    """The first stretch of every column, then the second of every one, and so on: a step holds one stretch of each."""
    starts = range(0, source.size(1) - 1, bptt)
    samples = [sample for i in starts for sample in zip(*get_batch(source, i, bptt), strict=True)]
    return run.loader(samples, global_batch=len(source), micro_batch=len(source) // 4, shuffle=False)


def train(run, model, source, criterion, epoch):
    model.train()
    for tokens, targets in run.train(source):
        hidden = run.carry.get("hidden") or model.init_hidden(len(tokens))
        output, hidden = model(tokens, hidden)
        run.carry["hidden"] = repackage_hidden(hidden)
        loss = criterion(output.flatten(0, 1), targets.flatten())
        run.step(loss)
    run.carry.clear()
    loss = run.metrics["loss"]
    print(f"| epoch {epoch} | loss {loss:.3f} | ppl {math.exp(loss):.2f}")


def main(args, run):
    corpus = Corpus(args.length)
    train_data = stretches(run, batchify(corpus.train, args.batch_size), args.bptt)
    val_data = batchify(corpus.valid, args.eval_batch_size).to(run.device)  # whole on every rank: it cannot be divided
    model = run.model(RNNModel(128, args.emsize, args.nhid, args.nlayers, args.dropout))
    criterion = nn.CrossEntropyLoss()
    optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=args.lr))
    figures = []
    run.keep(best_val_loss=math.inf)
    for epoch in run.epochs(args.epochs):
        train(run, model, train_data, criterion, epoch)
        val_loss = evaluate(args, model, val_data, criterion)
        print(f"| end of epoch {epoch} | valid loss {val_loss:.3f} | valid ppl {math.exp(val_loss):.2f}")
        if val_loss > run.kept.best_val_loss:
            for group in optimizer.param_groups:  # anneal
                group["lr"] /= 4.0
        run.kept.best_val_loss = min(run.kept.best_val_loss, val_loss)
        figures.append(run.log(val_loss=val_loss))
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="LSTM language model")
    parser.add_argument("--length", type=int, default=12000, help="characters of the corpus")
    parser.add_argument("--emsize", type=int, default=32, help="size of embeddings")
    parser.add_argument("--nhid", type=int, default=48, help="hidden units per layer")
    parser.add_argument("--nlayers", type=int, default=2, help="number of layers")
    parser.add_argument("--lr", type=float, default=1e-2, help="initial learning rate")
    parser.add_argument("--clip", type=float, default=0.25, help="gradient clipping")
    parser.add_argument("--epochs", type=int, default=3, help="upper epoch limit")
    parser.add_argument("--batch-size", type=int, default=16, help="columns")
    parser.add_argument("--eval-batch-size", type=int, default=4, help="columns of the validation text")
    parser.add_argument("--bptt", type=int, default=32, help="characters of a stretch")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1111, help="random seed")
    args = parser.parse_args()
    with lockstep.Run(seed=args.seed, clip_norm=args.clip) as run:
        figures = main(args, run)
