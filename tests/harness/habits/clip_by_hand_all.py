"""clip_grad_norm_ (2 and inf), clip_grad_value_ and a logged norm, between run.backward and run.update."""

STRATEGIES = ["zero", "zero@3", "fsdp", "zero:stage=2", "hsdp:shard=2@4", "parameter-server@3", "pipeline"]
TOL = 1e-5

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    norms = []
    run.keep(norms=norms)
    for e in run.epochs(3):
        for x, y in run.train(b):
            if run.backward(F.cross_entropy, x, y):
                n = torch.nn.utils.clip_grad_norm_(m.parameters(), 0.3)
                torch.nn.utils.clip_grad_norm_(list(m.parameters())[:2], 0.1, norm_type=float("inf"))
                torch.nn.utils.clip_grad_value_(m.parameters(), 0.05)
            if run.update():
                norms.append(float(n))
    done(run, m, norms=norms)


go(main)
