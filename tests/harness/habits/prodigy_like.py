"""An optimizer whose step size is estimated over all parameters (D-Adaptation, Prodigy): one number in param_groups."""

STRATEGIES = ["zero", "zero@3", "fsdp", "parameter-server@3", "parameter-server:servers=2@4", "pipeline"]

from kit import *


class Prodigy(torch.optim.Optimizer):
    def __init__(s, ps, lr=1.0):
        super().__init__(ps, dict(lr=lr, d=0.01))

    @torch.no_grad()
    def step(s, closure=None):
        g = s.param_groups[0]
        num = den = 0.0
        for p in g["params"]:
            if p.grad is None:
                continue
            st = s.state[p]
            if not st:
                st["x0"] = p.clone()
                st["s"] = torch.zeros_like(p)
            st["s"].add_(p.grad)
            num += float((p.grad * (st["x0"] - p)).sum())
            den += float(st["s"].abs().sum())
        g["d"] = max(g["d"], num / (den + 1e-8))
        for p in g["params"]:
            if p.grad is not None:
                p.sub_(g["d"] * g["lr"] * s.state[p]["s"].sign())


def main(run):
    m = run.model(mlp())
    o = run.optimizer(Prodigy(m.parameters()))
    b = run.loader(data(), global_batch=16, micro_batch=2)
    for e in run.epochs(3):
        for x, y in run.train(b):
            run.step(F.cross_entropy, x, y)
    done(run, m, d=o.param_groups[0]["d"])


go(main)
