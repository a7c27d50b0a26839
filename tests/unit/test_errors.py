"""The tree of errors."""

import inspect

import pytest

from lockstep import errors

ALL = {name: value for name, value in vars(errors).items() if inspect.isclass(value)}


def drawn() -> dict[str, tuple[str, str]]:
    """The tree in the module's docstring: each name with its parent and the builtin beside it."""
    found, parents = {}, {}
    for line in errors.__doc__.splitlines():
        name = line.strip("│├└─ ").partition(" ")[0]
        if name in ALL:
            depth = line.index(name)
            parents[depth] = name
            above = [parents[d] for d in parents if d < depth]
            builtin = line.partition("(")[2].partition(")")[0]
            found[name] = (above[-1] if above else "", builtin)
    return found


def test_the_docstring_draws_the_whole_tree():
    assert drawn().keys() == ALL.keys()


@pytest.mark.parametrize("name", ALL)
def test_each_stands_where_it_is_drawn(name):
    parent, builtin = drawn()[name]
    bases = [base.__name__ for base in ALL[name].__mro__[1:]]
    assert (parent or "Exception") in bases
    assert not builtin or builtin in bases
