"""A name that a function uses for several things becomes several names, and the function computes the same."""

import ast
import textwrap
from contextlib import suppress
from random import Random

import pytest

from campaign_marks import IN_CAMPAIGN
from lockstep.run.source.source_paths import name_in_script
from lockstep.run.source.variable_names import with_separate_names


def separated(text):
    """The lines of a function's body, in which a name of its own is the script's name and its line."""
    function = ast.parse("def body():\n" + textwrap.indent(textwrap.dedent(text).strip(), "    ")).body[0]
    lines = ast.unparse(with_separate_names(function)).splitlines()[1:]
    return [line.strip() for line in lines]


def test_an_example_for_the_log_is_none_of_the_steps_values():
    assert separated("""
        for x, y in batches:
            out = model(x)
            run.step(loss_of(out, y))
            if count % 10 == 0:
                with torch.no_grad():
                    out = model(example)
                print(out)
    """) == [
        "for x, y in batches:",
        "out = model(x)",
        "run.step(loss_of(out, y))",
        "if count % 10 == 0:",
        "with torch.no_grad():",
        "out at 7:16 = model(example)",
        "print(out at 7:16)",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "total = 0\nfor x in xs:\n    total = total + x\nprint(total)",  # goes on from turn to turn
        "a = f()\nif a:\n    a = g()\nprint(a)",  # either of them is read
        "a = f()\na += 1\nprint(a)",
        "rate = f()\nfor x in xs:\n    use(rate)\nrate = g()\nfor y in ys:\n    use(rate)",  # outlives a turn
        "a = f()\nlater = lambda: a\na = g()\nlater()",
        "a = f()\nuse(a)\na = g()\nprint(locals())",
        "a = f()\nuse(a)\na = g()\nprint(vars())",
        "a = f()\nlater = lambda b=a: b\na = g()\nlater()",
        "a = f()\nlater = (a for b in xs)\na = g()\nuse(later)",
        "a = f()\ntry:\n    a = g()\n    h()\nexcept ValueError:\n    pass\nprint(a)",
        "a = f()\ntry:\n    a = g()\n    h()\nexcept ValueError:\n    use(a)",
        "a = f()\nwith suppress(ValueError):\n    g()\n    a = h()\nprint(a)",
        "for x in xs:\n    a = f(x)\n    if a:\n        break\n    a = g(x)\n    use(a)\nprint(a)",
    ],
)
def test_one_variable_keeps_its_name(text):
    assert separated(text) == [line.strip() for line in text.splitlines()]


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("a = f()\nuse(a)\na = g()\nuse(a)", "use(a at 4:4)"),
        ("a = f()\nuse(vars(a))\na = g()\nuse(a)", "use(a at 4:4)"),
        ("a = f()\nuse(a)\nlater = lambda a: a + 1\na = g()\nuse(a)", "use(a at 5:4)"),
        ("a = f()\nuse(a)\ndef later():\n    a = 1\n    return [a]\na = g()\nuse(a)", "use(a at 7:4)"),
        ("a = f()\nuse(a)\na = g(a)\nuse(a)", "use(a at 4:4)"),
        ("for x in xs:\n    use(x)\nfor x in ys:\n    use(x)", "use(x at 4:8)"),
        ("a = f()\nuse(a)\nif (a := g()):\n    use(a)", "use(a at 4:8)"),
        ("a = f()\nuse(a)\nwith g() as a:\n    use(a)", "use(a at 4:16)"),
        ("a = f()\nuse(a)\nif g():\n    a = 1\nelse:\n    a = 2\nuse(a)", "use(a at 5:8)"),
    ],
)
def test_two_variables_have_two(text, last):
    assert separated(text)[-1] == last


def test_the_name_in_the_script_is_known():
    assert name_in_script("out at 7:12") == "out"


# ---- the law: other names change nothing -----------------------------------------------------------------------------

SIMPLE = (
    *("{} = value()", "{} = {} + value()", "{} += value()", "{}, {} = {}, value()", "if ({} := value()) % 2: see({})"),
    *("see({})", "see({})", "see([{} for i in range(value() % 3)])", "if chance(): break", "if chance(): continue"),
    *("if chance(): return", "fail()", "if chance(): fail()"),
)
BLOCKS = (
    ("if chance():",),
    ("if chance():", "else:"),
    ("for {} in range(value() % 3):",),
    ("for _ in range(value() % 4):", "else:"),
    ("while chance():",),
    ("try:", "except ArithmeticError:"),
    ("try:", "except ArithmeticError:", "else:", "finally:"),
    ("try:", "finally:"),
    ("with suppress(ArithmeticError):",),
)


def some_lines(chance, deep):
    """The lines of a block, with blocks within."""
    for _ in range(chance.randint(1, 4)):
        if deep and chance.random() < 0.45:
            for head in chance.choice(BLOCKS):
                yield head.format(chance.choice("ab"))
                yield from ("    " + line for line in some_lines(chance, deep - 1))
        else:
            yield chance.choice(SIMPLE).format(*(chance.choice("ab") for _ in range(3)))


def outcome(function, chance):
    """What a function has seen that was made of such lines."""
    seen, calls = [], iter(range(200))

    def value():
        if next(calls, None) is None:
            raise TimeoutError
        return chance.randrange(12)

    def fail():
        raise ArithmeticError

    scope = {"see": seen.append, "value": value, "chance": lambda: value() % 2, "fail": fail, "suppress": suppress}
    exec(compile(ast.fix_missing_locations(ast.Module([function], [])), "body", "exec"), scope)
    try:
        scope["body"](0)
    except (TimeoutError, ArithmeticError, NameError) as error:
        seen.append("unbound" if isinstance(error, NameError) else type(error))
    return seen


def test_a_function_computes_the_same_under_separate_names():
    renamed, many = 0, 3000 if IN_CAMPAIGN else 700
    for seed in range(many):
        lines = some_lines(Random(seed), 3)
        text = "def body(a):\n    for _ in 'xy':\n        " + "\n        ".join(lines)
        function = ast.parse(text).body[0]
        other = with_separate_names(function)
        renamed += other is not function
        for way in range(3):
            assert outcome(other, Random(way)) == outcome(function, Random(way)), text
    assert renamed > many / 10
