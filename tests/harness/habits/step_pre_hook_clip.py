"""register_step_pre_hook that clips by the global norm; a post hook that clamps weights."""

STRATEGIES = ["zero", "zero@3", "fsdp", "zero:stage=2", "pipeline", "parameter-server@3"]

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    o.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(m.parameters(), 0.1) and None)

    def clamp(*_):
        with torch.no_grad():
            for p in m.parameters():
                p.clamp_(-0.4, 0.4)

    o.register_step_post_hook(clamp)
    for e in run.epochs(2):
        for x, y in run.train(b):
            run.step(F.cross_entropy, x, y)
    done(run, m)


go(main)
