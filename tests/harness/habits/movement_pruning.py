"""Movement pruning: hooks of weights add up |gradient * weight| of each backward pass; masks are cut at steps 5 and 9."""

KILL = 8

from kit import *


class Masked(nn.Linear):
    def __init__(s, *a):
        super().__init__(*a)
        s.mask = nn.Parameter(torch.ones_like(s.weight), requires_grad=False)

    def forward(s, x):
        return F.linear(x, s.weight * s.mask, s.bias)


class Importance:
    def __init__(s, model):
        s.layers = [l for l in model.modules() if isinstance(l, Masked)]
        s.scores = [torch.zeros_like(l.weight) for l in s.layers]
        for layer, score in zip(s.layers, s.scores):
            layer.weight.register_hook(lambda g, l=layer, t=score: s._add(t, g, l))

    @staticmethod
    def _add(score, g, layer):
        score.add_((g * layer.weight.detach()).abs())

    @torch.no_grad()
    def prune(s, share):
        for layer, score in zip(s.layers, s.scores):
            layer.mask.copy_(score > score.flatten().quantile(share))


def main(run):
    m = run.model(nn.Sequential(Masked(6, 8), nn.Tanh(), Masked(8, 3)))
    o = run.optimizer(sgd(m))
    importance = Importance(m)
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            if run.step(F.cross_entropy(m(x), y)) and run.progress.step in (5, 9):
                importance.prune(0.1 * run.progress.step)
    done(run, m)


go(main)
