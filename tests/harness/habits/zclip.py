"""ZClip: between backward and update the norm is clipped by its z-score; mean and variance are attributes, not kept."""

KILL = 8

from kit import *


class ZClip:
    def __init__(self, alpha=0.7, z_thresh=0.5, warmup_steps=3):
        self.alpha, self.z, self.warmup = alpha, z_thresh, warmup_steps
        self.buffer, self.mean, self.var, self.initialized = [], None, None, False

    def step(self, model):
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norm = float(torch.stack([g.norm() for g in grads]).norm())
        if not self.initialized:
            self.buffer.append(norm)
            if len(self.buffer) >= self.warmup:
                self.mean = sum(self.buffer) / len(self.buffer)
                self.var = sum((b - self.mean) ** 2 for b in self.buffer) / len(self.buffer)
                self.initialized, self.buffer = True, []
            return
        std = self.var**0.5
        limit = self.mean + self.z * std
        if norm > limit:
            for g in grads:
                g.mul_(limit / norm)
            norm = limit
        self.mean = self.alpha * self.mean + (1 - self.alpha) * norm
        self.var = self.alpha * self.var + (1 - self.alpha) * (norm - self.mean) ** 2


def main(run):
    m = run.model(mlp())
    run.optimizer(sgd(m, lr=0.5))
    zclip = ZClip()
    b = run.loader(data(160), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            if run.backward(F.cross_entropy(m(x), y)):
                zclip.step(m)
            run.update()
    done(run, m)


go(main)
