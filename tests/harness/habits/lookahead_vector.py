"""Wrong after a resume: Lookahead by hand. The slow weights are one numpy vector, synchronised every 6 steps."""

KILL = 11

from kit import *
from torch.nn.utils import parameters_to_vector, vector_to_parameters


class Lookahead:
    def __init__(s, model, k=6, alpha=0.5):
        s.model, s.k, s.alpha, s.count = model, k, alpha, 0
        s.slow = parameters_to_vector(model.parameters()).detach().numpy().copy()

    def after_step(s):
        s.count += 1
        if s.count % s.k == 0:
            fast = parameters_to_vector(s.model.parameters()).detach().numpy()
            s.slow += s.alpha * (fast - s.slow)
            vector_to_parameters(torch.from_numpy(s.slow.copy()), s.model.parameters())


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    ahead = Lookahead(m)
    b = run.loader(data(384), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            if run.step(F.cross_entropy(m(x), y)):
                ahead.after_step()
    done(run, m)


go(main)
