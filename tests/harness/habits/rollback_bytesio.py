"""Wrong after a resume: the best weights lie in a BytesIO (torch.save); if an epoch is worse, the script goes back to them."""

KILL = 17

import io

from kit import *


class Best:
    def __init__(s):
        s.score, s.file = None, io.BytesIO()

    def offer(s, score, model):
        if s.score is None or score < s.score:
            s.score = score
            s.file = io.BytesIO()
            torch.save(model.state_dict(), s.file)

    def back(s, model):
        s.file.seek(0)
        model.load_state_dict(torch.load(s.file))


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m, lr=2.5))
    b = run.loader(data(96), global_batch=16, micro_batch=4)
    v = run.loader(data(48), global_batch=16, micro_batch=4, shuffle=False)
    best = Best()
    for e in run.epochs(3):
        for a, t in run.train(b):
            run.step(F.cross_entropy(m(a), t))
        for a, t in run.evaluate(v):
            run.measure(val=F.cross_entropy(m(a), t, reduction="none"))
        best.offer(run.metrics["val"], m)
        print("VAL", e, run.metrics["val"], flush=True)
    best.back(m)
    done(run, m)


go(main)
