"""word2vec's subsampling in a collate object: tokens that it has counted often become <unk>.

State: Collate.seen, a Counter. Shows once a token was counted more than 60 times."""

KILL = 8

from kit import *


class Collate:
    def __init__(s, limit=60):
        s.seen, s.limit = collections.Counter(), limit

    def __call__(s, items):
        tokens = torch.stack([t for t, _ in items])
        s.seen.update(tokens.flatten().tolist())
        often = torch.tensor([s.seen[t] > s.limit for t in range(12)])
        return torch.where(often[tokens], torch.zeros_like(tokens), tokens), torch.stack([c for _, c in items])


class Bag(nn.Module):
    def __init__(s):
        super().__init__()
        s.e, s.out = nn.Embedding(12, 8), nn.Linear(8, 3)

    def forward(s, t):
        return s.out(s.e(t).mean(1))


def main(run):
    m = run.model(Bag())
    o = run.optimizer(adam(m))
    tokens = torch.randint(1, 12, (240, 6), generator=torch.Generator().manual_seed(3))
    b = run.loader(list(zip(tokens, classes(240))), global_batch=16, micro_batch=4, collate_fn=Collate())
    for e in run.epochs(2):
        for t, y in run.train(b):
            run.step(F.cross_entropy(m(t), y))
    done(run, m)


go(main)
