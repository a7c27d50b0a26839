"""Scheduled sampling: ratio *= 0.995 in each body, and random.random() < ratio chooses teacher forcing for the batch."""

from kit import *


class Decoder(nn.Module):
    def __init__(s):
        super().__init__()
        s.e, s.c, s.out = nn.Embedding(7, 8), nn.GRUCell(8, 8), nn.Linear(8, 7)

    def forward(s, t, forced):
        h, token, out = torch.zeros(len(t), 8), t[:, 0], []
        for i in range(1, t.shape[1]):
            h = s.c(s.e(token), h)
            out.append(s.out(h))
            token = t[:, i] if forced else out[-1].argmax(1)
        return torch.stack(out, 1)


def main(run):
    tokens = torch.randint(0, 7, (64, 5), generator=torch.Generator().manual_seed(3))
    m = run.model(Decoder())
    o = run.optimizer(adam(m))
    b = run.loader((tokens,), global_batch=16, micro_batch=4)
    ratio = 0.9
    for e in run.epochs(4):
        for (t,) in run.train(b):
            forced = random.random() < ratio
            ratio *= 0.995
            run.step(F.cross_entropy(m(t, forced).flatten(0, 1), t[:, 1:].flatten()))
    done(run, m)


go(main)
