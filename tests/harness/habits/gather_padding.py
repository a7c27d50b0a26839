"""Features collected in the body and gathered once a step, without `if run.counts`; a short last step on 3 ranks."""

from kit import *


def main(run):
    m = run.model(mlp(k=4))
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    queue = torch.zeros(16, 4)
    run.keep(queue=queue)
    found = []
    for e in run.epochs(3):
        for x, y in run.train(b):
            z = F.normalize(m(x), dim=1)
            found.append(z.detach())
            if run.step((z @ queue.T / 0.5).logsumexp(1).mean()):
                queue.copy_(torch.cat([queue, torch.cat([k for part in run.gather(found) for k in part])])[-16:])
                found.clear()
    done(run, m)


go(main)
