"""SAC's temperature, as the documentation advises: log_alpha is a model of the run, with an optimizer of the run."""

STRATEGIES = ["zero"]

NO_PLAIN = 1

from kit import *


def main(run):
    m = run.model(mlp())
    (log_alpha,) = run.model(nn.ParameterList([torch.zeros(1)]))
    o = run.optimizer(adam(m))
    alpha_optimizer = run.optimizer(torch.optim.Adam([log_alpha], lr=0.05))
    b = run.loader((*data(64), numbers(64, 3, seed=9)), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y, q in run.train(b):
            logits = m(x)
            p = logits.softmax(1)
            entropy = -(p * p.log()).sum(1)
            loss = ((p * -q).sum(1) - log_alpha.exp().detach() * entropy).mean()
            run.step((log_alpha * (entropy.detach() - 0.7)).mean(), optimizer=alpha_optimizer)
            run.step(loss, optimizer=o)
    done(run, m, alpha=log_alpha)


go(main)
