"""A custom Adam that counts its steps in an attribute (self.t += 1) for the bias correction, not in its state."""

STRATEGIES = ["zero"]

from kit import *


class MyAdam(torch.optim.Optimizer):
    def __init__(s, ps, lr=0.01):
        super().__init__(ps, dict(lr=lr))
        s.t = 0

    @torch.no_grad()
    def step(s, closure=None):
        s.t += 1
        for g in s.param_groups:
            for p in g["params"]:
                if p.grad is None:
                    continue
                st = s.state[p]
                m, v = st.setdefault("m", torch.zeros_like(p)), st.setdefault("v", torch.zeros_like(p))
                m.lerp_(p.grad, 0.1)
                v.lerp_(p.grad**2, 0.001)
                p.sub_(g["lr"] * (m / (1 - 0.9**s.t)) / ((v / (1 - 0.999**s.t)).sqrt() + 1e-8))


def main(run):
    m = run.model(mlp())
    o = run.optimizer(MyAdam(m.parameters()))
    b = run.loader(data(), global_batch=16, micro_batch=2)
    for e in run.epochs(3):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
