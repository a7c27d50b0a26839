"""The average is begun after an epoch and updated once a step, where run.step returned True; kept."""

STRATEGIES = ["zero", "fsdp"]

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
            if run.step(F.cross_entropy(m(x), y)) and e >= 1:
                ema.update_parameters(m)
    done(run, m, ema=ema.state_dict())


go(main)
