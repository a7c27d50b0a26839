"""A language model of LSTMs over text laid in columns: the hidden state is carried from one stretch to the next."""

import argparse
import math
from pydoc_data.topics import topics

import torch
from torch import nn


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


def train(args, model, source, criterion, optimizer, epoch):
    model.train()
    total_loss, stretches = 0.0, 0
    hidden = model.init_hidden(args.batch_size)
    for i in range(0, source.size(1) - 1, args.bptt):
        tokens, targets = get_batch(source, i, args.bptt)
        optimizer.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(tokens, hidden)
        loss = criterion(output.flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        total_loss += loss.item()
        stretches += 1
    print(f"| epoch {epoch} | loss {total_loss / stretches:.3f} | ppl {math.exp(total_loss / stretches):.2f}")
    return total_loss / stretches


def main(args):
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    corpus = Corpus(args.length)
    train_data = batchify(corpus.train, args.batch_size).to(device)
    val_data = batchify(corpus.valid, args.eval_batch_size).to(device)
    model = RNNModel(128, args.emsize, args.nhid, args.nlayers, args.dropout).to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    figures = []
    best_val_loss = None
    for epoch in range(args.epochs):
        loss = train(args, model, train_data, criterion, optimizer, epoch)
        val_loss = evaluate(args, model, val_data, criterion)
        print(f"| end of epoch {epoch} | valid loss {val_loss:.3f} | valid ppl {math.exp(val_loss):.2f}")
        if best_val_loss is not None and val_loss > best_val_loss:
            for group in optimizer.param_groups:  # anneal
                group["lr"] /= 4.0
        best_val_loss = val_loss if best_val_loss is None else min(best_val_loss, val_loss)
        figures.append({"loss": loss, "val_loss": val_loss})
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
    figures = main(args)
