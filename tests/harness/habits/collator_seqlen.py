"""LLM: sequence length warm-up in the collator, which counts its own calls."""

KILL = 8

from kit import *


class Collator:
    def __init__(s, every=20):
        s.calls, s.every = 0, every

    def __call__(s, rows):
        s.calls += 1
        length = min(8, 4 + 2 * (s.calls // s.every))
        return torch.stack([row[: length + 1] for row in rows])


class Lm(nn.Module):
    def __init__(s):
        super().__init__()
        s.emb, s.rnn, s.out = nn.Embedding(11, 6), nn.GRU(6, 6, batch_first=True), nn.Linear(6, 11)

    def forward(s, t):
        return s.out(s.rnn(s.emb(t))[0])


class Text(Dataset):
    def __init__(s):
        s.t = classes(192 * 9, 11).view(192, 9)

    def __len__(s):
        return 192

    def __getitem__(s, i):
        return s.t[i]


def main(run):
    m = run.model(Lm())
    o = run.optimizer(sgd(m))
    b = run.loader(Text(), global_batch=16, micro_batch=4, collate_fn=Collator())
    for e in run.epochs(1):
        for t in run.train(b):
            run.step(F.cross_entropy(m(t[:, :-1]).flatten(0, 1), t[:, 1:].flatten()))
    done(run, m)


go(main)
