"""Warm-up by unittest.mock.patch in an ExitStack: F.cross_entropy is smoothed until the stack is closed at the 26th body.

State: the ExitStack, the patch of torch.nn.functional and a count. Shows after 26 bodies."""

KILL = 8

from unittest import mock

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(240), global_batch=16, micro_batch=4)
    plain, seen, stack = F.cross_entropy, 0, contextlib.ExitStack()
    stack.enter_context(mock.patch.object(F, "cross_entropy", lambda a, t: plain(a, t, label_smoothing=0.3)))
    for e in run.epochs(1):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
            if (seen := seen + len(x)) >= 104:
                stack.close()
    stack.close()
    done(run, m)


go(main)
