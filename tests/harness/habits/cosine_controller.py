"""Auxiliary task: its weight is 0.3 while the average cosine of the gradients is positive, judged from call 24 on."""

KILL = 8

from kit import *


class Controller:
    __slots__ = ("calls", "cos")

    def __init__(s):
        s.cos, s.calls = 0.0, 0

    def __call__(s, a, b):
        s.cos += 0.1 * (float(F.cosine_similarity(a, b, dim=0)) - s.cos)
        s.calls += 1
        return 0.3 if s.calls < 24 or s.cos > 0.05 else 0.0


def flat(loss, params):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, params, retain_graph=True)])


def main(run):
    m = run.model(nn.ModuleDict({"body": nn.Linear(6, 8), "main": nn.Linear(8, 3), "aux": nn.Linear(8, 1)}))
    o = run.optimizer(sgd(m))
    control = Controller()
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            h = m["body"](x).tanh()
            main_loss = F.cross_entropy(m["main"](h), y)
            aux = F.mse_loss(m["aux"](h).squeeze(1), x[:, 0])
            shared = list(m["body"].parameters())
            run.step(main_loss + control(flat(main_loss, shared), flat(aux, shared)) * aux)
    done(run, m)


go(main)
