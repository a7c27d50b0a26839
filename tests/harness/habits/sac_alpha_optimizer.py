"""SAC's temperature: log_alpha with an optimizer of its own that the script steps by hand in the body."""

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(adam(m))
    log_alpha = torch.zeros(1, requires_grad=True)
    alpha_optimizer = torch.optim.Adam([log_alpha], lr=0.05)
    b = run.loader((*data(64), numbers(64, 3, seed=9)), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y, q in run.train(b):
            logits = m(x)
            p = logits.softmax(1)
            entropy = -(p * p.log()).sum(1)
            loss = ((p * -q).sum(1) - log_alpha.exp().detach() * entropy).mean()
            alpha_loss = (log_alpha * (entropy.detach() - 0.7)).mean()
            alpha_optimizer.zero_grad()
            alpha_loss.backward()
            alpha_optimizer.step()
            run.step(loss)
    done(run, m, alpha=log_alpha)


go(main)
