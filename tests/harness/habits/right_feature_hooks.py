"""Right: FitNets by forward hooks that put features into a dict, an adapter, and a count of dead units that is printed."""

from kit import *


class FeatureHook:
    def __init__(self, module):
        self.features, self.calls, self.dead = None, 0, 0.0
        self.handle = module.register_forward_hook(self)

    def __call__(self, module, args, out):
        self.features = out
        self.calls += 1
        self.dead += float((out.detach() <= 0).float().mean())


def main(run):
    student = run.model(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)))
    adapter = run.model(nn.Linear(8, 16))
    teacher = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)).requires_grad_(False).eval()
    run.optimizer(torch.optim.SGD([*student.parameters(), *adapter.parameters()], lr=0.1, momentum=0.9))
    s, t = FeatureHook(student[1]), FeatureHook(teacher[1])
    b = run.loader(data(64), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            out = student(x)
            with torch.no_grad():
                soft = teacher(x).softmax(1)
            hint = F.mse_loss(adapter(s.features), t.features)
            kd = F.kl_div(out.log_softmax(1), soft, reduction="batchmean")
            run.step(F.cross_entropy(out, y) + kd + 0.5 * hint)
        print(f"dead: {s.dead / s.calls:.2f} of the student, {t.dead / t.calls:.2f} of the teacher")
    s.handle.remove()
    t.handle.remove()
    done(run, student, adapter)


go(main)
