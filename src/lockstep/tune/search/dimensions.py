"""The dimensions of a search space: ranges of numbers, and choices that may open further dimensions.

A gene is what an algorithm sees of a dimension (`lockstep.tune.search.individual.Point`). A number's gene is its place
between 0 and 1, after the logarithm where the dimension has one; where there are finitely many numbers each owns an
equal part of that interval (of its logarithm, for ``log``), so that the first and the last are as likely as the others.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import SettingError

_MOST_VALUES: Final = 2**52  #: so many values a gene, which is a double between 0 and 1, tells apart


@dataclass(frozen=True, slots=True)
class Float:
    """A floating-point number from ``low`` to ``high``, both included, uniformly distributed in random points.

    Args:
        low: the lower limit.
        high: the upper limit, above ``low``.
        log: the logarithm is uniformly distributed, so that each factor of ten is equally likely.
        step: only ``low``, ``low + step``, ``low + 2 * step``, ... up to ``high`` are used; not together with ``log``.

    Raises:
        SettingError: for limits that are not finite or not in this order, for ``log`` with ``low`` at or below 0, and
            for a ``step`` that is not positive, exceeds ``high - low`` or comes with ``log``.
    """

    low: float
    high: float
    log: bool = False
    step: float | None = None

    def __post_init__(self) -> None:
        _check_limits(self, self.low, self.high)
        if self.log and self.low <= 0:
            raise SettingError(f"{self}: a logarithm needs low above 0; give a small one, such as low=1e-6")
        if self.step is None:
            return
        if self.log:
            raise SettingError(f"{self}: log and step exclude each other; leave one out, or give Choice the values")
        if not 0 < self.step <= (self.high - self.low) * (1 + 1e-9):
            raise SettingError(f"{self}: give a step above 0 and at most high - low = {self.high - self.low:g}")
        _check_count(self, self.cells)

    @property
    def cells(self) -> int:
        """Number of values; 0: any floating-point number between the limits."""
        return 0 if self.step is None else math.floor((self.high - self.low) / self.step * (1 + 1e-9)) + 1

    def value(self, gene: float) -> float:
        """The number at ``gene``, which is between 0 and 1."""
        if self.step is not None:
            return min(self.low + _cell(gene, self.cells) * self.step, self.high)
        if self.log:
            place = math.log(self.low) + gene * (math.log(self.high) - math.log(self.low))
            return min(max(math.exp(place), self.low), self.high)
        return min(max(self.low + gene * (self.high - self.low), self.low), self.high)

    def gene(self, value: Any) -> float:
        """The gene of ``value``, of the nearest number where only some are taken.

        Raises:
            SettingError: if it is not a number from ``low`` to ``high``.
        """
        _check_inside(self, value, int | float)
        if self.step is not None:
            return _middle(round((value - self.low) / self.step), self.cells)
        if self.log:
            return _inside((math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low)))
        return _inside((value - self.low) / (self.high - self.low))


@dataclass(frozen=True, slots=True)
class Int:
    """An integer from ``low`` to ``high``, both included, uniformly distributed in random points.

    Args:
        low: the lower limit.
        high: the upper limit, above ``low``.
        log: the logarithm is uniformly distributed, so that each factor of ten is equally likely.
        step: only ``low``, ``low + step``, ``low + 2 * step``, ... up to ``high`` are used; not together with ``log``.

    Raises:
        SettingError: for limits that are not integers or not in this order, for ``log`` with ``low`` below 1, and for a
            ``step`` below 1, above ``high - low`` or together with ``log``.
    """

    low: int
    high: int
    log: bool = False
    step: int | None = None

    def __post_init__(self) -> None:
        values: tuple[object, ...] = (self.low, self.high, 1 if self.step is None else self.step)
        for value in values:
            if not isinstance(value, int) or isinstance(value, bool):
                raise SettingError(f"{self}: {value!r} is not whole; give whole numbers, or Float its limits")
        _check_limits(self, self.low, self.high)
        if self.log and self.low < 1:
            raise SettingError(f"{self}: a logarithm needs low of at least 1")
        if self.log and self.step is not None:
            raise SettingError(f"{self}: log and step exclude each other; leave one out, or give Choice the values")
        if self.step is not None and not 1 <= self.step <= self.high - self.low:
            raise SettingError(f"{self}: give a step from 1 to high - low = {self.high - self.low}")
        _check_count(self, self.cells)

    @property
    def cells(self) -> int:
        """How many values there are."""
        return (self.high - self.low) // (self.step or 1) + 1

    def value(self, gene: float) -> int:
        """The number at ``gene``, which is between 0 and 1."""
        if self.log:
            low, high = self._log_limits()
            return min(max(round(math.exp(low + gene * (high - low))), self.low), self.high)
        return self.low + _cell(gene, self.cells) * (self.step or 1)

    def gene(self, value: Any) -> float:
        """The gene of ``value``; with a ``step`` of the nearest number that is taken.

        Raises:
            SettingError: if it is not an integer from ``low`` to ``high``.
        """
        _check_inside(self, value, int)
        if self.log:
            low, high = self._log_limits()
            return _inside((math.log(value) - low) / (high - low))
        return _middle(round((value - self.low) / (self.step or 1)), self.cells)

    def _log_limits(self) -> tuple[float, float]:
        """Half a number beyond both ends, so that the first and the last number have their full part."""
        return math.log(self.low - 0.5), math.log(self.high + 0.5)


@dataclass(frozen=True, slots=True, init=False)
class Choice:
    """One of ``values``: strings, numbers, booleans, None, and tuples, lists and dicts of these.

    ``opens`` gives the dimensions that exist only where a value is chosen::

        Choice("sgd", "adam", opens={"sgd": {"momentum": Float(0, 0.99)}})

    Here the objective gets ``momentum`` only with ``sgd``. Several values of one choice may open dimensions of the same
    name. ``1`` and ``True`` are different values, and so are ``1`` and ``1.0``.

    Args:
        values: at least one, each different.
        opens: maps a value to the dimensions that it opens, by name.

    Raises:
        SettingError: if there are no values, if a value is given twice or JSON cannot hold it, or if ``opens`` has
            a key that is not among the values.
    """

    values: tuple[Any, ...]
    opens: tuple[tuple[int, Mapping[str, Dimension]], ...]  #: by the index of the value; `Space.of` has checked these

    def __init__(self, *values: Any, opens: Mapping[Any, Mapping[str, Any]] | None = None) -> None:
        if not values:
            raise SettingError('Choice(): give it values, such as Choice("relu", "tanh")')
        keys = [json.dumps(encoded(value), sort_keys=True) for value in values]
        for index, key in enumerate(keys):
            if key in keys[:index]:
                raise SettingError(f"Choice: {values[index]!r} is given twice; give each value once")
        object.__setattr__(self, "values", values)
        opened = {self._index(value, "opens"): _dimensions(inner) for value, inner in (opens or {}).items()}
        object.__setattr__(self, "opens", tuple(sorted(opened.items())))

    @property
    def cells(self) -> int:
        """How many values there are."""
        return len(self.values)

    def value(self, gene: float) -> object:
        """The value of index ``gene``; a copy, so that no objective changes what the next one gets."""
        return copy.deepcopy(self.values[int(gene)])

    def gene(self, value: object) -> float:
        """The index of ``value``.

        Raises:
            SettingError: if it is not one of the values.
        """
        return float(self._index(value, "Choice"))

    def _index(self, value: object, where: str) -> int:
        for index, known in enumerate(self.values):
            if type(known) is type(value) and known == value:
                return index
        raise SettingError(f"{where}: {value!r} is none of its values; give one of {', '.join(map(repr, self.values))}")


def Bool(*, opens: Mapping[bool, Mapping[str, object]] | None = None) -> Choice:  # noqa: N802 - beside the classes
    """A `Choice` of ``False`` and ``True``; ``opens`` as there."""
    return Choice(False, True, opens=opens)


Dimension: TypeAlias = Float | Int | Choice


def dimension_of(given: object, name: str) -> Dimension:
    """The dimension that ``given`` is, or that it means as a tuple of Propulate's.

    Two numbers, one of them a float: a `Float`. Two integers: an `Int`. Strings, booleans, or one integer or more than
    two: a `Choice`. Limits may come in either order, since Propulate's tutorials write
    ``(0.01, 0.0001)``.

    Raises:
        SettingError: for anything else, such as a list.
    """
    if isinstance(given, Float | Int | Choice):
        return given
    kinds = {type(value) for value in given} if isinstance(given, tuple) else set()
    if isinstance(given, tuple) and kinds and kinds <= {int, float}:
        if len(given) == 2:
            low, high = sorted(given)
            return Int(low, high) if kinds == {int} else Float(float(low), float(high))
        if kinds == {int}:
            return Choice(*given)
    if isinstance(given, tuple) and kinds and kinds <= {str, bool}:
        return Choice(*given)
    raise SettingError(
        f"space: {name}={given!r}: give Float(low, high), Int(low, high), Choice(value, ...) or Bool(), or a tuple: "
        "two limits, or texts to choose from"
    )


def _dimensions(given: Mapping[str, object]) -> Mapping[str, Dimension]:
    if not isinstance(given, Mapping):
        raise SettingError(f"opens: {given!r}: give a mapping of names to dimensions")
    return {name: dimension_of(inner, name) for name, inner in given.items()}


def encoded(value: object) -> object:
    """``value`` of a `Choice` as JSON, in which tuples and lists differ.

    Raises:
        SettingError: if JSON cannot hold it.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, tuple | list):
        return {type(value).__name__: [encoded(item) for item in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: encoded(item) for key, item in value.items()}}
    raise SettingError(
        f"Choice: {value!r} cannot be written as JSON; give a text that names it and look it up in the objective"
    )


def decoded(value: object) -> object:
    """What `encoded` was given."""
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "dict":
        return {key: decoded(item) for key, item in inner.items()}
    return tuple(map(decoded, inner)) if kind == "tuple" else list(map(decoded, inner))


def values_of_word(dimension: Dimension, word: str) -> tuple[object, ...]:
    """The value that ``word`` of a command line means, if there is one: a number, or a value as Python writes it.

    Raises:
        SettingError: if it may mean several, such as ``1`` of ``Choice(1, "1")``.
    """
    if isinstance(dimension, Choice):
        exact = [value for value in dimension.values if repr(value) == word]
        found = exact or [value for value in dimension.values if str(value) == word]
        if len(found) > 1:
            raise SettingError(f"{word} may mean {' or '.join(map(repr, found))}; write it as Python does")
        return tuple(map(copy.deepcopy, found))
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return (kind(word),)
    return ()


def snapped(dimension: Dimension, gene: float) -> float:
    """``gene`` within its limits and, where there are finitely many values, in the middle of its value's part."""
    if isinstance(dimension, Choice):
        return float(min(max(int(gene), 0), dimension.cells - 1))
    gene = _inside(gene)
    if isinstance(dimension, Int) and dimension.log:
        return dimension.gene(dimension.value(gene))
    return gene if not dimension.cells else _middle(_cell(gene, dimension.cells), dimension.cells)


def snapped_all(dimension: Dimension, genes: NDArray[np.float64]) -> NDArray[np.float64]:
    """`snapped` of each of ``genes``."""
    if isinstance(dimension, Int) and dimension.log:
        return np.array([snapped(dimension, gene) for gene in genes.tolist()])
    if isinstance(dimension, Choice):
        return np.clip(np.trunc(genes), 0, dimension.cells - 1)
    if not dimension.cells:
        return np.clip(genes, 0.0, 1.0)
    return (np.clip(np.trunc(genes * dimension.cells), 0, dimension.cells - 1) + 0.5) / dimension.cells


def _cell(gene: float, cells: int) -> int:
    return min(max(int(gene * cells), 0), cells - 1)


def _middle(cell: int, cells: int) -> float:
    return (min(max(cell, 0), cells - 1) + 0.5) / cells


def _inside(gene: float) -> float:
    return min(max(float(gene), 0.0), 1.0)


def _check_limits(what: object, low: Any, high: Any) -> None:
    if not all(isinstance(limit, int | float) and math.isfinite(limit) for limit in (low, high)):
        raise SettingError(f"{what}: give two finite numbers")
    if not low < high:
        raise SettingError(f"{what}: low must be below high; for one value use Choice({low!r}) or leave it out")


def _check_count(what: object, cells: int) -> None:
    if cells > _MOST_VALUES:
        raise SettingError(f"{what}: has {cells} values, more than 2**52; give a larger step or a Float")


def _check_inside(dimension: Float | Int, value: object, kind: Any) -> None:
    if not isinstance(value, kind) or isinstance(value, bool) or not dimension.low <= value <= dimension.high:
        whole = "whole " if kind is int else ""
        raise SettingError(f"{dimension}: {value!r} is no {whole}number from {dimension.low} to {dimension.high}")
