"""Sparse training as SET/RigL: masks in a dict; after each epoch the smallest weights die and others grow; not kept."""

KILL = 8

from kit import *


class Masking:
    def __init__(self, model, density=0.5):
        self.model, self.masks = model, {}
        for name, p in model.named_parameters():
            if p.dim() == 2:
                keep = torch.zeros(p.numel(), dtype=torch.bool)
                order = torch.randperm(p.numel(), generator=torch.Generator().manual_seed(1))
                keep[order[: int(density * p.numel())]] = True
                self.masks[name] = keep.view_as(p)

    @torch.no_grad()
    def apply(self):
        for name, p in self.model.named_parameters():
            if name in self.masks:
                p.mul_(self.masks[name])

    @torch.no_grad()
    def truncate_and_grow(self, generator, rate=0.3):
        for name, p in self.model.named_parameters():
            if name in self.masks:
                mask = self.masks[name].flatten()
                alive, dead = mask.nonzero().squeeze(1), (~mask).nonzero().squeeze(1)
                n = int(rate * len(alive))
                drop = alive[p.flatten()[alive].abs().argsort()[:n]]
                grow = dead[torch.randperm(len(dead), generator=generator)[:n]]
                mask[drop], mask[grow] = False, True
        self.apply()


def main(run):
    m = run.model(mlp())
    run.optimizer(sgd(m))
    masking = Masking(m)
    masking.apply()
    b = run.loader(data(64), global_batch=16, micro_batch=4)
    for e in run.epochs(3):
        for x, y in run.train(b):
            if run.step(F.cross_entropy(m(x), y)):
                masking.apply()
        masking.truncate_and_grow(torch.Generator().manual_seed(e))
    done(run, m)


go(main)
