"""Schedule-free: optimizer.train() / optimizer.eval() swap weights around the evaluation."""

STRATEGIES = ["zero", "fsdp", "zero:stage=2", "parameter-server@3"]

from kit import *


class Free(torch.optim.Optimizer):
    def __init__(s, ps, lr=0.1):
        super().__init__(ps, dict(lr=lr, k=0, training=True))

    def _swap(s, a):
        for g in s.param_groups:
            for p in g["params"]:
                if "z" in s.state[p]:
                    p.data.lerp_(s.state[p]["z"], a)

    def eval(s):
        for g in s.param_groups:
            if g["training"]:
                s._swap(1 - 1 / 0.9)
                g["training"] = False

    def train(s):
        for g in s.param_groups:
            if not g["training"]:
                s._swap(0.1)
                g["training"] = True

    @torch.no_grad()
    def step(s, closure=None):
        for g in s.param_groups:
            c = 1 / (g["k"] + 1)
            for p in g["params"]:
                if p.grad is None:
                    continue
                z = s.state[p].setdefault("z", p.clone())
                p.lerp_(z, c)
                p.add_(p.grad, alpha=g["lr"] * (0.9 * (1 - c) - 1))
                z.sub_(g["lr"] * p.grad)
            g["k"] += 1


def main(run):
    m = run.model(mlp())
    o = run.optimizer(Free(m.parameters()))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    v = run.loader(data(), global_batch=16, micro_batch=4, shuffle=False)
    for e in run.epochs(3):
        o.train()
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
        o.eval()
        for x, y in run.evaluate(v):
            run.measure(acc=F.cross_entropy(m(x), y, reduction="none"))
    done(run, m)


go(main)
