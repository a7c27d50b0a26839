"""An average of the weights, begun after an epoch, updated in each body as plain loops do; kept."""

NO_PLAIN = 1

from kit import *
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    ema = AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    run.keep(ema=ema)
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(3):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
            if e >= 1:
                ema.update_parameters(m)
    done(run, m, ema=ema.state_dict())


go(main)
