"""Variables that are set before they are read."""

import ast
import textwrap

import pytest

from lockstep.loop_variables import dead_at, fresh_variables

SET_AGAIN = """
    for epoch in epochs:
        guess = model(x)
        labels.copy_(guess)
        for x, y in batches:  # HERE
            step(x, y)
"""
CASES = {
    "set again": (SET_AGAIN, "guess"),
    "read after the loop": (SET_AGAIN + "    print(guess)\n", ""),
    "read in the rest of the turn": (SET_AGAIN + "        print(guess)\n", ""),
    "read in the body": (SET_AGAIN.replace("step(x, y)", "step(x, guess)"), ""),
    "read by a function": ("    def show():\n        return guess\n" + SET_AGAIN, ""),
    "told to a hook": (SET_AGAIN.replace("labels.copy_(guess)", "labels.hook(lambda: guess)"), ""),
    "never read": (SET_AGAIN.replace("labels.copy_(guess)", "pass"), "guess"),
    "set from itself": (SET_AGAIN.replace("model(x)", "model(guess)"), ""),
    "set before the loop": (SET_AGAIN.replace("    for epoch", "    guess = 0\n    for epoch"), ""),
    "read with all others": (SET_AGAIN + "    save(locals())", ""),
    "read by a generator": ("    shown = (one + guess for one in x)\n" + SET_AGAIN, ""),
    "set where some turns set it": (SET_AGAIN.replace("guess = model(x)", "if epoch: guess = model(x)"), ""),
    "changed in place": (SET_AGAIN.replace("guess = model(x)", "guess += model(x)"), ""),
    "under with": ("    with run as r:\n" + textwrap.indent(SET_AGAIN, "    "), "guess"),
    "under with, read after it": ("    with run as r:\n" + textwrap.indent(SET_AGAIN, "    ") + "    print(guess)", ""),
    "under try, read when it fails": (
        "    try:\n" + textwrap.indent(SET_AGAIN, "    ") + "    except OSError:\n        print(guess)",
        "",
    ),
    "under try": ("    try:\n" + textwrap.indent(SET_AGAIN, "    ") + "    finally:\n        close()", "guess"),
    "left by continue before it is set": (
        SET_AGAIN.replace("guess = model(x)", "if epoch: continue\n        guess = model(x)") + "        show(guess)",
        "",
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("in_function", [False, True])
def test_dead_are_those_that_are_set_before_they_are_read(name, in_function):
    source, dead = CASES[name]
    source = f"def main():\n{source}" if in_function else textwrap.dedent(source)
    line = next(number for number, text in enumerate(source.splitlines(), 1) if "HERE" in text)
    module = ast.parse(source)
    found = dead_at(module.body[0] if in_function else module, line)
    assert found & {"guess"} == set(filter(None, [dead]))


#: Bodies of a loop, and the variables of which each turn may read what the turn before has left.
BODIES = {
    "n = [w for w in range(3)]; loss = w": "w",
    "n = sum(p.sum() for p in ps); p = p + 1": "p",
    "h = [2 * h for h in h]": "h",
    "n = a and (w := 1); loss = w": "w",
    "with suppress(OSError): w = 1\nloss = w": "w",
    "match x:\n  case 1 if w: pass\nw = 2": "w",
    "match x:\n  case kinds.one: pass\nkinds = 2": "kinds",
    "try: w = f()\nfinally: print(w)": "w",
    "class A:\n  w = 1\nloss = w; w = 2": "w",
    "def f():\n  w = 1\nloss = w; w = 2": "w",
    "w = x + 1; loss = w": "",
    "with torch.no_grad(): w = 1\nloss = w": "",
    "try: w = f()\nexcept OSError: w = 0\nloss = w": "",
    "n = [w for w in range(3)]; w = n": "",
}


@pytest.mark.parametrize("body", BODIES)
def test_fresh_are_those_that_each_turn_sets_before_it_reads_them(body):
    (loop,) = ast.parse("for x in xs:\n" + textwrap.indent(body, "    ")).body
    names = {"w", "p", "h", "kinds"}
    named = {node.id for node in ast.walk(loop) if isinstance(node, ast.Name)} & names
    assert named - fresh_variables(loop) == set(filter(None, [BODIES[body]]))
