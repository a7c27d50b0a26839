"""Gradients are changed between backward and update: None for a layer, AGC for another, a centred one."""

STRATEGIES = ["zero", "zero@3", "fsdp", "zero:stage=2", "hsdp:shard=2@4", "parameter-server@3"]

from kit import *


def main(run):
    m = run.model(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)))
    o = run.optimizer(adam(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            if run.backward(F.cross_entropy(m(x), y)):
                if run.progress.step % 2:
                    m[0].weight.grad = None
                p = m[2].weight
                p.grad.mul_((p.norm() * 0.01 / (p.grad.norm() + 1e-6)).clamp(max=1))
                g = m[4].weight.grad
                g.sub_(g.mean(1, keepdim=True))
            run.update()
    done(run, m)


go(main)
