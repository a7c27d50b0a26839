"""An average of the weights by hand, once a step: [p.clone() for p in parameters]; not kept; frozen first layer; OneCycle."""

STRATEGIES = ["zero", "fsdp", "zero:stage=2", "hsdp:shard=2@4", "pipeline", "parameter-server@3"]

from kit import *


def main(run):
    n = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    n[0].requires_grad_(False)
    m = run.model(n)
    o = run.optimizer(sgd(m))
    s = run.scheduler(torch.optim.lr_scheduler.OneCycleLR(o, 0.2, total_steps=9))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    avg = [p.detach().clone() for p in m.parameters() if p.device.type == "cpu"]
    for e in run.epochs(3):
        for x, y in run.train(b):
            if run.step(F.cross_entropy, x, y):
                with torch.no_grad():
                    for a, p in zip(avg, [p for p in m.parameters() if p.device.type == "cpu"]):
                        a.lerp_(p, 0.1)
    done(run, m)


go(main)
