"""A vocabulary that grows while training: defaultdict(count().__next__) numbers the words as they come.

State: the defaultdict and its counter. Shows for rare words, some steps after the beginning."""

KILL = 8

from kit import *


def words(n):
    g = random.Random(4)
    return [[f"w{min(int(g.paretovariate(0.9)), 60)}" for _ in range(5)] for _ in range(n)]


class Bag(nn.Module):
    def __init__(s):
        super().__init__()
        s.e, s.out = nn.Embedding(64, 8), nn.Linear(8, 3)

    def forward(s, t):
        return s.out(s.e(t).mean(1))


def main(run):
    m = run.model(Bag())
    o = run.optimizer(adam(m))
    text, y = words(192), classes(192)
    vocabulary = collections.defaultdict(itertools.count().__next__)
    for k in range(1, 8):
        vocabulary[f"w{k}"]  # the usual words first
    b = run.loader((torch.arange(192), y), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for i, y in run.train(b):
            t = torch.tensor([[vocabulary[w] for w in text[k]] for k in i.tolist()])
            run.step(F.cross_entropy(m(t), y))
    done(run, m)


go(main)
