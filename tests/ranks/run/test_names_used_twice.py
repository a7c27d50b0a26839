"""Names that a script uses for several things, and values that lie at other places than before: no word is said.

In each of these scripts, what is told is the same on any number of ranks.
"""

import runpy
import textwrap

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lockstep.run import Run
from worlds import on_world

SCRIPT = """
import numpy as np, torch, lockstep
from torch import nn
from torch.func import vmap
from torch.nn import functional as F

def made(run, data, **options):
    model = run.model(nn.Linear(5, 2))
    run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    return model, run.loader(data, global_batch=16, micro_batch=4, **options)

DATA = torch.randn(64, 5), torch.randint(2, (64,))
"""
SCRIPTS = {
    "a function's variables and the module's": """
        def evaluate(run, model, loader):
            for x, y in run.evaluate(loader):
                run.measure(acc=model(x).argmax(1) == y)
        def main(data):
            with lockstep.Run(seed=0) as run:
                model, loader = made(run, data)
                for epoch in run.epochs(2):
                    for x, y in run.train(loader):
                        run.step(F.cross_entropy(model(x), y))
                    evaluate(run, model, loader)
        x, y = DATA
        main((x, y))
        """,
    "what was told before the training": """
        run = lockstep.Run(seed=0)
        x, y = DATA
        model, loader = made(run, (x, y))
        loss = F.cross_entropy(model(x[:4]), y[:4])
        print("before", loss.item())
        for epoch in run.epochs(2):
            for x, y in run.train(loader):
                run.step(F.cross_entropy(model(x), y))
            for x, y in run.evaluate(loader):
                loss = F.cross_entropy(model(x), y)
                run.measure(test_loss=loss)
            loss = run.metrics["test_loss"]
            print(epoch, loss)
        run.close()
        """,
    "a parameter of a lambda": """
        with lockstep.Run(seed=0) as run:
            model, loader = made(run, DATA)
            for epoch in run.epochs(2):
                for x, y in run.train(loader):
                    run.step(F.cross_entropy(model(x), y))
                weights = torch.stack([model.weight.detach(), -model.weight.detach()])
                for x, y in run.evaluate(loader):
                    p = vmap(lambda p: x @ p.T)(weights).softmax(-1)
                    run.measure(acc=p.mean(0).argmax(1) == y)
        """,
    "a variable of a comprehension": """
        with lockstep.Run(seed=0) as run:
            model, loader = made(run, DATA)
            for x, y in run.train(loader):
                run.step(F.cross_entropy(model(x), y))
            out = []
            for x, y in run.evaluate(loader):
                p = model(x).argmax(1)
                out += p.tolist()
                run.measure(acc=p == y)
            all_of_them = [p for part in run.gather(out) for p in part]
            p = np.array(all_of_them)
            if run.leads:
                np.savetxt("predictions.csv", p)
        """,
    "a generator that hands micro-batches on": """
        class Trainer:
            def __init__(self, run):
                self.run = run
                self.model, self.loader = made(run, DATA)
            def batches(self):
                for batch in self.run.train(self.loader):
                    yield batch
            def loss_of(self, batch):
                x, y = batch
                out = self.model(x)
                self.run.measure(acc=out.argmax(1) == y)
                return F.cross_entropy(out, y)
            def fit(self):
                for epoch in self.run.epochs(2):
                    for batch in self.batches():
                        self.run.step(self.loss_of(batch))
                    print(self.run.metrics["acc"])
        with lockstep.Run(seed=0) as run:
            Trainer(run).fit()
        """,
    "an attribute of listed layers that each forward pass sets": """
        from torch.nn.utils import prune
        with lockstep.Run(seed=0) as run:
            net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2))
            layers = [net[0], net[2]]
            for layer in layers:
                prune.l1_unstructured(layer, "weight", amount=0.3)
            model = run.model(net)
            run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            loader = run.loader(DATA, global_batch=16, micro_batch=4)
            for epoch in run.epochs(2):
                for x, y in run.train(loader):
                    run.step(F.cross_entropy(model(x), y))
                for x, y in run.evaluate(loader):
                    run.measure(acc=model(x).argmax(1) == y)
                run.log(sparsity=sum((layer.weight_mask == 0).sum().item() for layer in layers))
        """,
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_nothing_is_said(tmp_path, monkeypatch, capfd, name):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT + textwrap.dedent(SCRIPTS[name]))
    runpy.run_path(str(script), run_name="__main__")
    assert "each rank has its own" not in capfd.readouterr().err


class Warmup:
    """Counts the steps, and computes the rate from the count."""

    def __init__(self, optimizer):
        self.optimizer, self.steps = optimizer, 0

    def step(self):
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, self.steps / 5)


def counted():
    with Run(seed=0) as run:
        model = run.model(nn.Linear(5, 2))
        warmup = Warmup(run.optimizer(torch.optim.SGD(model.parameters(), lr=0.0)))
        for _ in run.epochs(3):
            for x in run.train(run.loader(torch.ones(40, 5), global_batch=8, micro_batch=2)):
                if run.step(model(x).square().mean()):
                    warmup.step()
        return warmup.steps


def rolled_out():
    """What a run is computed from is named as its micro-batches are."""
    with Run(seed=0) as run:
        model = run.model(nn.Linear(2, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        states, rewards = torch.zeros(32, 2), torch.zeros(32)
        run.keep(states=states, rewards=rewards)
        loader = run.loader((states, rewards), global_batch=32, micro_batch=8)
        for number in run.steps(12, every=1):
            s = torch.randn(2)
            r = s.sum()
            states[number], rewards[number] = s, r
            for s, r in run.train(loader):
                run.step(F.mse_loss(model(s)[:, 0], r))
        return model.weight.tolist()


def test_a_count_of_steps_in_an_object_is_the_same_on_ranks_with_more_micro_batches_than_others():
    assert on_world(3, [(counted,)]) == [[15] * 3]


@pytest.mark.parametrize("ranks", [2, 3])
def test_names_of_a_rollout_may_be_those_of_micro_batches(ranks):
    ((alone,),) = on_world(1, [(rolled_out,)])
    (found,) = on_world(ranks, [(rolled_out,)])
    assert found == [alone] * ranks
