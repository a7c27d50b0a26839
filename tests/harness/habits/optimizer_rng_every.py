"""Wrong after a resume: an SGD with Langevin noise in each 6th step, from a numpy generator of its own drawn each step."""

KILL = 8
NO_PLAIN = 1

from kit import *


class Langevin(torch.optim.SGD):
    def __init__(s, params, **kw):
        super().__init__(params, **kw)
        s.rng = np.random.default_rng(7)
        s.t = 0

    @torch.no_grad()
    def step(s, closure=None):
        s.t += 1
        for g in s.param_groups:
            for p in g["params"]:
                z = torch.from_numpy(s.rng.standard_normal(p.shape)).float()
                if s.t % 6 == 0:
                    p.grad.add_(z, alpha=0.1)
        return super().step(closure)


def main(run):
    m = run.model(mlp())
    o = run.optimizer(Langevin(m.parameters(), lr=0.1))
    b = run.loader(data(384), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
