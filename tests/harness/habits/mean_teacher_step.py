"""Mean teacher (Tarvainen): the teacher is kept, alpha = min(1 - 1/(global_step+1), 0.9) by a global_step that is not."""

KILL = 8

from kit import *


def update_ema_variables(model, ema_model, alpha, global_step):
    alpha = min(1 - 1 / (global_step + 1), alpha)
    with torch.no_grad():
        for ema_param, param in zip(ema_model.parameters(), model.parameters()):
            ema_param.mul_(alpha).add_(param, alpha=1 - alpha)


def main(run):
    m = run.model(mlp())
    teacher = copy.deepcopy(m).requires_grad_(False)
    run.keep(teacher=teacher)
    run.optimizer(sgd(m))
    b = run.loader(data(160), global_batch=16, micro_batch=4)
    global_step = 0
    for e in run.epochs(1):
        for x, y in run.train(b):
            out = m(x + 0.1 * torch.randn_like(x))
            with torch.no_grad():
                target = teacher(x + 0.1 * torch.randn_like(x)).softmax(1)
            if run.step(F.cross_entropy(out, y) + F.mse_loss(out.softmax(1), target)):
                global_step += 1
                update_ema_variables(m, teacher, 0.9, global_step)
    done(run, m, teacher=teacher.state_dict())


go(main)
