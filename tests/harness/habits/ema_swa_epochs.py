"""SWA from epoch 2 on, once an epoch, with update_bn at the end, SWALR kept; the average is loaded into the model."""

NO_PLAIN = 1
STRATEGIES = ["zero"]

from kit import *
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn


def main(run):
    m = run.model(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)))
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    a = AveragedModel(m)
    s = SWALR(o, 0.01, anneal_epochs=2)
    run.keep(a=a, s=s)
    for e in run.epochs(5):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
        if e >= 2:
            a.update_parameters(m)
            s.step()
    update_bn(run.loader(data(), global_batch=16, micro_batch=4, shuffle=False), a)
    done(run, m, a=a.state_dict(), lr=o.param_groups[0]["lr"])


go(main)
