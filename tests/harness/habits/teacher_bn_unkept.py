"""Mean teacher with BatchNorm in training mode, deepcopy, EMA once a step, evaluated with its own statistics; not kept."""

NO_KILL = 1

from kit import *


def main(run):
    m = run.model(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)))
    t = copy.deepcopy(m).requires_grad_(False)
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    v = run.loader(data(), global_batch=16, micro_batch=4, shuffle=False)
    for e in run.epochs(3):
        t.train()
        for x, y in run.train(b):
            with torch.no_grad():
                z = t(x + 0.1 * torch.randn_like(x)).softmax(1)
            out = m(x)
            if run.step(F.cross_entropy(out, y) + F.mse_loss(out.softmax(1), z)):
                with torch.no_grad():
                    for p, q in zip(t.parameters(), m.parameters()):
                        p.lerp_(q, 0.1)
        t.eval()
        for x, y in run.evaluate(v):
            run.measure(teacher=F.cross_entropy(t(x), y, reduction="none"))
    done(run, m)


go(main)
