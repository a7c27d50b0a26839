"""Sentences of unequal lengths, padded by collate, packed for an LSTM; loss over tokens with a count."""

STRATEGIES = ["zero", "fsdp"]

from kit import *
from torch.nn.utils import rnn


class Sentences(Dataset):
    def __len__(s):
        return 40

    def __getitem__(s, i):
        return torch.arange(i, i + 2 + i % 5) % 9


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.e, s.l, s.out = nn.Embedding(9, 4), nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 9)

    def forward(s, x, n):
        h, _ = s.l(rnn.pack_padded_sequence(s.e(x), n, batch_first=True, enforce_sorted=False))
        return s.out(rnn.pad_packed_sequence(h, batch_first=True)[0])


def collate(batch):
    return rnn.pad_sequence(batch, batch_first=True), torch.tensor([len(one) for one in batch])


def main(run):
    m = run.model(Net())
    o = run.optimizer(adam(m))
    b = run.loader(Sentences(), global_batch=16, micro_batch=4, collate_fn=collate)
    for e in run.epochs(2):
        for x, n in run.train(b):
            y = torch.where(torch.arange(x.shape[1]) < n[:, None], x, -100)[:, 1:]
            out = m(x, n)[:, : y.shape[1]]
            run.step(F.cross_entropy(out.flatten(0, 1), y.flatten()), count=int((y != -100).sum()))
    done(run, m)


go(main)
