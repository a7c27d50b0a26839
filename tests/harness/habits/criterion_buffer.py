"""A criterion (nn.Module beside the run) with a buffer of the mean loss; it weighs samples once 24 batches were seen."""

KILL = 8

from kit import *


class Balanced(nn.Module):
    def __init__(s):
        super().__init__()
        s.register_buffer("mean", torch.ones(()))
        s.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(s, out, y):
        loss = F.cross_entropy(out, y, reduction="none")
        with torch.no_grad():
            s.seen += 1
            s.mean.lerp_(loss.mean(), 0.1)
            w = torch.where(s.seen > 24, (loss / s.mean).clamp(0.5, 2), torch.ones_like(loss))
        return (w * loss).mean()


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    criterion = Balanced()
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            run.step(criterion(m(x), y))
    done(run, m)


go(main)
