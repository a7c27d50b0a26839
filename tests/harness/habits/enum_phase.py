"""A state machine (Enum): WARM, then MIX once the training has called advance() 24 times, then COOL."""

KILL = 8

import enum

from kit import *


class Phase(enum.Enum):
    WARM = 24
    MIX = 12
    COOL = 10**9

    @property
    def following(s):
        members = list(Phase)
        return members[members.index(s) + 1]


class Machine:
    def __init__(s):
        s.phase, s.left = Phase.WARM, Phase.WARM.value

    def advance(s):
        s.left -= 1
        if not s.left:
            s.phase = s.phase.following
            s.left = s.phase.value


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    machine = Machine()
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            match machine.phase:
                case Phase.WARM:
                    loss = F.cross_entropy(m(x), y)
                case Phase.MIX:
                    j = torch.randperm(len(x))
                    out = m(0.7 * x + 0.3 * x[j])
                    loss = 0.7 * F.cross_entropy(out, y) + 0.3 * F.cross_entropy(out, y[j])
                case Phase.COOL:
                    loss = 0.5 * F.cross_entropy(m(x), y, label_smoothing=0.1)
            run.step(loss)
            machine.advance()
    done(run, m)


go(main)
