"""Right: torch_ema with state_dict, kept whole; evaluation under `with ema.average_parameters():`."""

from kit import *


class ExponentialMovingAverage:
    def __init__(self, parameters, decay):
        self.parameters, self.decay, self.num_updates = list(parameters), decay, 0
        self.shadow_params = [p.detach().clone() for p in self.parameters]

    def update(self):
        self.num_updates += 1
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        with torch.no_grad():
            for s, p in zip(self.shadow_params, self.parameters):
                s.sub_((1 - decay) * (s - p))

    @contextlib.contextmanager
    def average_parameters(self):
        backup = [p.detach().clone() for p in self.parameters]
        with torch.no_grad():
            for s, p in zip(self.shadow_params, self.parameters):
                p.copy_(s)
        try:
            yield
        finally:
            with torch.no_grad():
                for b, p in zip(backup, self.parameters):
                    p.copy_(b)

    def state_dict(self):
        return {"decay": self.decay, "num_updates": self.num_updates, "shadow_params": self.shadow_params}

    def load_state_dict(self, state):
        self.decay, self.num_updates = state["decay"], state["num_updates"]
        self.shadow_params = [s.clone() for s in state["shadow_params"]]


def main(run):
    m = run.model(mlp())
    run.optimizer(sgd(m))
    ema = ExponentialMovingAverage(m.parameters(), 0.9)
    run.keep(ema=ema)
    b = run.loader(data(64), global_batch=16, micro_batch=4)
    v = run.loader(data(32), global_batch=16, micro_batch=4, shuffle=False)
    for e in run.epochs(3):
        for x, y in run.train(b):
            if run.step(F.cross_entropy(m(x), y)):
                ema.update()
        with ema.average_parameters():
            for x, y in run.evaluate(v):
                run.measure(val=F.cross_entropy(m(x), y, reduction="none"))
        run.log(epoch=e)
    done(run, m, shadow=ema.shadow_params, n=ema.num_updates)


go(main)
