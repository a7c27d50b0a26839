"""What a script's objects hold, and what of it has changed: every kind of value, and objects that resist being read."""

from __future__ import annotations

import functools
import importlib
import itertools
import random
import sys
from collections import Counter, OrderedDict, deque, namedtuple
from collections.abc import Callable, Iterator
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.run.source.reachable import changed, look, script_roots

seen_by_functions = [0]


class Plain:
    kinds = 0  # of the class, as counters of callbacks often are

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def method(self) -> None:
        seen_by_functions[0] += 1


class Slotted:
    __slots__ = ("calls", "unset")

    def __init__(self) -> None:
        self.calls = 0


Pair = namedtuple("Pair", ["first", "second"])


def numbers() -> Iterator[int]:
    calls = 0
    while True:
        calls += 1
        yield calls


def closure() -> tuple[Callable[[], None], Callable[[], None]]:
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1

    return call, call


def count_class() -> None:
    Plain.kinds += 1


def with_centre() -> Any:
    module: Any = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    module.register_buffer("centre", torch.zeros(2))
    return module


def set_nan(array: np.ndarray[Any, Any]) -> None:
    array[1] = np.nan


def _call(value: Any) -> None:
    value()


#: A value, what changes it, and the path that says so.
CHANGES: list[tuple[Any, Callable[[Any], object], str]] = [
    (Plain(tau=1.0), lambda v: setattr(v, "tau", 0.9), "x.tau"),
    (Plain(flag=1), lambda v: setattr(v, "flag", True), "x.flag"),
    (Plain(zero=0.0), lambda v: setattr(v, "zero", -0.0), "x.zero"),
    (Plain(temperature=np.float32(1)), lambda v: setattr(v, "temperature", np.float64(1)), "x.temperature"),
    (Plain(mode="warm"), lambda v: setattr(v, "mode", None), "x.mode"),
    (Plain(), lambda v: setattr(v, "late", 1), "x.late"),
    (Plain(gone=1), lambda v: delattr(v, "gone"), "x.gone"),
    (Plain(), lambda _: count_class(), "x.kinds"),
    (Plain().method, _call, "x"),
    (Slotted(), lambda v: setattr(v, "calls", 1), "x.calls"),
    (SimpleNamespace(calls=0), lambda v: setattr(v, "calls", 1), "x.calls"),
    (torch.zeros(3), lambda v: v.data.add_(1), "x"),
    (torch.zeros(3, requires_grad=True), lambda v: v.data.mul_(-1), "x"),
    (torch.zeros(3, dtype=torch.complex64).conj(), lambda v: v.add_(1), "x"),
    (torch.eye(3).to_sparse(), lambda v: v.mul_(2), "x"),
    (torch.zeros((), device="meta"), lambda v: v.add_(1), "x"),
    (torch.zeros(1 << 21), lambda v: v.add_(1), "x"),
    (with_centre(), lambda v: v.centre.data.add_(1), "x.centre"),
    (with_centre(), lambda v: v[0].weight.data.add_(1), "x.0.weight"),
    (with_centre(), lambda v: v[1].eval(), "x.1.training"),
    (np.zeros(4), set_nan, "x"),
    (np.array([1, None], dtype=object), lambda v: v.fill(2), "x"),
    (np.zeros((4, 4)).T[::2], lambda v: v.fill(1), "x"),
    (torch.Generator(), lambda v: torch.rand(1, generator=v), "x"),
    (np.random.default_rng(0), lambda v: v.random(), "x"),
    (np.random.RandomState(0), lambda v: v.rand(), "x"),
    (random.Random(0), lambda v: v.random(), "x"),
    (Plain(rate=Decimal("0.4")), lambda v: setattr(v, "rate", v.rate / 2), "x.rate"),
    (Plain(share=Fraction(1, 3)), lambda v: setattr(v, "share", v.share / 2), "x.share"),
    (Plain(begun=timedelta(1)), lambda v: setattr(v, "begun", 2 * v.begun), "x.begun"),
    ([], lambda v: v.append(1), "x"),
    ([[1, 2]], lambda v: v[0].reverse(), "x[0][0]"),
    ((Plain(calls=0),), lambda v: setattr(v[0], "calls", 1), "x[0].calls"),
    (Pair([1], 2), lambda v: v.first.append(1), "x.first"),
    ({"calls": 0}, lambda v: v.update(calls=1), "x['calls']"),
    (Counter(), lambda v: v.update("a"), "x"),
    (OrderedDict(a=1), lambda v: v.update(a=2), "x['a']"),
    ({torch.zeros(1): 1}, lambda v: v.update(dict.fromkeys(v, 2)), "x.values[0]"),
    (deque([1], maxlen=1), lambda v: v.append(2), "x[0]"),
    ({1, 2}, lambda v: v.remove(1) or v.add(3), "x"),
    (bytearray(b"ab"), lambda v: v.reverse(), "x"),
    (itertools.count(), next, "x"),
    (enumerate("abc"), next, "x"),
    (iter([1, 2]), next, "x"),
    (numbers(), next, "x.calls"),
    (closure()[0], _call, "x.calls"),
    (functools.partial(closure()[0]), _call, "x.func.calls"),
    (Plain.method, lambda v: v(None), "x.seen_by_functions[0]"),
]


@pytest.mark.parametrize(
    ("value", "change", "path"), CHANGES, ids=[f"{path}-{n}" for n, (_, _, path) in enumerate(CHANGES)]
)
def test_a_change_is_named(value: Any, change: Callable[[Any], object], path: str) -> None:
    if path == "x.calls" and hasattr(value, "gi_frame"):
        next(value)  # before, it has no variables
    before = look({"x": value})
    assert not changed(before, look({"x": value}))
    change(value)
    found = changed(before, look({"x": value}))
    assert found[0].startswith(path), found


def test_what_tells_most_comes_first() -> None:
    generator, losses = torch.Generator(), [torch.zeros(1)]
    module: Any = nn.Linear(1, 1)
    module.tau, module.state = 1.0, {"deep": {"er": 0}}
    roots = {"losses": losses, "module": module, "g": generator}
    before = look(roots)
    losses.append(torch.ones(1))
    with torch.no_grad():
        module.weight.add_(1)
    module.state["deep"]["er"] = module.tau = 0.5
    torch.rand(1, generator=generator)
    assert changed(before, look(roots)) == [
        *("g", "module.tau", "module.state['deep']['er']", "module.weight", "losses"),
        "losses[1]",
    ]


class Resists:
    """Every way of asking raises, or lies."""

    __class__ = property(lambda self: 1 / 0)
    __dict__ = property(lambda self: 1 / 0)

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __repr__(self) -> str:
        raise RuntimeError

    __eq__ = __hash__ = __len__ = __iter__ = __repr__  # type: ignore[assignment]


class Lies(list[int]):
    def __len__(self) -> int:
        raise RuntimeError

    def __iter__(self) -> Iterator[int]:
        raise RuntimeError


def test_nothing_is_raised_and_no_code_of_objects_is_run() -> None:
    cyclic: list[Any] = [torch.zeros(1)]
    cyclic += [cyclic, {"all": cyclic}, Resists(), Lies([1]), object(), sys, Plain, sys._getframe(), lambda: cyclic]
    inference = torch.inference_mode()(torch.ones)(2)
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    cyclic += [inference, nested, torch.ones(2).to(torch.float8_e5m2), np.zeros(2, dtype="U3"), memoryview(b"ab")]
    parent: Any = Plain()
    parent.child = Plain(parent=parent, tau=1)
    found = look({"cyclic": cyclic, "parent": parent})
    assert not changed(found, look({"cyclic": cyclic, "parent": parent}))
    assert {"cyclic", "cyclic[0]", "parent.child.tau"} <= found.keys()


def test_limits_and_what_is_skipped() -> None:
    deep: list[Any] = [7]
    for _ in range(20):
        deep = [deep]
    assert len(look({"x": deep}, depth=3)) == 4
    near = look({"far": [[i] for i in range(400)], "near": 1}, limit=10)
    assert "near" in near
    assert len(near) == 10
    held = Plain(calls=0)
    assert not look({"x": held, "y": held.__dict__}, skip=[id(held), id(held.__dict__)])


used_global, other_global = [1], [2]  # but not by the function


def test_variables_of_the_script() -> None:
    module, calls, numpy = nn.Linear(1, 1), 0, np

    def inner() -> dict[str, object]:
        calls = 1
        used_global[0] += calls + (numpy is None)
        return script_roots(sys._getframe())

    roots = inner()
    assert roots.pop("calls") == 1
    assert roots.pop("test_variables_of_the_script.calls") == calls
    assert roots == {"module": module, "used_global": used_global, "inner": inner, "script_roots": script_roots}
    assert script_roots(None) == {}


def test_variables_of_another_module_of_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "counting.py").write_text("calls = 0\nothers = 0\ndef count():\n    global calls\n    calls += 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    counting = importlib.import_module("counting")

    def roots() -> dict[str, object]:
        if counting.others == 0:
            counting.count()
        return script_roots(sys._getframe())

    first = roots()
    assert {name: value for name, value in first.items() if name.startswith("counting")} == {
        "counting.others": 0,
        "counting.count": counting.count,
    }
    before = look(first)
    assert "counting.count.calls" in changed(before, look(roots()))


def squares() -> Iterator[int]:
    yield from (number * number for number in range(9))


ITERATORS: dict[str, Callable[[], Iterator[Any]]] = {
    "list": lambda: iter([1, 2, 3, 4]),
    "reversed": lambda: reversed([1, 2, 3, 4]),
    "range of large numbers": lambda: iter(range(1 << 70, (1 << 70) + 9)),
    "dict": lambda: iter({"a": 1, "b": 2, "c": 3, "d": 4}),
    "values": lambda: iter({"a": 1, "b": 2, "c": 3, "d": 4}.values()),
    "items": lambda: iter({"a": 1, "b": 2, "c": 3, "d": 4}.items()),
    "set": lambda: iter({1, 2, 3, 4}),
    "deque": lambda: iter(deque([1, 2, 3, 4])),
    "text": lambda: iter("abcd"),
    "zip": lambda: zip([1, 2, 3, 4], "abcd", strict=True),
    "map": lambda: map(abs, [1, 2, 3, 4]),
    "filter": lambda: filter(None, [1, 2, 3, 4]),
    "enumerate": lambda: enumerate(squares()),
    "of a function": lambda: iter(itertools.count(7).__next__, 99),
    "count": lambda: itertools.count(0.5, 0.25),
    "cycle": lambda: itertools.cycle([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]),
    "cycle of a generator": lambda: itertools.cycle(squares()),
    "repeat": lambda: itertools.repeat(0.9, 4),
    "accumulate": lambda: itertools.accumulate(itertools.repeat(0.6), lambda a, b: a * b, initial=0.4),
    "chain": lambda: itertools.chain([1], [2, 3], squares()),
    "islice": lambda: itertools.islice(itertools.count(), 1, 9, 2),
    "takewhile": lambda: itertools.takewhile(bool, itertools.count(1)),
    "starmap": lambda: itertools.starmap(pow, zip(itertools.count(), itertools.count(), strict=False)),
    "zip_longest": lambda: itertools.zip_longest([1, 2, 3, 4], [5]),
    "product": lambda: itertools.product([1, 2], [3, 4]),
    "permutations": lambda: itertools.permutations(range(5)),
    "combinations": lambda: itertools.combinations(range(9), 3),
    "pairwise": lambda: itertools.pairwise(range(9)),
    "groupby": lambda: itertools.groupby([1, 1, 2, 2, 3, 4]),
}


@pytest.mark.parametrize("name", ITERATORS)
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_each_step_of_an_iterator_is_seen_and_a_look_takes_none(name, steps):
    looked_at, alone = ITERATORS[name](), ITERATORS[name]()
    for _ in range(steps):
        assert next(looked_at, None).__class__ is next(alone, None).__class__
    before = look({"x": looked_at})
    assert changed(before, look({"x": looked_at})) == []
    if next(looked_at, None) is None:
        return
    next(alone)
    assert changed(before, look({"x": looked_at})) != []
    if name != "groupby":  # whose groups are objects
        assert list(itertools.islice(looked_at, 3)) == list(itertools.islice(alone, 3))


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python 3.14 tells nothing of a cycle after its first pass")
def test_a_cycle_is_seen_after_its_first_pass():
    cycle = itertools.cycle([0.1, 0.2, 0.3])
    places = []
    for _ in range(9):
        next(cycle)
        places.append(look({"x": cycle}))
    assert all(changed(one, other) for one, other in itertools.pairwise(places))
