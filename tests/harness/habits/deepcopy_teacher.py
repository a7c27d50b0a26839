"""copy.deepcopy(model) after run.model as a teacher, kept; soft updates with .data once a step; another strategy each."""

STRATEGIES = ["zero", "fsdp", "zero:stage=2", "hsdp:shard=2@4", "parameter-server@3"]

from kit import *


def main(run):
    m = run.model(mlp())
    t = copy.deepcopy(m).requires_grad_(False).eval()
    run.keep(t=t)
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            with torch.no_grad():
                z = t(x).softmax(1)
            out = m(x)
            if run.step(F.cross_entropy(out, y) + F.mse_loss(out.softmax(1), z)):
                for p, q in zip(t.parameters(), m.parameters()):
                    p.data = p.data * 0.9 + q.data * 0.1
    done(run, m)


go(main)
