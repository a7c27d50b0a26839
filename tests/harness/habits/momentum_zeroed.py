"""momentum buffers are zeroed every 6th update, counted where run.step returns True"""

KILL = 8

from kit import *


def main(run):
    m = run.model(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3)))
    n = 0
    o = run.optimizer(sgd(m))
    b = run.loader(data(64), global_batch=16, micro_batch=4)
    for e in run.epochs(4):
        for x, y in run.train(b):
            if run.step(F.cross_entropy(m(x), y)):
                n += 1
                if n % 4 == 0:
                    for group in o.param_groups:
                        for p in group["params"]:
                            o.state[p]["momentum_buffer"].zero_()
        run.say(str(n))
    done(run, m)


go(main)
