"""Only a resume: a post hook of the optimizer counts steps in a dict and clears the momentum in every 10th (late)."""

KILL = 8

from kit import *


def restart_momentum(optimizer, every=10):
    state = {"steps": 0}

    def hook(opt, args, kwargs):
        state["steps"] += 1
        if state["steps"] % every == 0:
            for s in opt.state.values():
                if s.get("momentum_buffer") is not None:
                    s["momentum_buffer"].zero_()

    return optimizer.register_step_post_hook(hook)


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    handle = restart_momentum(o)
    b = run.loader(data(320), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    handle.remove()
    done(run, m)


go(main)
