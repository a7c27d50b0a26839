"""What a script computes its training from is found in its source: state of a body, lost variables, ranks."""

import contextlib
import gc
import runpy
import sys
import textwrap
import time
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lockstep.errors import CheckpointError, MismatchError, UsageError
from lockstep.run import Run
from lockstep.run.inputs.training_inputs import training_inputs
from lockstep.run.source.line_calls import LineCalls
from worlds import on_world

SCRIPT = """
import collections, functools, random, time
import torch
from torch import nn
from torch.nn import functional as F
import lockstep

class Bar:  # which shows progress
    def __init__(self, items): self.items, self.n, self.shown = iter(items), 0, []
    def __iter__(self): return self
    def __next__(self):
        self.n += 1
        return next(self.items)
    def set_postfix(self, value): self.shown.append(value)

{setup}

def main(run):
    model = run.model(nn.Linear(3, 2))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    batches = run.loader((torch.randn(16, 3), torch.arange(16) % 2), global_batch=8, micro_batch=2)
{before}
    for epoch in run.epochs(3):
        bar = Bar(run.train(batches))
        for x, y in bar:
{body}
{after}

with lockstep.Run(seed=0) as run:
    main(run)
"""


def play(tmp_path, body, setup="", before="", after=""):
    """Run a script with these parts, on one rank."""
    parts = {"setup": textwrap.dedent(setup), "before": indent(before, 4), "body": indent(body, 12)}
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(**parts, after=indent(after, 8)))
    runpy.run_path(str(path), run_name="__main__")


def indent(text, spaces):
    return textwrap.indent(textwrap.dedent(text), " " * spaces)


STEP = "run.step(F.cross_entropy(model(x), y))"
# In none of these does a loss differ within the run: 1e9 is never reached, and what is drawn is never small enough.
CARRIED = {
    "variable": (
        "scale = 0.0",
        "scale += 1\nrun.step(F.cross_entropy(model(x), y) * (2 if scale > 1e9 else 1))",
        "scale",
    ),
    "by another name": ("n = 0", f"n += 1\nstop = n > 1e9\nif not stop:\n    {STEP}", "n"),
    "condition of break": ("n = 0", f"n += 1\nif n > 1e9:\n    break\n{STEP}", "n"),
    "list": (
        "last = []",
        "loss = F.cross_entropy(model(x), y)\nlast.append(loss.item())\n"
        "if len(last) > 1e9:\n    loss = loss * 0.1\nrun.step(loss)",
        "the length of last",
    ),
    "learning rate": ("n = 0", f"n += 1\nif n > 1e9:\n    optimizer.param_groups[0]['lr'] = 0.1\n{STEP}", "n"),
    "temporary list": (
        "pool = []",
        "parts = []\nfor row in x:\n    pool.append(row)\n    parts.append(pool[0] if len(pool) > 1e9 else row)\n"
        "run.step(F.cross_entropy(model(torch.stack(parts)), y))",
        "the length of pool",
    ),
    "in later steps only": (
        "seen = 0",
        "if run.progress.step > 1e9:\n    seen += len(x)\nrun.step(F.cross_entropy(model(x), y) / (1 + seen))",
        "seen",
    ),
    "in some steps, from a loss": (
        "scale = 1.0",
        "loss = F.cross_entropy(model(x), y) * scale\n"
        "if run.progress.step % 1000 == 999:\n    scale = 0.9 * scale + 0.1 * loss.item()\nrun.step(loss)",
        "scale",
    ),
    "the last micro-batch": (
        "last = None",
        "both = x if last is None or run.progress.step < 1e9 else x + last\nlast = x\n"
        "run.step(F.cross_entropy(model(both), y))",
        "last",
    ),
    "key": (
        "state = dict(n=0, log=[])",
        f"state['n'] += 1\nstate['log'].append(1)\nif state['n'] < 1e9:\n    {STEP}",
        "state['n']",
    ),
    "nonlocal variables": (
        "n, scale = 0, 1.0\ndef after():\n    nonlocal n, scale\n    n += 1\n    if n > 1e9:\n        scale = 2.0",
        "run.step(F.cross_entropy(model(x), y) * scale)\nafter()",
        "n",
    ),
    "iterator of a package that only some bodies take from": (
        "others = iter(torch.utils.data.DataLoader(torch.ones(8)))",
        "if run.progress.step > 1e9:\n    x = x * next(others)\nrun.step(F.cross_entropy(model(x), y))",
        "others",
    ),
    "lambda": ("n = [0]\nnow = lambda: n[0]", f"n[0] += 1\nif now() < 1e9:\n    {STEP}", "n[0]"),
}
SETUPS = {
    "tensor whose values are not looked at, as on a GPU": """
        class Running:
            mean = torch.zeros(2**20 + 1)
            def __call__(self, x):
                self.mean = 0.9 * self.mean + 0.1 * x.mean()
                return torch.where(x.mean() > 1e9 + self.mean[0], 0.0, 1.0) * x
        change = Running()
    """,
    "object": """
        class Pool:
            def __init__(self):
                self.seen, self.size = [], 10**9
            def query(self, x):
                self.seen.append(x)
                return self.seen[0] if len(self.seen) > self.size else x
        pool = Pool()
        def change(x): return pool.query(x)
    """,
    "called object": """
        class Warm:
            n = 0
            def __call__(self, x):
                self.n += 1
                return x if self.n < 1e9 else 2 * x
        change = Warm()
    """,
    "global": """
        n = 0
        def change(x):
            global n
            n += 1
            return x if n < 1e9 else 2 * x
    """,
    "closure": """
        def make():
            n = 0
            def change(x):
                nonlocal n
                n += 1
                return x if n < 1e9 else 2 * x
            return change
        change = make()
    """,
    "decorated": """
        class Count: n = 0
        count = Count()
        def limited(function):
            @functools.wraps(function)
            def inner(x):
                count.n += 1
                return function(x) if count.n < 1e9 else x
            return inner
        @limited
        def change(x): return x
    """,
    "property": """
        class Box:
            n = 0
            @property
            def late(self): return self.n > 1e9
        box = Box()
        def change(x):
            box.n += 1
            return 2 * x if box.late else x
    """,
    "module": """
        class Layer(nn.Module):
            n = 0
            def forward(self, x):
                self.n += 1
                return 2 * x if self.n > 1e9 else x
        change = Layer()
    """,
    "hook": """
        n = [0]
        def late(module, inputs, output):
            n[0] += 1
            return 2 * output if n[0] > 1e9 else output
        change = nn.Identity()
        change.register_forward_hook(late)
    """,
    "backward": """
        class Reversed(torch.autograd.Function):
            n = 0
            @staticmethod
            def forward(context, x): return x.view_as(x)
            @staticmethod
            def backward(context, gradient):
                Reversed.n += 1
                return gradient if Reversed.n < 1e9 else -gradient
        def change(x): return Reversed.apply(x.requires_grad_())
    """,
    "a method that only some bodies call": """
        class Penalty:
            mean = torch.zeros(())
            def __call__(self, x):
                mean = self.mean.lerp(x.mean(), 0.1)
                self.mean = mean.detach()
                return x * mean
        penalty = Penalty()
        def change(x): return penalty(x) if x.sum() > 1e9 else x
    """,
    "a draw of a generator that only some bodies make": """
        generator = torch.Generator()
        def change(x): return x * torch.rand(1, generator=generator) if x.sum() > 1e9 else x + draw(x)
        class Draws:
            random = random.Random(0)
            def __call__(self, x): return self.random.random() if x.sum() > 1e9 else 0.0
        draw = Draws()
    """,
    "a set of what this rank has met": """
        met = set()
        def change(x):
            met.update(range(len(x)))
            return 2 * x if len(met) > 1e9 else x
    """,
    "a context variable": """
        import contextvars
        calls = contextvars.ContextVar("calls", default=0)
        def change(x):
            calls.set(calls.get() + 1)
            return 2 * x if calls.get() > 1e9 else x
    """,
    "the environment": """
        import os
        os.environ["CALLS"] = "0"
        def change(x):
            os.environ["CALLS"] = str(int(os.environ["CALLS"]) + 1)
            return 2 * x if int(os.environ.get("CALLS")) > 1e9 else x
    """,
    "a dictionary by weak references": """
        import weakref
        calls = weakref.WeakKeyDictionary()
        class Layer(nn.Module):
            def forward(self, x):
                calls[self] = calls.get(self, 0) + 1
                return 2 * x if calls[self] > 1e9 else x
        change = Layer()
    """,
    "an endless iterator": """
        import itertools
        scales = itertools.cycle([1.0] * 1000 + [2.0])
        def change(x): return x * next(scales)
    """,
    "a file": """
        import tempfile
        log = tempfile.NamedTemporaryFile("w")
        def change(x):
            print(1, file=log, flush=True)
            with open(log.name) as file:
                return 2 * x if len(file.readlines()) > 1e9 else x
    """,
    "a database": """
        import sqlite3
        known = sqlite3.connect(":memory:")
        known.execute("create table calls (i)")
        def change(x):
            known.execute("insert into calls values (1)")
            (calls,) = known.execute("select count(*) from calls").fetchone()
            return 2 * x if calls > 1e9 else x
    """,
    "the clock": """
        began = time.time()
        def change(x): return 2 * x if time.time() - began > 1e9 else x
    """,
    "the method of an iterator": """
        import itertools
        now = itertools.count().__next__
        def change(x): return x if now() < 1e9 else 2 * x
    """,
    "an iterator that only some bodies take from": """
        items = iter([1.0, 2.0, 3.0])
        def change(x): return x * next(items) if x.sum() > 1e9 else x
    """,
    "a variable that another one decides": """
        class Machine:
            n, scale = 0, 1.0
            def advance(self):
                self.n += 1
                if self.n > 1e9: self.scale = 2.0
        machine = Machine()
        def change(x):
            machine.advance()
            return x * machine.scale
    """,
    "handlers of an event": """
        handlers, state = collections.defaultdict(list), {"n": 0, "scale": 1.0}
        def on(event): return lambda handler: handlers[event].append(handler) or handler
        @on("batch")
        def count(x): state["n"] += 1
        @on("batch")
        def rescale(x):
            if state["n"] > 1e9: state["scale"] = 2.0
        def fire(event, *given):
            for handler in handlers[event]: handler(*given)
        def change(x):
            fire("batch", x)
            return x * state["scale"]
    """,
    "callbacks, by the names of their methods": """
        class Quiet:
            def on_batch(self, x): pass
        class Rescales:
            n, scale = 0, 1.0
            def on_batch(self, x):
                self.n += 1
                if self.n > 1e9: self.scale = 2.0
        callbacks = [Quiet(), Rescales()]
        def call(event, *given):
            for callback in callbacks: getattr(callback, f"on_{event}")(*given)
        def change(x):
            call("batch", x)
            return x * callbacks[1].scale
    """,
    "objects that are counted": """
        class Batch:
            made = 0
            def __init__(self, x):
                self.x, self.number = x, Batch.made
                Batch.made += 1
        def change(x):
            batch = Batch(x)
            return batch.x * (2.0 if batch.number > 1e9 else 1.0)
    """,
    "a data descriptor": """
        class Counted:
            def __set_name__(self, owner, name): self.name = "_" + name
            def __get__(self, owner, kind):
                vars(owner)[self.name] = vars(owner).get(self.name, 0) + 1
                return 2.0 if vars(owner)[self.name] > 1e9 else 1.0
        class Options:
            scale = Counted()
        options = Options()
        def change(x):
            return x * options.scale
    """,
    "what __getattr__ makes": """
        class Options:
            def __init__(self): self.seen = 0
            def __getattr__(self, name):
                self.seen += 1
                return 2.0 if self.seen > 1e9 else 1.0
        options = Options()
        def change(x):
            return x * options.scale
    """,
    "an operator": """
        class Scale:
            def __init__(self): self.seen = 0
            def __rmatmul__(self, x):
                self.seen += 1
                return x * (2.0 if self.seen > 1e9 else 1.0)
        scale = Scale()
        def change(x):
            return [x][0] @ scale if not isinstance(x, torch.Tensor) else scale.__rmatmul__(x)
    """,
    "actions in a queue": """
        actions, seen = collections.deque(), []
        def count(x):
            seen.append(1)
            return x * (2.0 if len(seen) > 1e9 else 1.0)
        def change(x):
            actions.append(functools.partial(count, x))
            return actions.popleft()()
    """,
    "a function that is awaited": """
        class Controller:
            def __init__(self): self.seen = 0
            async def factor(self):
                self.seen += 1
                return 2.0 if self.seen > 1e9 else 1.0
        controller = Controller()
        async def scaled(x):
            return x * await controller.factor()
        def change(x):
            try:
                scaled(x).send(None)
            except StopIteration as end:
                return end.value
    """,
    "a function under no_grad": """
        class Mean:
            def __init__(self): self.mean = 0.0
            @torch.no_grad()
            def __call__(self, x):
                if x.sum() > 1e9:
                    self.mean = 0.9 * self.mean + x.mean().item()
                return self.mean
        mean = Mean()
        def change(x):
            return x + mean(x)
    """,
    "a greatest value in place": """
        top = torch.full((3,), 1e9)
        def change(x):
            if x.sum() > 1e9:
                torch.maximum(top, x.amax(0), out=top)
            return x / top
    """,
    "attributes that are set by their names": """
        from types import SimpleNamespace
        options, later, seen = SimpleNamespace(scale=1.0), {10**9: {"scale": 2.0}}, []
        def change(x):
            vars(options).update(later.get(len(seen), {}))
            seen.append(1)
            return x * options.scale
    """,
    "an iterator that begins again at its end": """
        class Endless:
            def __init__(self, items): self.items, self.iterator = items, iter(items)
            def __call__(self):
                try:
                    return next(self.iterator)
                except StopIteration:
                    self.iterator = iter(self.items)
                    return next(self.iterator)
        others = Endless([torch.ones(3)] * 2)
        def change(x): return x * others() if x.sum() > 1e9 else x
    """,
    "default": """
        def change(x, seen=[]):
            seen.append(1)
            return 2 * x if len(seen) > 1e9 else x
    """,
}


@pytest.mark.parametrize("name", CARRIED)
def test_what_a_body_changes_and_computes_with_is_refused_before_it_shows(tmp_path, name):
    before, body, named = CARRIED[name]
    with pytest.raises(UsageError, match="depends on something that it changes itself") as caught:
        play(tmp_path, body, before=before)
    assert f", and {named}, which " in str(caught.value)


MARGIN = """
    class Margin:
        def __init__(self): self.margin, self.shown = 1.0, 0
        def set_margin(self, margin): self.margin = margin
        def relax(self): self.margin *= 0.5
        def show(self): self.shown += 1
        def __call__(self, out, y): return self.margin * F.cross_entropy(out, y)
    class Callback:
        def on_epoch_end(self, trainer): pass
    class Relaxing(Callback):
        def on_epoch_end(self, trainer):
            super().on_epoch_end(trainer)
            if trainer.n > 1e9:
                trainer.loss.relax()
    class Trainer:
        def __init__(self, loss): self.n, self.loss, self.callbacks = 0, loss, [Relaxing()]
"""
#: By what is changed between two passes: what is there before, the loss, and the lines that change it.
BETWEEN = {
    "function": ("", "loss(model(x), y)", "if n > 1e9:\n    loss = nn.CrossEntropyLoss(label_smoothing=0.1)"),
    "lambda": ("", "loss(model(x), y)", "if n > 1e9:\n    loss = lambda out, y: 0.5 * F.cross_entropy(out, y)"),
    "method": ("", "loss(model(x), y)", "if n > 1e9:\n    loss.relax()"),
    "argument of a method": ("", "loss(model(x), y)", "loss.set_margin(1 + 1e-9 * n)"),
    "argument of it by name": ("", "loss(model(x), y)", "loss.set_margin(margin=1 + 1e-9 * n)"),
    "function within": (
        "w = 1.0\ndef halve():\n    nonlocal w\n    w *= 0.5",
        "w * loss(model(x), y)",
        "if n > 1e9:\n    halve()",
    ),
    "item that is taken away": ("ws = [0.5, 1.0]", "ws[-1] * loss(model(x), y)", "if n > 1e9:\n    ws.pop()"),
    "scheduler": (
        "cool = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)\nrun.keep(cool=cool)",
        "loss(model(x), y)",
        "if n > 1e9:\n    cool.step()",
    ),
    "one of two schedulers": (
        "warm, cool = [torch.optim.lr_scheduler.ExponentialLR(optimizer, g) for g in (1.1, 0.5)]\n"
        "run.keep(warm=warm, cool=cool)",
        "loss(model(x), y)",
        "(cool if n > 1e9 else warm).step()",
    ),
    "random numbers": ("", "loss(model(x), y)", "torch.manual_seed(n)"),
    "number of steps": ("", "loss(model(x), y)", "for _ in run.steps(run.progress.step + n // 10**9):\n    pass"),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_so_is_what_a_count_changes_between_two_passes(tmp_path, name):
    before, loss, after = BETWEEN[name]
    with pytest.raises(UsageError, match="depends on something that it changes itself") as caught:
        play(
            tmp_path, f"n += 1\nrun.step({loss})", setup=MARGIN, before=f"n, loss = 0, Margin()\n{before}", after=after
        )
    assert " and n, which " in str(caught.value)


TRAINER = """
    class Trainer:
        def __init__(self, model):
            self.counts, self.marks, self.model, self.every = {"bodies": 0}, [0], model, int(1e9)
            self.weights = [p for p in model.parameters() if p.dim() > 1]
            self.slow = [p.detach().clone() for p in self.weights]

        def loss(self, last, x, y):
            self.counts["bodies"] += 1
            self.marks[0] += len(x)
            return F.cross_entropy(last(self.model(x)), y)

        @torch.no_grad()
        def after(self):
            count = self.counts["bodies"]
            {change}
"""
#: By how a method of a trainer changes, once a step is done, what the training is computed from.
AFTER_STEPS = {
    "mode": ("if count > 1e9: self.model[1].eval()", "self.counts['bodies']"),
    "mode, by an item of a list": ("if self.marks[0] > 1e9: self.model[1].eval()", "self.marks[0]"),
    "option of one of torch's modules": ("self.model[0].p = 0.5 * (1 - 1e-9 * count)", "self.counts['bodies']"),
    "weights, by a list of its own": (
        "for slow, p in zip(self.slow, self.weights):\n                if count % self.every == 1e9: p.copy_(slow)",
        "self.counts['bodies']",
    ),
    "data of weights": (
        "for w in self.weights:\n                if count > 1e9: w.data.clamp_(-0.1, 0.1)",
        "self.counts['bodies']",
    ),
    "average that is kept": (
        "for slow, p in zip(self.slow, self.weights): slow.lerp_(p, 1 / (1 + count))",
        "self.counts['bodies']",
    ),
}


@pytest.mark.parametrize("name", AFTER_STEPS)
def test_so_is_what_a_count_changes_after_a_step(tmp_path, name):
    change, named = AFTER_STEPS[name]
    before = """
        first = run.model(nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(3), nn.Linear(3, 3)))
        both = [optimizer, run.optimizer(torch.optim.SGD(first.parameters(), lr=0.1))]
        trainer = Trainer(first)
        run.keep(slow=trainer.slow)
    """
    with pytest.raises(UsageError, match="depends on something that it changes itself") as caught:
        play(
            tmp_path,
            "if run.step(trainer.loss(model, x, y), optimizer=both):\n    trainer.after()",
            setup=TRAINER.replace("{change}", change),
            before=before,
        )
    assert f" and {named.replace('self', 'trainer')}, which " in str(caught.value)


def test_so_is_what_a_callback_changes_then(tmp_path):
    body = "trainer.n += 1\nrun.step(trainer.loss(model(x), y))"
    after = "for callback in trainer.callbacks:\n    callback.on_epoch_end(trainer)"
    with pytest.raises(UsageError, match="depends on something that it changes itself") as caught:
        play(tmp_path, body, setup=MARGIN, before="trainer = Trainer(Margin())", after=after)
    assert " and trainer.n, which " in str(caught.value)


NOTED = {
    "callbacks": (
        "meters = [Margin()]",
        "value = loss(model(x), y)\nrun.step(value)\nfor meter in meters:\n    meter.set_margin(value.item())",
    ),
    "comprehension in a lambda": (
        "mean = lambda values: sum([value for value in values]) / len(values)",
        "run.step(mean([loss(model(x), y), loss(model(x), y)]))",
    ),
}


@pytest.mark.parametrize("name", NOTED)
def test_what_no_loss_is_computed_from_may_be_noted(tmp_path, name, capfd):
    before, body = NOTED[name]
    play(tmp_path, body, setup=MARGIN, before=f"loss = Margin()\n{before}")
    assert "could not be read" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "after",
    ["loss.set_margin(1 + epoch)", "if n > 5:\n    loss.show()", "if epoch > 1:\n    loss = nn.CrossEntropyLoss()"],
)
def test_a_count_may_decide_about_what_no_loss_is_computed_from(tmp_path, after):
    play(tmp_path, "n += 1\nrun.step(loss(model(x), y))", setup=MARGIN, before="n, loss = 0, Margin()", after=after)


CHOICES = {
    "at once": ("", "batches if n < 150 else others"),
    "item": ("", "(batches, others)[n > 150]"),
    "by a variable": ("chosen = batches if n < 150 else others", "chosen"),
    "by an item of a variable": ("chosen = (batches, others)[n > 150]", "chosen"),
    "by a test": ("chosen = batches\nif n > 150:\n    chosen = others", "chosen"),
}


@pytest.mark.parametrize("name", CHOICES)
def test_so_is_what_chooses_a_loader(tmp_path, name):
    before = "n, others = 0, run.loader((torch.ones(16, 3), torch.ones(16).long()), global_batch=8, micro_batch=2)"
    first, chosen = CHOICES[name]
    after = f"{first}\nfor x, y in run.train({chosen}):\n    n += 1\n    {STEP}"
    with pytest.raises(UsageError, match=r"and n, which run\.train\(\.\.\.\) is computed from"):
        play(tmp_path, STEP, before=before, after=after)


@pytest.mark.parametrize("name", SETUPS)
def test_so_is_what_its_functions_and_objects_hold(tmp_path, name):
    with pytest.raises(UsageError, match="depends on something that it changes itself"):
        play(tmp_path, "run.step(F.cross_entropy(model(change(x)), y))", setup=SETUPS[name])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # of a file that the script has left open: no later test's
        gc.collect()


SAMPLES = {
    "data set": (
        "run.loader(Counting(), global_batch=8, micro_batch=2)",
        "def __getitem__(self, i):\n        self.n += 1\n        return (X[i] if self.n < 1e9 else 2 * X[i]), i % 2",
    ),
    "data set within another": (
        "run.loader(torch.utils.data.Subset(Counting(), range(16)), global_batch=8, micro_batch=2)",
        "def __getitem__(self, i):\n        self.n += 1\n        return (X[i] if self.n < 1e9 else 2 * X[i]), i % 2",
    ),
    "collate function": (
        "run.loader([(x, 0) for x in X], global_batch=8, micro_batch=2, collate_fn=Counting())",
        "def __call__(self, samples):\n        self.n += 1\n"
        "        x, y = torch.utils.data.default_collate(samples)\n"
        "        return (x if self.n < 1e9 else 2 * x), y",
    ),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_so_is_what_samples_are_made_from(tmp_path, name):
    made, method = SAMPLES[name]
    setup = (
        "X = torch.randn(16, 3)\n"
        "class Counting(torch.utils.data.Dataset):\n    n = 0\n    def __len__(self): return 16\n    " + method
    )
    with pytest.raises(UsageError, match=r"Counting\.n, which a sample is computed from, is changed in line"):
        play(tmp_path, STEP, setup=setup, before=f"batches = {made}")


AT_STEPS = {
    "attribute": "ds.level = 0.5 * run.progress.step",
    "method": "ds.harder(0.1)",
    "callback": "for callback in callbacks:\n    callback(0.1)",
    "tensor in place": "ds.scale.mul_(0.9)",
    "item": "ds.labels[0] = run.progress.step",
    "list": "ds.chosen.append(1)",
}


@pytest.mark.parametrize("name", AT_STEPS)
def test_what_samples_are_made_from_changes_between_passes_only(tmp_path, name):
    """Samples of later steps have been read where a step is done, by as many loader processes as a machine has CPUs."""
    setup = """
        class Samples(torch.utils.data.Dataset):
            def __init__(self):
                self.level, self.scale, self.labels, self.chosen = 0.0, torch.ones(3), [0] * 16, [0]
            def __len__(self): return 16
            def __getitem__(self, i):
                x = torch.full((3,), float(i)) * self.scale + self.level
                return x, (self.labels[i] + len(self.chosen)) % 2
            def harder(self, by): self.level = self.level + by
        ds = Samples()
        callbacks = [ds.harder]
    """
    before = "batches = run.loader(ds, global_batch=8, micro_batch=2)"
    change = AT_STEPS[name]
    with pytest.raises(UsageError, match=r"which a sample is computed from, is changed in line|made before its step"):
        play(tmp_path, f"if {STEP}:\n{textwrap.indent(change, '    ')}", setup=setup, before=before)
    (tmp_path / "between").mkdir()  # the source of a file is read once
    play(tmp_path / "between", STEP, setup=setup, before=before, after=change)


@pytest.mark.parametrize(
    ("loop", "body"),
    [
        ("for n, (x, y) in enumerate(run.train(batches)):", "x = x if n < 1e9 else 2 * x"),
        ("for (x, y), beta in zip(run.train(batches), [0.0] * 100):", "x = x * (1 + beta)"),
        ("for n, ((x, y), beta) in enumerate(zip(run.train(batches), [0.0] * 100)):", "if n > 1e9:\n    break"),
    ],
)
def test_what_counts_beside_the_loop_counts_micro_batches(tmp_path, loop, body):
    script = f"{loop}\n{indent(body, 4)}\n    {STEP}"
    with pytest.raises(UsageError, match=r"counts beside run.train\(...\), which are this rank's micro-batches"):
        play(tmp_path, STEP, before=f"for _ in run.epochs(1):\n{indent(script, 4)}")


def test_a_module_beside_the_script_is_read_as_well(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "meter_beside.py").write_text(
        "class Meter:\n    def __init__(self): self.n = 0\n    def update(self): self.n += 1\n"
    )
    with pytest.raises(UsageError, match=r"meter\.n, which run\.step\(\.\.\.\) is computed from"):
        play(
            tmp_path,
            f"meter.update()\nif meter.n > 1e9:\n    x = 2 * x\n{STEP}",
            setup="from meter_beside import Meter",
            before="meter = Meter()",
        )


def test_a_sum_over_all_micro_batches_of_each_rank_is_the_same_on_any_world(tmp_path):
    body = """
        if run.counts:
            mine += x.detach().sum()
        if run.step(F.cross_entropy(model(x), y) * scale):
            scale = 1.0 + run.sum(mine) * 1e-3
            mine.zero_()
    """
    play(tmp_path, body, before="mine, scale = torch.zeros(()), 1.0")


def test_what_a_generator_around_the_loop_returns_at_its_end_may_change(tmp_path):
    setup = """
        def watched(loop):
            lines = []
            for item in loop:
                lines.append("a batch")
                yield item
            return lines
    """
    play(tmp_path, STEP, setup=setup, before="Bar = watched")


#: By what holds a mean over the last micro-batch of each rank: what is there before, the loss, and what changes it.
OF_LAST_MEANS = {
    "variable": ("scale = 1.0", "loss * scale", "scale = 1 + run.mean(loss.item()) * 1e-30"),
    "tensor that is changed twice": (
        "centre = torch.zeros(2)",
        "loss + centre.sum()",
        "centre.mul_(0.9).add_(1e-30 * run.mean(model(x).detach().mean(0)))",
    ),
    "tensor that is kept": (
        "centre = torch.zeros(2)\nrun.keep(centre=centre)",
        "loss + centre.sum()",
        "centre.mul_(0.9).add_(1e-30 * run.mean(model(x).detach().mean(0)))",
    ),
    "value that is kept": (
        "run.keep(level=0.5)",
        "loss * run.kept.level",
        "run.kept.level = 0.9 * run.kept.level + 1e-30 * run.mean(loss.item())",
    ),
    "list made in the body": (
        "scale = 1.0",
        "loss * scale",
        "scale = 1 + len(run.gather(found)) * 1e-30",
    ),
}


@pytest.mark.parametrize("name", OF_LAST_MEANS)
def test_means_of_the_last_micro_batch_of_each_rank_are_refused(tmp_path, name):
    before, loss, change = OF_LAST_MEANS[name]
    found = f"loss = {STEP[9:-1]}\nfound = []\nfound.append(loss.item())\n"
    with pytest.raises(UsageError, match=r"is computed from run.(mean|gather)\(...\) of each rank's last micro-batch"):
        play(tmp_path, f"{found}if run.step({loss}):\n    {change}", before=before)


def test_what_a_memory_has_of_the_model_as_it_was_is_refused(tmp_path):
    """No two bodies differ: the first one has put into the memory what all later ones get."""
    before = (
        "@functools.lru_cache\ndef first(i):\n    with torch.no_grad():\n        return model(torch.ones(1, 3)).sum()\n"
    )
    body = "run.step(F.cross_entropy(model(x), y) * (2 if first(0) > 1e9 else 1))"
    with pytest.raises(UsageError, match="is computed from what first remembers of the model as it was"):
        play(tmp_path, body, before=before)


HARMLESS = {
    "log": (
        "total, losses, seen = 0.0, [], collections.Counter()",
        """
        loss = F.cross_entropy(model(x), y)
        total += loss.item()
        losses.append(loss.item())
        seen.update(y.tolist())
        if len(losses) % 2 == 0:
            print(total / len(losses), seen)
        run.step(loss)
        """,
    ),
    "step counted where it is done": ("n = 0", f"if n > 1e9:\n    break\nif {STEP}:\n    n += 1"),
    "cache": (
        "known = {}",
        "key = int(x.sum() * 1e6)\nif key not in known:\n    known[key] = x * 2\n"
        "run.step(F.cross_entropy(model(known[key]), y))",
    ),
    "a bar that shows a mean": (
        "total = 0.0",
        """
        total += F.cross_entropy(model(x), y).item()
        bar.set_postfix(total)
        run.step(F.cross_entropy(model(x), y))
        """,
    ),
    "set in both branches": (
        "",
        "if y[0] > 0:\n    z = x\nelse:\n    z = 2 * x\nz = z + 1\nrun.step(F.cross_entropy(model(z), y))",
    ),
    "a comprehension's own variable": (
        "flag = False",
        "flag |= True\nfor part in (x,):\n    run.step(F.cross_entropy(model(part), y))\n"
        "if flag:\n    sum(part for part in (1, 2))",
    ),
    "made anew in each body": (
        "parts = [0]",
        "parts = []\nfor row in x:\n    parts.append(row)\nrun.step(F.cross_entropy(model(torch.stack(parts)), y))",
    ),
    "carried by the run": (
        "",
        "n = run.carry.get('n', 0)\nrun.carry['n'] = n + 1\n"
        "run.step(F.cross_entropy(model(x), y) * (2 if n > 1e9 else 1))",
    ),
    "kept by the run": (
        "last = [0]\nrun.keep(last=last)",
        "loss = F.cross_entropy(model(x), y) * (2 if last[0] > 1e9 else 1)\nif run.step(loss):\n    last[0] += 1",
    ),
    "an option that is not set": (
        "n, options = 0, dict(warm=False, how='plain')",
        "n += 1\nrate = n if options['how'] == 'scaled' else 1\nif options['warm'] and n < 1e9:\n    rate = 2 * n\n"
        "run.step(F.cross_entropy(model(x), y) * rate)",
    ),
    "counted for a print": (
        "n = 0",
        f"n += 1\nif n % 2 == 0:\n    print(n)\n{STEP}",
    ),
    "timed": (
        "times = []",
        "begin = time.time()\nout = model(x)\ntimes.append(time.time() - begin)\nrun.step(F.cross_entropy(out, y))",
    ),
}
HARMLESS_SETUPS = {
    "handlers of another event": """
        handlers, state = collections.defaultdict(list), {"n": 0, "scale": 1.0}
        def on(event): return lambda handler: handlers[event].append(handler) or handler
        @on("epoch")
        def rescale(x): state["scale"] = state["scale"] + (1.0 if x is None else 0.0)
        @on("batch")
        def count(x): state["n"] += 1
        def fire(event, *given):
            for handler in handlers[event]: handler(*given)
        def change(x):
            fire("batch", x)
            return x * state["scale"]
    """,
    "proxies that count what is asked of them": """
        class Counting:
            def __init__(self, inner): self.inner, self.calls, self.names = inner, 0, collections.Counter()
            def __getattr__(self, name):
                self.names[name] += 1
                return getattr(self.inner, name)
            def __call__(self, x):
                self.calls += 1
                return self.inner(x)
        net = Counting(nn.Identity())
        def change(x):
            return net(x) * (1.0 if net.training else 2.0)
    """,
    "timers around a function": """
        import contextlib
        class Timer(contextlib.ContextDecorator):
            def __init__(self): self.n, self.seconds = 0, 0.0
            def __enter__(self):
                self.began = time.perf_counter()
                return self
            def __exit__(self, *error):
                self.n += 1
                self.seconds += time.perf_counter() - self.began
        @Timer()
        def change(x):
            return x + 1
    """,
    "objects that say their time": """
        class Batch:
            def __init__(self, x): self.x, self.at = x, time.time()
        shown = []
        def change(x):
            batch = Batch(x)
            shown.append(batch)
            return batch.x
    """,
    "set anew and added to": """
        class Sum:
            def reset(self): self.total = 0.0
            def add(self, x): self.total = self.total + x
        parts = Sum()
        def change(x):
            parts.reset()
            for row in x:
                if row.sum() < 1e9:
                    parts.add(row)
            return x + parts.total
    """,
    "made when it is needed": """
        class Scale:
            by = None
            def __call__(self, x):
                if self.by is None or self.by.shape != x.shape:
                    self.by = torch.ones(x.shape, device=x.device)
                return x * self.by
        change = Scale()
    """,
    "an option of an object": """
        class Layer(nn.Module):
            def __init__(self):
                super().__init__()
                self.warms, self.n = False, 0
            def forward(self, x):
                self.n += 1
                return x * self.n if self.warms else x
        change = Layer()
    """,
    "timer around": """
        class Timer:
            def __init__(self): self.spent = []
            def __enter__(self): self.begin = time.time()
            def __exit__(self, *error): self.spent.append(time.time() - self.begin)
        timer = Timer()
        def change(x):
            with timer:
                return x * 2
    """,
    "counted calls": """
        def counted(function):
            def inner(*inputs):
                inner.calls += 1
                return function(*inputs)
            inner.calls = 0
            return inner
        @counted
        def change(x): return x * 2
    """,
    "log that hands on": """
        class Log:
            def __init__(self): self.values = []
            def through(self, name, value):
                self.values.append((name, value.mean().item()))
                return value
        log = Log()
        def change(x): return log.through('x', x * 2)
    """,
    "statistics of a layer": """
        class Layer(nn.Module):
            calls, largest = 0, 0.0
            def forward(self, x):
                self.calls += 1
                self.largest = max(self.largest, x.max().item())
                return x * 2
        change = Layer()
    """,
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_no_loss_is_computed_from_may_change(tmp_path, name):
    before, body = HARMLESS[name]
    play(tmp_path, body, before=before)


@pytest.mark.parametrize("name", HARMLESS_SETUPS)
def test_so_may_what_functions_and_objects_note(tmp_path, name):
    play(tmp_path, "run.step(F.cross_entropy(model(change(x)), y))", setup=HARMLESS_SETUPS[name])


@pytest.mark.parametrize(
    ("before", "on"),
    [
        ("run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1 * run.world_size))", "run.world_size"),
        ("rate = 0.1 if run.world_size > 1 else 0.2\noptimizer.param_groups[0]['lr'] = rate", "run.world_size"),
        ("run.scheduler(decay(optimizer, n=len(run.train(batches))))", "len(run.train(...))"),
        ("n = len(run.train(batches))\nrun.scheduler(decay(optimizer, 2 * n))", "len(run.train(...))"),
        ("part = run.train(batches)\nrun.scheduler(decay(optimizer, len(part)))", "len(run.train(...))"),
        ("run.scheduler(decay(optimizer, n=10 * getattr(run, 'world_size', 1)))", "run.world_size"),
    ],
)
def test_a_training_made_from_the_number_of_ranks_is_refused(tmp_path, before, on):
    setup = "def decay(optimizer, n): return torch.optim.lr_scheduler.StepLR(optimizer, n)"
    with pytest.raises(UsageError, match=r"^train.py:\d+: .* is computed from .*number of ranks") as caught:
        play(tmp_path, STEP, setup=setup, before=before)
    assert f"is computed from {on}, " in str(caught.value)


@pytest.mark.parametrize(
    "before",
    [
        "print(run.world_size * 2, f'{run.rank}', len(run.train(batches)))",
        "workers = 4 // (4 * run.world_size)\nrun.loader(torch.ones(8, 3), global_batch=8, workers=workers)",
        "mine = [1, 2, 3][run.rank :]\nmine.append(run.world_size)",
        "device = torch.device('cpu' if run.rank >= 0 else 'meta')\nmodel.to(device)",
    ],
)
def test_ranks_that_change_no_result_are_no_matter(tmp_path, before, capfd):
    play(tmp_path, STEP, before=before)
    assert "depends on run." not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("before", "what"),
    [
        ("run.loader(torch.ones(8, 3), global_batch=8 * run.world_size)", "run.loader(...) depends on run.world_size"),
        ("torch.manual_seed(3 + run.rank)", "torch.manual_seed(...) depends on run.rank"),
        ("dict(seed=run.rank)", "seed depends on run.rank"),
    ],
)
def test_a_batch_that_is_scaled_and_a_seed_of_a_rank_are_said(tmp_path, before, what, capfd, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    play(tmp_path, STEP, before=before)
    assert capfd.readouterr().err.count(f"{what}, and the result with it. Nothing needs to be scaled") == 1


def resumed(tmp_path, monkeypatch, **parts):
    """Play a script that ends after five steps, and then from the checkpoint of the fourth one."""
    monkeypatch.setenv("LOCKSTEP_CHECKPOINT", str(tmp_path / "saved"))
    monkeypatch.setenv("LOCKSTEP_SAVE_EVERY", "2 steps")
    monkeypatch.setenv("STOP", "1")
    parts["body"] = f"if os.environ['STOP'] == '1' and run.progress.step == 5: raise InterruptedError\n{STEP}"
    parts["setup"] = "import os\n" + textwrap.dedent(parts.get("setup", ""))
    with pytest.raises(InterruptedError):
        play(tmp_path, **parts)
    monkeypatch.setenv("STOP", "0")
    monkeypatch.setenv("LOCKSTEP_RESUME", "1")
    play(tmp_path, **parts)


SHRINKS = """
count = [0]

@torch.no_grad()
def shrink(optimizer, *_):
    count[0] += 1
    if count[0] > 10**6:
        for p in optimizer.param_groups[0]["params"]:
            p.mul_(0.9)

class Shrinking(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        shrink(self)
"""


@pytest.mark.parametrize("before", ["optimizer.register_step_post_hook(shrink)", "optimizer.__class__ = Shrinking"])
def test_what_optimizers_write_by_a_count_is_missed_after_a_resume(tmp_path, monkeypatch, before):
    with pytest.raises(CheckpointError, match="count"):
        resumed(tmp_path, monkeypatch, setup=SHRINKS, before=before)


WRITES = {
    "kept module, two lines": "for q in teacher.parameters():\n    q.mul_(n)\n    q.add_(1)",
    "kept module, chain": "for q, p in zip(teacher.parameters(), model.parameters()):\n    q.mul_(n).add_(p)",
    "chain behind a constant": "for p in model.parameters():\n    p.mul_(0.9).add_(n)",
    "view": "for p in model.parameters():\n    p.data.view(-1).mul_(n)",
    "operator": "for p in model.parameters():\n    p *= n",
    "list": "torch._foreach_mul_(list(model.parameters()), n)",
    "comprehension": "[p.mul_(n) for p in model.parameters()]",
    "condition of one": "[p.mul_(0.9) for p in model.parameters() if n > 5]",
    "one within another": "[[p.mul_(n) for p in part.parameters()] for part in model.modules()]",
    "state of the optimizer": "if n > 5:\n    optimizer.state.clear()",
    "item of it": "for p in model.parameters():\n    if n > 5:\n        optimizer.state[p]['momentum_buffer'].zero_()",
}


@pytest.mark.parametrize("name", WRITES)
def test_what_decides_about_a_write_is_missed_after_a_resume(tmp_path, monkeypatch, name):
    before = "n, teacher = 1.0, nn.Linear(3, 2)\nrun.keep(teacher=teacher)"
    after = "with torch.no_grad():\n" + textwrap.indent(WRITES[name], "    ") + "\nn += 1"
    with pytest.raises(CheckpointError, match=r"\bn, which .+ depends on, was 3\.0 when it began, and is 2\.0 now"):
        resumed(tmp_path, monkeypatch, before=before, after=after)


HANDS_ON = """
    def shrink(model, k):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(k)
    def hands_on(*args, **options): return shrink(*args, **options)
"""


@pytest.mark.parametrize("call", ["hands_on(model, n)", "hands_on(model, k=n)", "hands_on(k=n, model=model)"])
def test_so_is_what_a_function_hands_on_to_the_one_that_writes(tmp_path, monkeypatch, call):
    with pytest.raises(CheckpointError, match=r"\bn, which .+ depends on, was 3\.0 when it began, and is 2\.0 now"):
        resumed(tmp_path, monkeypatch, setup=HANDS_ON, before="n = 1.0", after=f"{call}\nn += 1")


def test_a_variable_that_a_schedule_depends_on_is_missed_after_a_resume(tmp_path, monkeypatch):
    """The rate is set from a variable that a resume begins anew, which shows epochs later only."""
    after = "turn += 1\nif turn == of:\n    optimizer.param_groups[0]['lr'] = 0.01"
    words = r"turn, which optimizer.param_groups\[0\]\['lr'\] depends on, was 2 when it began, and is 1 now"
    with pytest.raises(CheckpointError, match=words):
        resumed(tmp_path, monkeypatch, before="turn, of = 0, 5", after=after)


METER = """
    class Meter:
        @staticmethod
        def half(number): return number / 2
        def __init__(self): self.n, self.values = 0, []
        def update(self, value): self.n += 1; self.values.append(value)
    class Totals:
        seen = 0
        @classmethod
        def add(cls, number): cls.seen += number
        @classmethod
        def mean(cls): return cls.seen / 16
"""
REPORT = """
def count(): count.calls += 1
count.calls = 0
def report(run, number): run.log(number=number)
def ratio(part, whole): return part / whole
def accuracy(run, model, batches):
    right = 0
    for x, y in run.evaluate(batches):
        right += (model(x).argmax(1) == y).sum().item()
    return right / 16
def guesses(run, model, batches):
    for x, y in run.evaluate(batches):
        yield model(x).argmax(1), y
def labels(run, model, batches):
    yield from run.evaluate(batches)
def sums(run, model, batches):
    for _ in range(2):
        total = 0
        for x, y in run.evaluate(batches):
            total += len(y)
        yield run.sum(total)
def picture(numbers):
    axes = matplotlib.figure.Figure().subplots()
    axes.plot(numbers)
"""
EVALUATED = "seen = 0\nfor x, y in run.evaluate(batches):\n    seen += int((model(x).argmax(1) == y).sum())\n"
#: What is added up in the body, what is told after the loop, and the place that is named.
TOLD = {
    "count": ("seen += len(x)", "run.log(seen=seen)", "seen, which run.log(seen=...)"),
    "print": ("seen += len(x)", "print(f'{seen / 16:.2f} of all')", "seen, which print(...)"),
    "print of the leader": ("seen += len(x)", "if run.leads:\n    print(seen)", "seen, which print(...)"),
    "logger": ("seen += len(x)", "logging.info('%s samples', seen)", "seen, which logging.info(...)"),
    "file": ("seen += len(x)", "json.dump([seen], io.StringIO())", "seen, which json.dump(...)"),
    "rows of a file": ("seen += len(x)", "csv.writer(io.StringIO()).writerows([[seen]])", "seen, which writerows(...)"),
    "saved": ("seen += len(x)", "torch.save({'seen': seen}, io.BytesIO())", "seen, which torch.save(...)"),
    "table": (
        "seen += len(x)",
        "types.SimpleNamespace(rows=[seen], to_csv=str).to_csv('log.csv')",
        "seen, which to_csv(...)",
    ),
    "another way to write": ("seen += len(x)", "save_image = print\nsave_image(seen)", "seen, which save_image(...)"),
    "rows of a data base": (
        "seen += len(x)",
        "sqlite3.connect(':memory:').execute('select ?', (seen,))",
        "seen, which execute(...)",
    ),
    "exit code": (
        "seen += len(x)",
        "try:\n    sys.exit(seen)\nexcept SystemExit:\n    pass",
        "seen, which sys.exit(...)",
    ),
    "row of a table": (
        "seen += len(x)",
        "log = types.SimpleNamespace(loc={}, to_csv=str)\nlog.loc[epoch] = seen\nlog.to_csv()",
        "seen, which log.to_csv(...)",
    ),
    "attribute of a function": ("count()", "print(count.calls)", "count.calls, which print(...)"),
    "observer": (
        "pass",
        "extremes = torch.ao.quantization.MinMaxObserver()\nfor x, y in run.evaluate(batches):\n"
        "    extremes(x * len(history))\n    history.append(0)\n"
        "scale, zero = extremes.calculate_qparams()\ntorch.save(scale, io.BytesIO())",
        "extremes, which torch.save(...)",
    ),
    "history": ("seen += len(x)", "history.append(seen)\nprint(history)", "seen, which print(...)"),
    "report": ("seen += len(x)", "run.report(seen)", "seen, which run.report(...)"),
    "in the body": ("seen += len(x)\nprint(seen)", "pass", "seen, which print(...)"),
    "ratio of counts": ("seen += len(x)", "run.log(part=ratio(seen, 16))", "seen, which run.log(part=...)"),
    "of an object": ("meter.update(1)", "run.log(count=meter.n)", "meter.n, which run.log(count=...)"),
    "length of a list": ("meter.update(1)", "run.log(count=len(meter.values))", "meter.values, which"),
    "by a function": ("seen += len(x)", "report(run, seen)", "seen, which run.log(number=...)"),
    "by another variable": ("seen += len(x)", "done = seen * 2\nrun.log(done=done)", "seen, which run.log(done=...)"),
    "in an evaluation": ("pass", "for x, y in run.evaluate(batches):\n    seen += 1\nprint(seen)", "seen, which"),
    "in a function": ("pass", "print(accuracy(run, model, batches))", "right, which print(...)"),
    "a dict": ("seen += len(x)", "run.log(**{'seen': seen})", "seen, which run.log(...)"),
    "whether a file is written": (
        "pass",
        "for x, y in run.evaluate(batches):\n    seen += 1\n"
        "if seen > best:\n    best = seen\n    torch.save(model.state_dict(), io.BytesIO())",
        "seen, which torch.save(...)",
    ),
    "measured later": (
        "pass",
        "bank = [torch.zeros(1)]\nfor x, y in run.evaluate(batches):\n    bank.append(x)\n"
        "bank = torch.cat([each.flatten() for each in bank])\n"
        "for x, y in run.evaluate(batches):\n    run.measure(far=x.mean(1) > bank.mean())",
        "bank, which run.measure(far=...)",
    ),
    "collected": (
        "pass",
        "print(sum(y.sum() for x, y in run.evaluate(batches)))",
        "print(...) is computed from what line",
    ),
    "of a class": ("Totals.add(len(x))", "run.log(mean=Totals.mean())", "Totals.seen, which run.log(mean=...)"),
    "by a static method": ("seen += len(x)", "run.log(half=meter.half(seen))", "seen, which run.log(half=...)"),
    "a generator's items": (
        "pass",
        "print(len(list(guesses(run, model, batches))))",
        "print(...) is computed from what",
    ),
    "made of a generator's items": (
        "pass",
        "right = [int((p == y).sum()) for p, y in guesses(run, model, batches)]\nprint(sum(right))",
        "print(...) is computed from what line",
    ),
    "an evaluation handed on": (
        "pass",
        "print([int(y.sum()) for x, y in labels(run, model, batches)])",
        "print(...) is computed from what line",
    ),
    "drawn": ("history.append(len(x))", "picture(history)", "history, which axes.plot(...)"),
    "drawn at once": (
        "history.append(len(x))",
        "matplotlib.figure.Figure().gca().bar(range(len(history)), history)",
        "history, which bar(...)",
    ),
    # What decides alike on all ranks now and then, and otherwise on one rank: each has its part of the sum.
    "a rate": (
        "pass",
        f"{EVALUATED}if seen > 6:\n    for group in optimizer.param_groups:\n        group['lr'] = 0.01",
        "seen, which group['lr']",
    ),
    "the end": ("pass", f"{EVALUATED}if seen > 6:\n    break", "seen, which run.train(...)"),
    "weights": (
        "pass",
        f"{EVALUATED}if seen > best:\n    best, held = seen, copy.deepcopy(model.state_dict())\n"
        "model.load_state_dict(held)",
        "seen, which model.load_state_dict(...)",
    ),
    "a file of the last batch": (
        "pass",
        "json.dump(loss.item(), io.StringIO())",
        "json.dump(...) is computed from loss, of",
    ),
    "rows of the last batch": (
        "pass",
        "history.append([1, x.mean().item()])\ncsv.writer(io.StringIO()).writerows(history)",
        "writerows(...) is computed from x, of the last micro-batch of the loop in line",
    ),
    "a file under a key with braces": (
        "pass",
        "files = {'{x}': io.StringIO()}\nfiles['{x}'].write(str(loss.item()))\nloss = 0.0\nhistory.append(loss)",
        "files['{x}'].write(...) is computed from loss, of the last micro-batch of the loop in line",
    ),
    "a file of the last batch of an evaluation": (
        "pass",
        "for x, y in run.evaluate(batches):\n    out = model(x)\ntorch.save({'out': out}, io.BytesIO())",
        "torch.save(...) is computed from out, of the last micro-batch of the loop in line",
    ),
    "in a function that decides": (
        "pass",
        "if accuracy(run, model, batches) > 0.9:\n    optimizer.param_groups[0]['lr'] = 0.01",
        "right, which optimizer.param_groups[0]['lr']",
    ),
}
AGAIN = "x = torch.zeros(2, 3)\nfor turn in range(2):\n    x = x + 0.1 * x.tanh()\n"
NOT_PARTS = {
    "a name that is used again": ("pass", f"{AGAIN}print(x)"),
    "a name that is used again, in a file": ("pass", f"{AGAIN}csv.writer(io.StringIO()).writerow(x.tolist())"),
    "items of another loop": (
        "pass",
        "right = 0\nfor x, y in zip(torch.ones(4, 2), torch.ones(4, 2)):\n    right += (y == 1).sum().item()\n"
        "json.dump([right, *vars(types.SimpleNamespace(a=1))], io.StringIO())",
    ),
    "a rate by the sum of all": (
        "pass",
        f"{EVALUATED}if run.sum(seen) > 6:\n    optimizer.param_groups[0]['lr'] = 0.01",
    ),
    "weights by the sum of all": (
        "pass",
        f"{EVALUATED}seen = run.sum(seen)\n"
        "if seen > best:\n    best = seen\n    model.load_state_dict(model.state_dict())",
    ),
    "collected and brought together": (
        "pass",
        "print(run.sum(sum(y.sum().item() for x, y in run.evaluate(batches))))",
    ),
    "a generator's items brought together": (
        "pass",
        "parts = run.gather([len(y) for p, y in guesses(run, model, batches)])\nprint(sum(map(sum, parts)))",
    ),
    "what a generator gives after a loop": ("pass", "print(list(sums(run, model, batches)))"),
    "drawn of all ranks": ("history.append(len(x))", "picture([n for part in run.gather(history) for n in part])"),
    "drawn of metrics": ("run.measure(seen=1.0)", "history.append(run.metrics['seen'])\npicture(history)"),
    "of an object's own class": ("pass", "Totals.add(1)\nprint(Totals.mean())"),
    "names of two loops": ("pass", f"{EVALUATED}if epoch == 9:\n    break"),
    "of each rank, as a name says": (
        "pass",
        "for x, y in run.evaluate(batches):\n    local_seen += 1\nprint(local_seen)",
    ),
    "brought together": ("seen += len(x)", "run.log(seen=run.sum(seen))"),
    "under the same name": ("seen += len(x)", "seen = run.sum(seen)\nprint(seen)"),
    "several at once": ("seen += len(x)", "seen, n = run.sum(torch.tensor([seen, 1])).tolist()\nprint(seen / n)"),
    "by torch": ("total += len(x)", "if run.world_size > 1:\n    dist.all_reduce(total)\nprint(total.item())"),
    "gathered": ("meter.update(1)", "values = run.gather(meter.values)\nprint(len(values))"),
    "once a step": ("pass", "print(steps)"),
    "of each rank": ("seen += len(x)", "run.log(samples_per_s=seen / 2.0)"),
    "of each rank, as it is called": ("local_seen += len(x)", "print(local_seen)"),
    "measured": ("run.measure(seen=1.0)", "run.log(seen=run.metrics['seen'])"),
    "not told": ("seen += len(x)\nmeter.update(1)", "meter.update(seen)"),
    "best of passes": ("pass", "best = max(best, 1.0)\nprint(best)"),
    "of one micro-batch": ("print(x.mean(), y)", "pass"),
    "a file of what is the same in each body": ("rate = 0.5 * 0.5", "json.dump([rate, epoch], io.StringIO())"),
    "a file of the last batches of all ranks": ("pass", "json.dump(run.gather(loss.item()), io.StringIO())"),
    "a file under a name of the loop": ("pass", "x = [1, 2]\njson.dump(x, io.StringIO())"),
    "made once of no micro-batch": ("if best == 0.0:\n    best = 3.5", "print(best)"),
}


#: What is taken from the last micro-batch of a step, where the step is done.
OF_LAST = {
    "brought together": ("history.append(run.mean(loss.item()))", "print(history)", "history, which print(...)"),
    "a list": ("history.append(loss.item())", "print(history)", "history, which print(...)"),
    "an object": ("meter.update(loss.item())", "print(meter.values)", "meter.values, which print(...)"),
    "the least": ("best = min(best, loss.item())", "print(best)", "best, which print(...)"),
    "of a function": (
        "history.append(ratio((model(x).argmax(1) == y).sum(), len(y)))",
        "print(history)",
        "history, which",
    ),
}
NOT_OF_LAST = {
    "a count": ("history.append(steps)\n    meter.update(steps)", "print(history, meter.n)"),
    "where the run is": ("history.append(run.progress.step)", "print(history)"),
    "of parameters": ("history.append(model.weight.sum().item())", "print(history)"),
    "not told": ("history.append(loss.item())", "pass"),
}


def logged(tmp_path, body, after, at_step="pass"):
    setup = (
        METER
        + REPORT.replace("\n", "\n    ")
        + "\n    import copy, csv, io, json, logging, sqlite3, sys, types, matplotlib.figure"
        + "\n    import torch.distributed as dist"
    )
    before = "steps, best, meter, total = 0, 0.0, Meter(), torch.zeros(1)\nseen = local_seen = 0\nhistory = []"
    done = f"loss = F.cross_entropy(model(x), y)\nif run.step(loss):\n    steps += 1\n    {at_step}"
    play(tmp_path, f"{body}\n{done}", setup, before, after)


@pytest.mark.parametrize("name", TOLD)
def test_what_a_rank_adds_up_alone_and_tells_a_reader_is_said_once_on_one_rank_too(tmp_path, capfd, name):
    body, after, place = TOLD[name]
    logged(tmp_path, body, after)
    (line,) = (line for line in capfd.readouterr().err.splitlines() if "each rank has its own micro-batches" in line)
    assert line.startswith(place)


@pytest.mark.parametrize("name", NOT_PARTS)
def test_what_is_of_all_ranks_or_logged_as_that_of_one_is_not(tmp_path, capfd, name):
    logged(tmp_path, *NOT_PARTS[name])
    assert "each rank has its own micro-batches" not in capfd.readouterr().err


@pytest.mark.parametrize("name", OF_LAST)
def test_what_is_taken_from_a_ranks_last_micro_batch_and_told_is_said(tmp_path, capfd, name):
    at_step, after, place = OF_LAST[name]
    logged(tmp_path, "pass", after, at_step)
    (line,) = (line for line in capfd.readouterr().err.splitlines() if "each rank has its own micro-batches" in line)
    assert line.startswith(place)


@pytest.mark.parametrize("name", NOT_OF_LAST)
def test_what_is_the_same_on_all_ranks_where_a_step_is_done_is_not(tmp_path, capfd, name):
    at_step, after = NOT_OF_LAST[name]
    logged(tmp_path, "pass", after, at_step)
    assert "each rank has its own micro-batches" not in capfd.readouterr().err


CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)"
NORM = "sum(p.grad.norm().item() for p in model.parameters() if p.grad is not None)"
HELPER = "def clip(params):\n    for p in params:\n        if p.grad is not None:\n            p.grad.clamp_(-1, 1)"
ZERO = "for p in model.parameters():\n    if p.grad is not None:\n        p.grad.zero_()"
IF_STEP = "if run.step(F.cross_entropy(model(x), y)):\n    "
BY_HAND = "if run.backward(F.cross_entropy(model(x), y)):\n    {}\n    run.update()"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (f"{STEP}\n{CLIP}", 1),
        (f"{IF_STEP}{CLIP}", 1),
        (f"{STEP}\nnorm = {NORM}", 1),
        (f"{IF_STEP}run.say('norm of local gradients', {NORM})", 1),
        (f"{STEP}\nclip(model.parameters())", 1),
        (f"{IF_STEP}clip(model.parameters())", 1),
        (BY_HAND.format(CLIP), 0),
        (BY_HAND.format("clip(model.parameters())"), 0),
        (f"{STEP}\n{ZERO}", 0),
        (f"x.requires_grad_()\n(x.grad,) = torch.autograd.grad(model(x).sum(), x)\n{STEP}", 0),
        ("x.requires_grad_()\nmodel(x).sum().backward(inputs=[x])\nx = x.detach() + 0.1 * x.grad.sign()\n" + STEP, 0),
        (STEP, 0),
    ],
)
def test_gradients_that_are_read_after_their_step_are_said(tmp_path, capfd, body, said):
    play(tmp_path, body, setup=HELPER)
    found = capfd.readouterr().err.count("no gradients are left to read or clip, since run.step(...) has used them")
    assert found == said


CALLBACKS = """
class Counting:
    def __init__(self):
        self.seen = 0
        self.rate = 0.1

    def on_batch(self):
        self.seen += 1

    def on_epoch(self, model):
        self.seen = 0

class Keeping:
    def __init__(self):
        self.state = None

    def on_batch(self):
        pass

    def on_epoch(self, model):
        self.state = copy.deepcopy(model.state_dict())

class Slowing(Counting):
    def on_batch(self):
        self.rate *= 0.9

import copy
"""


@pytest.mark.parametrize(
    ("test", "said"),
    [
        ("time.time() > end", 1),
        ("end < datetime.datetime.now().timestamp()", 1),
        ("any(run.gather(time.time() > end))", 0),
        ("end < 0", 0),
    ],
)
def test_a_clock_that_ends_the_training_is_said(tmp_path, capfd, test, said):
    setup = "import datetime, time\nend = time.time() + 1000"
    play(tmp_path, STEP, setup=setup, after=f"print('time left', end - time.time())\nif {test}:\n    break")
    assert capfd.readouterr().err.count("each rank's own clock decides how long the training goes on") == said


@pytest.mark.parametrize(("kind", "refused"), [("Counting", False), ("Slowing", True)])
def test_a_callback_counts_for_itself_beside_another_one(tmp_path, kind, refused):
    """The list of both leads to a state that the model is given, and one of them has nothing to do with that state."""
    weight = "for one in others:\n    if one.rate < 0:\n        weight = 2\n" if refused else ""
    calls = "for each in callbacks:\n    each.on_batch()"
    body = f"weight = 1\n{weight}run.step(weight * F.cross_entropy(model(x), y))\n{calls}"
    after = "for each in callbacks:\n    each.on_epoch(model)\nmodel.load_state_dict(keeping.state)"
    before = f"keeping = Keeping()\ncallbacks = [{kind}(), keeping]\nothers = callbacks[:1]"
    with pytest.raises(UsageError, match=r"rate, which .* differed") if refused else contextlib.nullcontext():
        play(tmp_path, body, setup=CALLBACKS, before=before, after=after)


def test_reading_leaves_functions_alone_whose_source_is_not_there(tmp_path):
    setup = "exec('def change(x, n=[0]):\\n    n[0] += 1\\n    return x')"
    play(tmp_path, "run.step(F.cross_entropy(model(change(x)), y))", setup=setup)
    assert torch.get_default_dtype() is torch.float32


# ---- ranks -----------------------------------------------------------------------------------------------------------


def apart(how):
    """A script of which each rank makes something of its own, ``how``; the message that ends it."""
    try:
        with Run(seed=0) as run:
            x = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))
            model = run.model(nn.Linear(3, 2))
            run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            batches = run.loader((x, torch.arange(24) % 2), global_batch=8, micro_batch=2)
            scale, late, began, box = 1.0, 1e9, time.time(), SimpleNamespace(length=0)
            for epoch in run.epochs(2):
                for part, y in run.train(batches):
                    box.length = len(part) + int(y[0])  # of each micro-batch
                    loss = F.cross_entropy(model(part), y) * (scale if run.progress.step < late else box.length)
                    if run.step(loss) and how == "leader" and run.leads and run.progress.step == 2:
                        scale = 0.5
                    if time.time() - began > 1e9:
                        break
                if how == "own loss" and epoch == 0:
                    late = 1e9 + loss.item()
                if how == "same":
                    late -= epoch
        return "trained"
    except MismatchError as error:
        return str(error)


def test_ranks_compare_what_the_training_is_computed_from():
    leader, own, same, other = on_world(2, [(apart, how) for how in ("leader", "own loss", "same", "other")])
    for told in leader:
        assert told.startswith("ranks hold different values after step 4: scale, which run.step(...) is computed from,")
    for told in own:
        assert told.startswith("ranks hold different values after step 4: late, which run.step(...) is computed from,")
    assert same == other == ["trained"] * 2


def made_for(step):
    def loss_of(outputs):
        return outputs.square().mean() / (1 + step)

    return loss_of


def test_what_holds_a_function_that_each_body_makes_is_no_place():
    """Ranks have seen it made in other bodies, so what it holds differs."""
    with Run(seed=0, replay=False) as run:
        model = run.model(nn.Linear(3, 2))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        factor = 2.0
        for x in run.train(run.loader(torch.randn(8, 3), global_batch=4, micro_batch=2)):
            loss_of = made_for(factor * run.progress.step)
            run.step(loss_of(model(x)))
            found = training_inputs(sys._getframe(), run._context.state, LineCalls())
            assert [place.text for place, _ in found.places.values()] == ["factor"]
