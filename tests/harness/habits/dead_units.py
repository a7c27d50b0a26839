"""Units that have not fired since the last look are drawn again every fifth step; a forward hook counts on this rank."""

KILL = 8

from kit import *


def main(run):
    m = run.model(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3)))
    o = run.optimizer(sgd(m))
    with torch.no_grad():
        m[0].bias -= 1.2
    fired = torch.zeros(12)

    def count(module, args, out):
        fired.add_((out > 0).float().sum(0))

    m[1].register_forward_hook(count)
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            if run.step(F.cross_entropy(m(x), y)) and run.progress.step % 5 == 0:
                with torch.no_grad():
                    fresh = torch.randn(12, 6) * 0.4
                    rare = fired < 8
                    m[0].weight[rare] = fresh[rare]
                    m[0].bias[rare] = 0.0
                fired.zero_()
    done(run, m)


go(main)
