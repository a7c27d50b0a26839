"""MC dropout: model.train() within the evaluation, several passes; BatchNorm moves there; predictions gathered."""

NO_PLAIN = 1
STRATEGIES = ["zero", "fsdp"]

from kit import *


def main(run):
    m = run.model(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.4), nn.Linear(8, 3)))
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    v = run.loader(data(20), global_batch=8, micro_batch=2, shuffle=False)
    found = []
    for e in run.epochs(2):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
        mine = []
        for x, y in run.evaluate(v):
            m.train()
            p = torch.stack([m(x).softmax(1) for _ in range(3)]).mean(0)
            if run.counts:
                mine.append(p)
            run.measure(acc=p.argmax(1) == y)
        found = torch.cat([t for part in run.gather(mine) for t in part])
    done(run, m, found=found)


go(main)
