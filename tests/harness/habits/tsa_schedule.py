"""UDA's training signal annealing: a threshold from a global_step that the script counts once a step; not kept."""

KILL = 8

from kit import *


def get_tsa_threshold(schedule, global_step, num_train_steps, start, end):
    training_progress = global_step / num_train_steps
    if schedule == "linear":
        threshold = training_progress
    elif schedule == "exp":
        threshold = np.exp((training_progress - 1) * 5)
    elif schedule == "log":
        threshold = 1 - np.exp(-training_progress * 5)
    return float(threshold * (end - start) + start)


def main(run):
    m = run.model(mlp())
    run.optimizer(sgd(m))
    b = run.loader(data(96), global_batch=16, micro_batch=4)
    global_step = 0
    for e in run.epochs(2):
        for x, y in run.train(b):
            logits = m(x)
            each = F.cross_entropy(logits, y, reduction="none")
            threshold = get_tsa_threshold("linear", global_step, 12, 1 / 3, 1)
            keep = (logits.detach().softmax(1).gather(1, y[:, None]).squeeze(1) < threshold).float()
            if run.step((each * keep).mean()):
                global_step += 1
    done(run, m)


go(main)
