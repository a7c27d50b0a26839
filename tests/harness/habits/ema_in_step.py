"""AveragedModel, kept, updated where run.step returned True, under every strategy."""

STRATEGIES = ["zero", "fsdp", "pipeline", "hybrid@3", "parameter-server@3"]

from kit import *
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def main(run):
    m = run.model(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)))
    ema = AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    run.keep(ema=ema)
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            if run.step(F.cross_entropy, x, y):
                ema.update_parameters(m)
        for x, y in run.evaluate(b):
            run.measure(acc=ema(x).argmax(1) == y)
    done(run, m, ema=ema.state_dict())


go(main)
