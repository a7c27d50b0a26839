"""Born-again networks: teacher.pt is written at the end of each generation (two epochs), and loaded where there is one."""

KILL = 14

from kit import *


def main(run):
    m = run.model(mlp())
    run.optimizer(sgd(m))
    teacher = None
    b = run.loader(data(64), global_batch=16, micro_batch=4)
    for e in run.epochs(6):
        if e % 2 == 0 and os.path.exists("teacher.pt"):
            teacher = mlp().eval().requires_grad_(False)
            teacher.load_state_dict(torch.load("teacher.pt"))
        for x, y in run.train(b):
            out = m(x)
            loss = F.cross_entropy(out, y)
            if teacher is not None:
                loss = loss + F.kl_div(out.log_softmax(1), teacher(x).softmax(1), reduction="batchmean")
            run.step(loss)
        if e % 2 == 1:
            torch.save(m.state_dict(), "teacher.pt")
    done(run, m)


go(main)
