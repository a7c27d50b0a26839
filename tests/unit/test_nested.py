"""Lists, tuples and mappings within each other: one walk for all who look into them."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from types import MappingProxyType
from typing import NamedTuple

import pytest

from lockstep.nested import leaves, map_leaves


class Named(NamedTuple):
    text: str
    number: int


class Tokens(UserDict):
    """As a tokenizer's batch: with more than its items."""

    encoding = None


def test_leaves_come_in_order_each_with_the_way_to_it():
    value = {"a": [1, (2, None)], 5: Named("b", 3), "empty": [], "view": MappingProxyType({"c": "text"})}
    found = [("a.0", 1), ("a.1.0", 2), ("a.1.1", None), ("5.0", "b"), ("5.1", 3), ("view.c", "text")]
    assert list(leaves(value)) == found
    assert list(leaves(7)) == [("", 7)]
    assert list(leaves([7], "start")) == [("start.0", 7)]


@pytest.mark.parametrize("value", [[1, 2], (1, 2), Named("x", 1), {"a": 1}, OrderedDict(a=1), UserDict(a=1)])
def test_containers_are_new_and_keep_their_type(value):
    mapped = map_leaves(lambda leaf: leaf, value)
    assert mapped == value
    assert type(mapped) is type(value)
    assert mapped is not value


def test_what_a_users_dict_has_beside_its_items_stays():
    tokens = Tokens(ids=[1])
    tokens.encoding = "fast"
    mapped = map_leaves(lambda leaf: leaf + 1, tokens)
    assert (mapped.data, mapped.encoding, tokens.data) == ({"ids": [2]}, "fast", {"ids": [1]})


def test_other_mappings_become_dicts_unless_they_are_leaves():
    view = MappingProxyType({"a": 1})
    assert map_leaves(str, [view]) == [{"a": "1"}]
    assert map_leaves(type, [view], lambda part: isinstance(part, MappingProxyType)) == [MappingProxyType]
