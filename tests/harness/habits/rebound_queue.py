"""run.keep(queue=queue), and then `queue = torch.cat([queue, new])[-16:]`: another tensor has the name."""

from kit import *


def main(run):
    m = run.model(mlp(k=4))
    o = run.optimizer(sgd(m))
    queue, found = torch.zeros(16, 4), []
    run.keep(queue=queue)
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(3):
        for x, y in run.train(b):
            z = F.normalize(m(x), dim=1)
            if run.counts:
                found.append(z.detach())
            if run.step((z @ queue.T / 0.5).logsumexp(1).mean()):
                queue = torch.cat([queue, *(t for part in run.gather(found) for t in part)])[-16:]
                found.clear()
    done(run, m)


go(main)
