"""In the first step a body computes its micro-batches many times over: whatever begins after many bodies is found."""

import collections
import contextlib
import csv
import functools
import heapq
import itertools
import logging
import queue
import random
import runpy
import struct
import sys
import tempfile
import threading
from array import array
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

from lockstep.errors import UsageError
from lockstep.run import Run
from lockstep.run.proofs.replay_series import LeftLoop, loop_body
from lockstep.run.proofs.script_snapshot import ScriptSnapshot
from lockstep.testing import state_hash
from worlds import on_world_trying_all as on_world

X = torch.sin(torch.arange(64.0)).view(32, 2)
Y = (torch.arange(32) % 2).long()


def counts(after):
    """An int in a closure."""
    seen = 0

    def factor():
        nonlocal seen
        seen += 1
        return 2.0 if seen > after else 1.0

    return factor


def packs(after):
    """Bytes."""
    cells = bytearray(8)

    def factor():
        (seen,) = struct.unpack_from("q", cells)
        struct.pack_into("q", cells, 0, seen + 1)
        return 2.0 if seen >= after else 1.0

    return factor


def swaps(after):
    """A function is put in the place of another one."""
    numbers, which = itertools.count(1), {}

    def early():
        if next(numbers) == after:
            which["now"] = lambda: 2.0
        return 1.0

    def factor():
        return which["now"]()

    which["now"] = early
    return factor


def becomes(after):
    """An object gets another class."""

    class Late:
        def __call__(self):
            return 2.0

    class Early(Late):
        seen = 0

        def __call__(self):
            self.seen += 1
            if self.seen == after:
                self.__class__ = Late
            return 1.0

    return Early()


def is_due(after):
    """An event in a heap."""
    now, heap, settings = itertools.count(), [(after, "loud")], {"factor": 1.0}

    def factor():
        if heap and heap[0][0] <= next(now):
            heapq.heappop(heap)
            settings["factor"] = 2.0
        return settings["factor"]

    return factor


def fills(after):
    """A deque that is only used when it is full."""
    last = collections.deque(maxlen=after)

    def factor():
        last.append(1.0)
        return 1.0 + (len(last) == after)

    return factor


def draws_rarely(after):
    """A generator that is hidden from a look at objects."""

    def numbers():
        own = random.Random(1)
        while True:
            yield 2.0 if own.random() * after < 2 else 1.0

    return numbers().__next__


HOLDERS = (counts, packs, swaps, becomes, is_due, fills, draws_rarely)


def train(factor, micro_batch=4, **settings):
    with Run(seed=0, **settings) as run:
        model = run.model(nn.Linear(2, 2))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in run.epochs(1):
            for x, y in run.train(run.loader((X, Y), global_batch=16, micro_batch=micro_batch)):
                run.step(F.cross_entropy(model(x) * factor(), y))
        return run.progress.step, state_hash(model)


@pytest.mark.parametrize("after", [9, 30, 50])
@pytest.mark.parametrize("holder", HOLDERS, ids=lambda holder: holder.__name__)
def test_what_begins_after_many_bodies_is_found_in_the_first_step(holder, after):
    with pytest.raises(UsageError, match="of step 1 was computed"):
        train(holder(after))


@pytest.mark.parametrize("micro_batch", [4, 16])
def test_so_it_is_where_a_rank_has_a_single_micro_batch(micro_batch):
    with pytest.raises(UsageError, match="again after"):
        train(swaps(30), micro_batch)


class Trainer:
    def __init__(self, run, factor):
        self.run, self.factor = run, factor
        self.model = run.model(nn.Linear(2, 2))
        run.optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

    def fit(self):
        for _ in self.run.epochs(1):
            for x, y in self.run.train(self.run.loader((X, Y), global_batch=16, micro_batch=4)):
                self.run.step(F.cross_entropy(self.model(x) * self.factor(), y))


def test_so_it_is_in_a_loop_of_an_object():
    with Run(seed=0) as run, pytest.raises(UsageError, match="of step 1 was computed again after"):
        Trainer(run, becomes(30)).fit()


def test_without_replays_nothing_is_tried():
    assert train(swaps(30), replay=False)[0] == 2


def test_an_item_that_is_not_there_after_many_bodies_is_no_end_of_the_loop():
    items = (1.0 for _ in range(30))
    with pytest.raises(UsageError, match=r"the body raised StopIteration\(\)"):
        train(items.__next__)


def test_a_debugger_asks_once_a_body_and_not_in_a_series(monkeypatch):
    asked = []
    monkeypatch.setattr("sys.breakpointhook", lambda: asked.append(1))
    train(lambda: breakpoint() or 1.0)
    assert len(asked) == 8  # the list is put back after a replay


# ---- what the script sees of it --------------------------------------------------------------------------------------


class Meter:
    def __init__(self):
        self.total, self.n, self.seen = 0.0, 0, collections.Counter()

    def update(self, loss):
        self.total += loss
        self.n += 1
        self.seen["bodies"] += 1


def noisy(replay, micro_batch=4):
    """All that a script notes in its bodies, and what it has drawn."""
    meter, rows, ring, small = Meter(), [], np.zeros(4), torch.zeros(3)
    shown, handler = [], logging.Handler()
    handler.emit = lambda record: shown.append(record.getMessage())
    log = logging.getLogger("of a script")
    log.addHandler(handler)
    counted = itertools.count()
    with Run(seed=0, replay=replay) as run:
        model = run.model(nn.Linear(2, 2))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in run.epochs(1):
            batches = run.loader((X, Y), global_batch=16, micro_batch=micro_batch)
            for number, (x, y) in enumerate(run.train(batches)):
                loss = F.cross_entropy(model(x), y)
                meter.update(1.0)
                rows.append(next(counted))
                ring[number % 4] += 1
                small.add_(1)
                log.error("a body")
                print("a body")
                run.step(loss)
    log.removeHandler(handler)
    return vars(meter), len(rows), ring.sum(), small.tolist(), number, len(shown)


def test_objects_know_nothing_of_replays_and_iterators_and_prints_nothing_of_a_series(capsys):
    *noted, number, shown = noisy(True)
    printed = capsys.readouterr().out.count("a body")
    *without, last, _ = noisy(False)
    assert (noted, shown) == (without, 8)
    # Two steps are checked, each with one replay.
    assert (number, last, printed) == (9, 7, 10)


def in_ranks(several):
    """Bodies that meet other ranks are tried by no rank alone."""
    with Run(seed=0) as run:
        model = run.model(nn.Linear(2, 2))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        bodies = itertools.count(1)
        for _ in run.epochs(1):
            for x, y in run.train(run.loader((X, Y), global_batch=16, micro_batch=4)):
                last = next(bodies)
                if several:
                    dist.barrier()
                run.step(F.cross_entropy(model(x), y))
        return last


def test_ranks_try_alone_only_what_meets_no_other_rank():
    (alone,) = on_world(2, [(in_ranks, False)])
    (together,) = on_world(2, [(in_ranks, True)])
    assert min(alone) > 60 > max(together)


# ---- the body as a function ------------------------------------------------------------------------------------------


def test_a_body_goes_on_from_its_own_variables_and_leaves_those_of_the_script():
    run, seen = Run.__new__(Run), []

    def script():
        total, kept = 0, [0]
        for number, item in enumerate(run.train()):
            total += item
            kept[0] += item
            seen.append((number, total))
        return total, kept

    def train():
        yield 1
        body = loop_body(sys._getframe(1))
        for data in (10, 100):
            body(data)
        yield 2

    run.train = train
    assert script() == (3, [113])
    assert seen == [(0, 1), (0, 11), (0, 111), (1, 3)]


@pytest.mark.parametrize("bar", [tqdm, functools.partial(tqdm, disable=True)], ids=["a bar", "one that is unknown"])
def test_a_bar_of_a_package_hands_on_what_it_is_given(bar):
    run, found, locals = Run.__new__(Run), [], 0

    def train():
        found.append(loop_body(sys._getframe(2)))
        yield 1

    run.train = train
    for item in bar(run.train()):
        locals += item
    assert (found[0] is None) == (bar is not tqdm)


class Rows:
    """A batch of a package, which no copy of tensors reaches into."""

    def __init__(self, x):
        self.x = x


def test_each_body_has_a_batch_of_its_own():
    with Run(seed=0) as run:
        model = run.model(nn.Linear(2, 2))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches = run.loader(list(X), global_batch=16, micro_batch=4, collate_fn=lambda rows: Rows(torch.stack(rows)))
        for _ in run.epochs(1):
            for rows in run.train(batches):
                rows.x *= 2
                run.step(model(rows.x).square().mean())
    assert run.progress.step == 2


def test_a_resume_goes_on_at_once(tmp_path, monkeypatch):
    settings = {"checkpoint": str(tmp_path), "save_every": "1 step"}
    assert train(lambda: 1.0, **settings)[0] == 2
    monkeypatch.setenv("LOCKSTEP_RESUME", "1")
    with Run(seed=0, **settings) as run:
        model = run.model(nn.Linear(2, 2))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        bodies = itertools.count(1)
        for _ in run.epochs(2):
            for x, y in run.train(run.loader((X, Y), global_batch=16, micro_batch=4)):
                last = next(bodies)
                run.step(F.cross_entropy(model(x), y))
    assert last < 20


def test_a_body_that_leaves_its_loop_says_so():
    run = Run.__new__(Run)

    def script():
        for item in run.train():
            if item > 5:
                break
        return item

    def train():
        yield 1
        with pytest.raises(LeftLoop):
            loop_body(sys._getframe(1))(7)
        yield 2

    run.train = train
    assert script() == 2


def test_no_function_is_made_where_another_item_may_come_out_or_variables_are_shared():
    run, found = Run.__new__(Run), []

    def train():
        found.append(loop_body(sys._getframe(1)))
        yield 1

    run.train = train

    def mapped():
        for _ in map(str, run.train()):
            pass

    def shared():
        count = 0

        def read():
            return count

        for item in run.train():
            count += item
        return read()

    def pauses():
        for item in run.train():
            yield item + 1

    def plain():
        for _ in run.train():
            pass

    mapped(), shared(), list(pauses()), plain()
    assert found[:3] == [None, None, None]
    assert found[3] is not None


# ---- what is put back ------------------------------------------------------------------------------------------------


class Slotted:
    __slots__ = ("value",)
    shared = 0

    def __init__(self, value):
        self.value = value


def _defaults(seen=None, *, last=0):
    return seen, last


def test_a_snapshot_puts_back_what_objects_hold():
    held = SimpleNamespace(
        number=1,
        rows=[1, 2],
        ring=collections.deque([1, 2], maxlen=2),
        names={"a"},
        known={"x": 1},
        cells=bytearray(b"ab"),
        view=memoryview(bytearray(16)).cast("d"),
        numbers=array("i", [1, 2]),
        small=torch.zeros(2),
        array=np.zeros(2),
        slotted=Slotted(1),
        generators=(torch.Generator(), np.random.default_rng(1), np.random.RandomState(1), random.Random(1)),
        function=_defaults,
    )
    weights = nn.Linear(2, 2)
    before = [repr(held), [g.get_state() if hasattr(g, "get_state") else None for g in held.generators[:1]]]
    draws = [held.generators[1].bit_generator.state, held.generators[3].getstate()]
    snapshot = ScriptSnapshot(sys._getframe(), [weights])
    held.number, held.extra = 2, 3
    held.rows.append(3)
    held.ring.append(3)
    held.names |= {"b"}
    held.known.update(x=2, y=3)
    held.cells.extend(b"c")
    held.view[1] = 2.0
    held.numbers.append(3)
    held.small += 1
    held.array += 1
    held.slotted.value = Slotted.shared = 5
    _defaults.__kwdefaults__["last"] = 7
    for generator in held.generators[1:3]:
        generator.standard_normal()
    held.generators[3].random()
    torch.rand(1, generator=held.generators[0])
    with torch.no_grad():
        weights.weight.add_(1)
    moved = weights.weight.clone()
    snapshot.restore()
    assert repr(held) == before[0]
    assert torch.equal(held.generators[0].get_state(), before[1][0])
    assert [held.generators[1].bit_generator.state, held.generators[3].getstate()] == draws
    assert (held.slotted.value, Slotted.shared, _defaults()) == (1, 0, (None, 0))
    assert held.view.tolist() == [0.0, 0.0]
    assert torch.equal(weights.weight, moved), "what is left out stays as it is"


def test_a_snapshot_puts_back_variables_of_functions_and_what_closures_share():
    count = 0

    def add():
        nonlocal count
        count += 1

    with contextlib.suppress(ZeroDivisionError):
        snapshot = ScriptSnapshot(sys._getframe(), set())
        add()
        assert count == 1
        snapshot.restore()
    assert count == 0


class Fixed(list):
    """A list of a class of the script that refuses to be emptied."""

    def clear(self):
        raise AssertionError("the snapshot runs the script's code")

    extend = clear


class Counted:
    calls = 0

    @property
    def value(self):
        raise AssertionError("the snapshot runs the script's code")

    def __getattr__(self, name):
        raise AssertionError(f"the snapshot asks for {name}")


class Opens:
    """Opens a file or starts a thread at its first use."""

    def __init__(self):
        self.file, self.thread, self.lines = None, None, 0

    def use(self):
        if self.file is None:
            self.file = tempfile.TemporaryFile("w")  # noqa: SIM115 - as such a logger does
            self.writer = csv.writer(self.file)
        self.writer.writerow([self.lines])
        self.lines += 1


def test_a_snapshot_runs_no_code_of_the_script_and_keeps_orders():
    fixed, counted, stray = Fixed([1]), Counted(), Slotted.__new__(Slotted)
    ordered = collections.OrderedDict.fromkeys("abc")
    plain = dict.fromkeys("abc")
    numbers = {0, 64, 5}
    order = list(numbers)
    snapshot = ScriptSnapshot(sys._getframe(), ())
    fixed.append(2)
    counted.own, Counted.calls, Counted.added = 1, 7, 8
    stray.value = 3
    ordered.move_to_end("a")
    del ordered["b"]
    plain["a"] = plain.pop("a")
    snapshot.restore()
    assert (list(fixed), list(ordered), list(plain), list(numbers)) == ([1], ["a", "b", "c"], ["a", "b", "c"], order)
    assert (vars(counted), Counted.calls, "added" in vars(Counted), hasattr(stray, "value")) == ({}, 0, False, False)
    assert ordered.popitem() == ("c", None)


def test_a_snapshot_puts_back_modules_of_torch_and_tensors_that_have_grown():
    module, grown = nn.BatchNorm1d(2), torch.zeros(2)
    module.seen, module.running_max = 0, torch.zeros(1)
    snapshot = ScriptSnapshot(sys._getframe(), ())
    module(torch.ones(3, 2))
    module.seen, module.running_max, module.extra = 4, torch.ones(1), 5
    module.register_buffer("more", torch.ones(1))
    grown.data = torch.ones(3)
    snapshot.restore()
    assert (module.seen, module.running_max.item(), module.num_batches_tracked.item()) == (0, 0.0, 0)
    assert not hasattr(module, "extra")
    assert not hasattr(module, "more")
    assert grown.tolist() == [0.0, 0.0]


def test_a_snapshot_leaves_alone_what_threads_share_and_what_cannot_be_read():
    waiting, event, seen = queue.Queue(), threading.Event(), []
    view, system, large, read_only = memoryview(bytearray(4)), random.SystemRandom(), [0] * 100, memoryview(b"abcd")
    view.release()
    strided = memoryview(bytearray(8))[::2]
    ahead = itertools.cycle([1, 2, 3])
    next(ahead)
    snapshot = ScriptSnapshot(sys._getframe(), (), most_bytes=80)
    waiting.put(1)
    event.set()
    seen.append(1)
    large.append(1)
    next(ahead)
    snapshot.restore()
    assert (waiting.qsize(), waiting.unfinished_tasks, event.is_set(), seen) == (1, 1, True, [])
    assert len(large) == 100, "a list that is too long to be copied is cut"
    assert next(ahead) == 3
    assert (system.random() < 1, bytes(strided), read_only.tobytes()) == (True, bytes(4), b"abcd")


def test_what_a_body_opens_at_its_first_use_stays_open():
    opens, numbers = Opens(), []
    snapshot = ScriptSnapshot(sys._getframe(), ())
    opens.use()
    numbers.append(1)
    snapshot.restore()
    assert (opens.lines, numbers) == (0, [])
    opens.use()
    opens.file.close()


def preallocated(replay):
    losses, at = np.zeros(8), 0
    with Run(seed=0, replay=replay) as run:
        model = run.model(nn.Linear(2, 2))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in run.epochs(1):
            for x, y in run.train(run.loader((X, Y), global_batch=16, micro_batch=4)):
                loss = F.cross_entropy(model(x), y)
                losses[at] = loss.item()
                at += 1
                run.step(loss)
    return losses.tolist(), state_hash(model)


def test_an_array_for_as_many_bodies_as_there_are_ends_a_series():
    assert preallocated(True) == preallocated(False)


#: Names by which a script may hold the generators that a run seeds for each micro-batch.
GLOBAL = {
    "random": lambda: random.random,
    "numpy": lambda: np.random.mtrand._rand.random,
    "torch": functools.partial(lambda generator: lambda: torch.rand(1, generator=generator), torch.default_generator),
}


def draws_by(name, replay=True, micro_batch=4):
    draw, seen = GLOBAL[name](), []
    held = getattr(draw, "__self__", None)  # the generator is in a variable
    with Run(seed=0, replay=replay, check_every=1) as run:
        model = run.model(nn.Linear(2, 2))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in run.epochs(2):
            for x, y in run.train(run.loader((X, Y), global_batch=16, micro_batch=micro_batch)):
                factor = draw()
                seen.append((float(factor), held is None))
                run.step(F.cross_entropy(model(x) * factor, y))
    return state_hash(model)


@pytest.mark.parametrize("name", GLOBAL)
def test_a_generator_that_the_run_seeds_is_as_seeded_after_replays(name):
    assert draws_by(name) == draws_by(name, replay=False)
    assert draws_by(name, micro_batch=16) == draws_by(name, replay=False, micro_batch=16)
    (ranks,) = on_world(2, [(draws_by, name)])
    assert ranks == [draws_by(name)] * 2


class Trained:
    """A loop in a method that uses names of its class alone, and variables that are declared elsewhere."""

    def __init__(self, run):
        self.__model = run.model(nn.Linear(2, 2))
        self.__optimizer = run.optimizer(torch.optim.SGD(self.__model.parameters(), lr=0.1))
        self.run = run

    def fit(self):
        global bodies
        bodies, counted = 0, 0

        def inner():
            nonlocal counted
            global bodies  # noqa: PLW0603 - as in a script
            for x, y in self.run.train(self.run.loader((X, Y), global_batch=16, micro_batch=4)):
                loss: torch.Tensor = F.cross_entropy(self.__model(x), y)
                bodies += 1
                counted += 1
                self.__note(loss)
                self.run.step(loss)

        inner()
        return bodies, counted

    def __note(self, loss):
        self.last = loss.item()


def trained_in_a_method(replay):
    with Run(seed=0, replay=replay) as run:
        return Trained(run).fit()


def test_a_body_is_made_a_function_with_what_its_own_function_declares():
    assert trained_in_a_method(True) == trained_in_a_method(False) == (8, 8)


MODULE = """
import torch, lockstep
from torch import nn
from torch.nn import functional as F

x, y = torch.randn(32, 2, generator=torch.Generator().manual_seed(0)), torch.arange(32) % 2
with lockstep.Run(seed=0, replay={replay}) as run:
    model = run.model(nn.Linear(2, 2))
    run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    seen = 0
    for a, b in run.train(run.loader((x, y), global_batch=16, micro_batch=4)):
        loss: torch.Tensor = F.cross_entropy(model(a), b)
        seen += 1
        run.step(loss)
"""


def test_a_loop_of_a_module_may_annotate_its_variables(tmp_path):
    for replay in (True, False):
        (tmp_path / "train.py").write_text(MODULE.format(replay=replay))
        assert runpy.run_path(str(tmp_path / "train.py"))["seen"] == 8


def discriminates(replay, micro_batch):
    """A discriminator that steps by itself, and gathers gradients over the micro-batches of a step."""
    torch.manual_seed(1)
    other = nn.Sequential(nn.Linear(2, 2000), nn.Linear(2000, 1000), nn.Linear(1000, 1))  # more than is copied
    own = torch.optim.SGD(other.parameters(), lr=0.01)
    with Run(seed=0, replay=replay, check_every=1) as run:
        model = run.model(nn.Linear(2, 2))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in run.epochs(2):
            for x, y in run.train(run.loader((X, Y), global_batch=16, micro_batch=micro_batch)):
                out = model(x)
                other(out.detach()).mean().backward()
                if run.step(F.cross_entropy(out, y)):
                    own.step()
                    own.zero_grad(set_to_none=False)
    return state_hash(model), state_hash(other)


@pytest.mark.parametrize("micro_batch", [4, 16])
def test_gradients_of_what_steps_by_itself_hold_no_replay(micro_batch):
    assert discriminates(True, micro_batch) == discriminates(False, micro_batch)
