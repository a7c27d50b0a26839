"""A kept average with a warm-up of its decay by self.num_updates, which its state_dict() leaves out (an early timm or ddpm)."""

STRATEGIES = ["zero"]

from kit import *


class Ema:
    def __init__(s, model):
        s.model, s.num_updates = model, 0
        s.shadow = copy.deepcopy(model)

    def update(s):
        s.num_updates += 1
        d = min(0.99, (1 + s.num_updates) / (10 + s.num_updates))
        with torch.no_grad():
            for a, p in zip(s.shadow.parameters(), s.model.parameters()):
                a.mul_(d).add_(p, alpha=1 - d)

    def state_dict(s):
        return s.shadow.state_dict()

    def load_state_dict(s, d):
        s.shadow.load_state_dict(d)


def main(run):
    m = run.model(mlp())
    ema = Ema(m)
    run.keep(ema=ema)
    o = run.optimizer(sgd(m))
    b = run.loader(data(64), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            if run.step(F.cross_entropy(m(x), y)):
                ema.update()
    done(run, m, ema=ema.state_dict())


go(main)
