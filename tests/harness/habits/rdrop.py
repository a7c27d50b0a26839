"""R-Drop: the model is called twice for one loss, with dropout; and once without gradients first."""

STRATEGIES = ["zero", "fsdp", "zero:stage=2"]

from kit import *


def main(run):
    m = run.model(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 3)))
    o = run.optimizer(adam(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            with torch.no_grad():
                hard = F.cross_entropy(m(x), y, reduction="none") > 1
            one, two = m(x).log_softmax(1), m(x).log_softmax(1)
            apart = F.kl_div(one, two, log_target=True, reduction="batchmean")
            run.step(F.nll_loss(one, y) + F.nll_loss(two, y) + apart + 0.1 * one[hard].square().sum())
    done(run, m)


go(main)
