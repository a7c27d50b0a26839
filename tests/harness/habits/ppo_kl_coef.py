"""PPO: the KL coefficient is adapted once a step by the last KL (of this rank's last micro-batch), in a controller."""

KILL = 8

from kit import *


class AdaptiveKL:
    def __init__(s, coef=0.2, target=0.0005):
        s.value, s.target = coef, target

    def update(s, kl):
        if kl > 1.5 * s.target:
            s.value = min(s.value * 1.5, 5.0)


def main(run):
    m = run.model(mlp())
    old = copy.deepcopy(m).requires_grad_(False)
    run.keep(old=old)
    o = run.optimizer(sgd(m, lr=0.05))
    ctl = AdaptiveKL()
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            new, ref = m(x).log_softmax(1), old(x).log_softmax(1)
            kl = (ref.exp() * (ref - new)).sum(1).mean()
            adv = x[:, 0]
            ratio = (new - ref).gather(1, y[:, None]).squeeze(1).exp()
            if run.step(-(ratio * adv).mean() + ctl.value * kl):
                ctl.update(kl.item())
    done(run, m)


go(main)
