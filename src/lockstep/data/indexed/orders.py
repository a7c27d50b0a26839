"""The order of an epoch's samples: a permutation, or given by the user's sampler, batch sampler or function.

    epoch, seed ──► shuffle                     a permutation, or 0 1 2 ...; a very long one is computed, not stored
                    sampler, order=function     any indices: some of them, repeated ones   ──► steps of equal size
                    batch_sampler               batches of indices                         ──► each is one step

Every rank draws the whole order itself, with generators that are seeded for the epoch, including generators that a
sampler holds. So the order is equal on all ranks and after a resume, if it depends on nothing else: a sampler that
remembers values from one pass to the next is found by asking it twice, and ranks compare digests.
"""

from __future__ import annotations

import hashlib
import operator
import random
from collections.abc import Callable, Iterable, Iterator
from math import isqrt
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler
from torch.utils.data.distributed import DistributedSampler
from typing_extensions import override

from lockstep.batch import BatchPlan, EpochSteps, MicroBatchPosition
from lockstep.data.indexed.sampling import UserSampler
from lockstep.errors import DataError, UsageError
from lockstep.formatting import count, plural
from lockstep.seeding import seed_of, seeded_generators

OrderFunction = Callable[[int, torch.Generator], Iterable[Any]]
"""``(epoch, generator)`` -> indices of samples: any, in any order, repeated ones too."""
Length = Callable[[], int]
"""Gives the present number of samples of the data set, which the script may change between two epochs."""

_GENERATORS: Final = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
#: More indices are refused: as Python's numbers these would take some 40 GB on each rank.
_MOST_INDICES: Final = 1_000_000_000
_WHOLE: Final = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_WAY_OUT: Final = (
    "order=function gives indices from the epoch and a generator that is seeded for it: "
    "order=lambda epoch, generator: torch.randperm(n, generator=generator)"
)


#: Samples of the longest epoch whose permutation is stored, torch's own: 128 MiB on each rank.
LONGEST_STORED: Final = 2**24
#: Rounds of a computed permutation.
_ROUNDS: Final = 8
_U64 = np.uint64


class Indices(Protocol):
    """Indices of samples that are read part by part: a tensor, a range, or indices computed as they are read."""

    def __len__(self) -> int:
        """The number of indices."""

    def __getitem__(self, places: slice, /) -> Tensor | range:
        """The indices at ``places``: int64 on the CPU, or a range."""


class Order(Protocol):
    """The order of an epoch's samples and its division into steps: equal on every rank and for any world size."""

    largest_batch: int | None  #: samples of the largest step of epoch 0, where each step is a batch; else None
    may_repeat: bool  #: whether one epoch may hold a sample several times

    def draw(self, epoch: int) -> str | None:
        """Draw the order of ``epoch``, as a pass begins; its digest, or None for an order that cannot differ."""

    def indices(self, epoch: int) -> Indices:
        """The order of ``epoch``: int64 on the CPU, or a range where it is sequential."""

    def few(self, epoch: int) -> list[int]:
        """Indices of some samples that ``epoch`` visits, the same in every epoch if each visits all samples.

        Empty for shards, which are read from beginning to end.
        """

    def steps(self, epoch: int, plan: BatchPlan, *, drop_last: bool) -> EpochSteps:
        """The division of the order of ``epoch`` into steps."""

    def rows(self, steps: EpochSteps, position: MicroBatchPosition) -> slice:
        """The part of `indices` that the micro-batch at ``position`` holds, in an epoch of ``steps``."""


class ShuffledOrder(Order):
    """The order of the data set itself, or another permutation of the whole data set in each epoch."""

    largest_batch: int | None = None
    may_repeat = False

    def __init__(self, length: Length, seed: int, *, shuffle: bool) -> None:
        self._length_now = length
        self._length = length()
        self._seed = seed
        self._shuffle = shuffle

    @override
    def draw(self, epoch: int) -> str | None:
        if (now := self._length_now()) != self._length:
            raise DataError(
                f"the data set holds {plural(now, 'sample')} now, and held {self._length} when run.loader was called: "
                "call run.loader again, or give an order that may have another length in each epoch, such as "
                "order=lambda epoch, generator: torch.randperm(len(dataset), generator=generator)"
            )
        # For a checkpoint within an epoch: a version that computes another permutation refuses it.
        return "computed, 1" if self._shuffle and self._length > LONGEST_STORED else None

    @override
    def indices(self, epoch: int) -> Indices:
        """Global generators are neither read nor moved. A stored permutation costs 10 ms for a million samples."""
        if not self._shuffle:
            return range(self._length)
        if self._length > LONGEST_STORED:
            return ComputedPermutation(self._length, seed_of(self._seed, "order", epoch))
        return torch.randperm(self._length, generator=generator_of(self._seed, epoch), device="cpu")

    @override
    def few(self, epoch: int) -> list[int]:
        return _few_of(range(self._length))

    @override
    def steps(self, epoch: int, plan: BatchPlan, *, drop_last: bool) -> EpochSteps:
        return plan.epoch(self._length, drop_last=drop_last)

    @override
    def rows(self, steps: EpochSteps, position: MicroBatchPosition) -> slice:
        return steps.rows(position)


class _Drawn(NamedTuple):
    indices: Tensor
    batch_sizes: tuple[int, ...] | None = None  # if each batch is a step

    @property
    def digest(self) -> str:
        found = hashlib.blake2b(self.indices.numpy().tobytes(), digest_size=8)
        found.update(repr(self.batch_sizes).encode())
        return found.hexdigest()


class SampledOrder(Order):
    """The order that the user's code gives, asked twice for epoch 0 at construction, and once for each pass.

    Args:
        name: of the sampler or function, for messages.
        give: the order of an epoch, a list of indices or of batches; the global generators are seeded for it.
        seed: of the run.

    Raises:
        UsageError: if the two orders of epoch 0 differ.
        DataError: if the user's code gives no valid order.
    """

    may_repeat = True

    def __init__(self, name: str, give: Callable[[int], _Drawn], seed: int) -> None:
        self._name = name
        self._give = give
        self._seed = seed
        self._epoch, self._last = 0, self._drawn(0)
        if self._drawn(0).digest != self._last.digest:
            raise UsageError(
                f"{name} gives another order when it is asked for epoch 0 once more: it remembers something from one "
                "pass to the next, and a resumed run could not repeat the epoch. It may depend on set_epoch(epoch) and "
                f"on generators of torch, Python and NumPy, global ones or attributes of its own; or {_WAY_OUT}"
            )
        sizes = self._last.batch_sizes
        self.largest_batch = None if sizes is None else max(sizes)

    @override
    def draw(self, epoch: int) -> str | None:
        self._epoch, self._last = epoch, self._drawn(epoch)
        return self._last.digest

    @override
    def indices(self, epoch: int) -> Indices:
        return self._of(epoch).indices

    @override
    def few(self, epoch: int) -> list[int]:
        return _few_of(self._of(epoch).indices)

    @override
    def steps(self, epoch: int, plan: BatchPlan, *, drop_last: bool) -> EpochSteps:
        indices, batch_sizes = self._of(epoch)
        if batch_sizes is None:
            return plan.epoch(len(indices), drop_last=drop_last)
        return plan.epoch_of_batches(batch_sizes)

    @override
    def rows(self, steps: EpochSteps, position: MicroBatchPosition) -> slice:
        return steps.rows(position)

    def _of(self, epoch: int) -> _Drawn:
        if epoch != self._epoch:
            self.draw(epoch)
        return self._last

    def _drawn(self, epoch: int) -> _Drawn:
        with seeded_generators(seed_of(self._seed, "order", epoch)):
            drawn = self._give(epoch)
        if not len(drawn.indices):
            raise DataError(
                f"{self._name} gives no sample in epoch {epoch}; it must start over each time, as a list does and an "
                f"iterator does not; {_WAY_OUT}"
            )
        return drawn


def order_of_sampler(sampler: UserSampler, length: Length, seed: int) -> Order:
    """The order of ``sampler``, any iterable of indices, for a data set of ``length``.

    Raises:
        UsageError: for a sampler that divides samples among ranks, or does not give the same order again.
        DataError: if the sampler gives anything but indices of the data set.
    """
    name = f"sampler={type(sampler).__name__}"
    _refuse_divided(name, sampler)

    def give(epoch: int) -> _Drawn:
        _begin_epoch(sampler, epoch, seed)
        return _Drawn(_indices_of(name, sampler, length()))

    return SampledOrder(name, give, seed)


def order_of_batch_sampler(sampler: UserSampler, length: Length, seed: int) -> Order:
    """The order of ``sampler``, any iterable of batches of indices: each is one step.

    Raises:
        UsageError, DataError: as `order_of_sampler`.
    """
    name = f"batch_sampler={type(sampler).__name__}"
    _refuse_divided(name, sampler)

    def give(epoch: int) -> _Drawn:
        _begin_epoch(sampler, epoch, seed)
        samples = length()
        batches = [_indices_of(name, batch, samples) for batch in _batches_of(name, sampler)]
        sizes = tuple(map(len, batches))
        if 0 in sizes:
            raise DataError(f"{name} gives an empty batch at step {sizes.index(0)} of epoch {epoch}; leave it out")
        return _Drawn(torch.cat(batches) if batches else torch.empty(0, dtype=torch.int64, device="cpu"), sizes)

    return SampledOrder(name, give, seed)


def order_of_function(function: OrderFunction, length: Length, seed: int) -> Order:
    """The order that ``function(epoch, generator)`` gives, any indices.

    Raises:
        UsageError, DataError: as `order_of_sampler`.
    """
    name = f"order={getattr(function, '__name__', type(function).__name__)}"
    if not callable(function):
        raise UsageError(f"{name}: {_WAY_OUT}; indices that are the same each epoch are a sampler: sampler=indices")

    def give(epoch: int) -> _Drawn:
        return _Drawn(_indices_of(name, function(epoch, generator_of(seed, epoch)), length()))

    return SampledOrder(name, give, seed)


def _few_of(indices: Tensor | range) -> list[int]:
    """The first, middle and last index, which are hardly ever the same three in two random splits."""
    length = len(indices)
    return [int(indices[place]) for place in dict.fromkeys((0, length // 2, length - 1))] if length else []


def generator_of(seed: int, epoch: int) -> torch.Generator:
    """A new generator for the order of ``epoch``."""
    return torch.Generator().manual_seed(seed_of(seed, "order", epoch))


def _batches_of(name: str, sampler: UserSampler) -> Iterator[object]:
    for batch in sampler:
        if isinstance(batch, int | np.integer) or (isinstance(batch, Tensor) and not batch.dim()):
            raise DataError(
                f"{name} gives single indices, not batches of them: pass it as sampler=, with global_batch="
            )
        yield batch


def _indices_of(name: str, given: object, length: int) -> Tensor:
    """``given`` as int64 indices within the data set; negative indices count from the end, as in a list."""
    items = given.tolist() if isinstance(given, np.ndarray) else given
    if not (isinstance(items, Tensor) and items.dim() == 1 and items.dtype in _WHOLE):
        if (named := operator.length_hint(items)) > _MOST_INDICES:
            raise DataError(
                f"{name} names {count(named)} indices, and all indices of an epoch are read when it begins: give "
                "fewer, such as num_samples=100_000 of a RandomSampler, or order=, a function of (epoch, generator) "
                "that returns the indices of one epoch; run.steps(...) says how long the training is"
            )
        # Outside of the try block, since an error of the user's own code is not ours to explain.
        items = list(items) if hasattr(items, "__iter__") else [items]
        try:
            items = torch.tensor(list(map(operator.index, items)), device="cpu")
        except TypeError:
            raise DataError(
                f"{name} gives something else than whole numbers, the indices of samples; if each item is a batch of "
                "them, pass it as batch_sampler="
            ) from None
    found: Tensor = items.to("cpu", torch.int64)
    if len(found) and not -length <= int(found.min()) <= int(found.max()) < length:
        raise DataError(
            f"{name} gives indices from {int(found.min())} to {int(found.max())}, and the data set has "
            f"{length} samples: they must lie within it"
        )
    return torch.where(found < 0, found + length, found)


def _begin_epoch(sampler: UserSampler, epoch: int, seed: int) -> None:
    """Tell ``sampler`` the epoch, and seed every generator that it holds."""
    generators = 0
    for part in _parts_of(sampler):
        if isinstance(part, _GENERATORS):
            # Several generators draw different numbers; a single generator draws the numbers of the global one.
            _seed(part, seed_of(seed, "order", epoch, *([generators] if generators else [])))
            generators += 1
        elif callable(set_epoch := getattr(part, "set_epoch", None)):
            set_epoch(epoch)


def _seed(generator: Any, seed: int) -> None:
    match generator:
        case torch.Generator():
            generator.manual_seed(seed)
        case np.random.Generator():
            bits = generator.bit_generator
            bits.state = type(bits)(seed).state
        case np.random.RandomState():
            generator.seed(seed & 0xFFFFFFFF)
        case _:
            generator.seed(seed)


def _parts_of(sampler: UserSampler) -> Iterator[object]:
    """``sampler``, the samplers inside it, and the generators that these samplers hold; each once, in order."""
    seen: set[int] = set()
    waiting = [sampler]
    while waiting:
        part = waiting.pop(0)
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        if isinstance(part, _GENERATORS):
            continue
        for value in getattr(part, "__dict__", {}).values():
            several = isinstance(value, list | tuple) and value and _is_part(value[0])
            waiting += [one for one in (value if several else [value]) if _is_part(one)]


def _is_part(value: object) -> bool:
    return isinstance(value, (Sampler, *_GENERATORS)) or (
        # A sampler of the user's own class: neither a data set nor a container.
        hasattr(value, "__iter__") and hasattr(value, "__dict__") and not hasattr(value, "__getitem__")
    )


def _refuse_divided(name: str, sampler: UserSampler) -> None:
    for part in _parts_of(sampler):
        divided = isinstance(part, DistributedSampler) or (
            hasattr(part, "rank") and getattr(part, "num_replicas", 1) != 1
        )
        if divided:
            inner = "" if part is sampler else f" holds a {type(part).__name__}, which"
            raise UsageError(
                f"{name}{inner} divides the samples among ranks, as run.loader does by itself, without padding: leave "
                "it out and say shuffle=True or False; or give a sampler of the whole data set (num_replicas=1)"
            )
    if isinstance(sampler, Iterator):
        raise UsageError(
            f"{name} is an iterator, which can be read only once: give something that starts over for each epoch, or "
            f"{_WAY_OUT}"
        )


class ComputedPermutation:
    """A permutation of ``range(length)`` that depends on ``seed``, equal on every machine.

    The permutation is computed as it is read, and so takes no memory that grows with its length. Reading takes about
    0.06 ms for each part, and 0.1 us for each place in the part.

        place ──► (left, right), with left < a, right < b and a * b just over the length
                    left  += mix(right, key 0)  (mod a)
                    right += mix(left,  key 1)  (mod b)
                    ...                         each line can be undone, so all of them together are one to one
              ──► place in a * b; beyond the length: the same again, until it is within

    A Feistel network over pairs of digits, walked along its cycles: J. Black and P. Rogaway, "Ciphers with Arbitrary
    Finite Domains", CT-RSA 2002, their third method. The numbers are mixed by the finalizer of SplitMix64: G. Steele,
    D. Lea and C. Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014, table 3. The permutation is for
    shuffling, not for secrecy.

    Raises:
        ValueError: for a length below 1.
    """

    def __init__(self, length: int, seed: int) -> None:
        if length < 1:
            raise ValueError(f"a permutation of {length}; give at least 1")
        self._length = length
        self._left = isqrt(length - 1) + 1
        self._right = -(-length // self._left)
        self._keys = [_U64(seed_of(seed, "permutation", number)) for number in range(_ROUNDS)]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, places: slice) -> Tensor:
        """The values at ``places``: int64 on the CPU, one-dimensional."""
        found = np.arange(*places.indices(self._length), dtype=_U64)
        self._walk(found)
        outside = np.flatnonzero(found >= self._length)
        # Few places: a * b - length is at most about two square roots of the length. Each place comes back, since its
        # cycle began within.
        while len(outside):
            walked = found[outside]
            self._walk(walked)
            found[outside] = walked
            outside = outside[walked >= self._length]
        return torch.from_numpy(found.astype(np.int64))

    def _walk(self, places: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> None:
        """Move ``places`` one step along their cycles in ``a * b``, in place."""
        left, right = np.divmod(places, _U64(self._right))
        for number, key in enumerate(self._keys):
            if number % 2:
                right = (right + _mixed(left, key) % _U64(self._right)) % _U64(self._right)
            else:
                left = (left + _mixed(right, key) % _U64(self._left)) % _U64(self._left)
        np.multiply(left, _U64(self._right), out=places)
        np.add(places, right, out=places)


def _mixed(
    values: np.ndarray[tuple[int], np.dtype[np.uint64]], key: np.uint64
) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """64 mixed bits for each of ``values`` with ``key``; products wrap on purpose."""
    mixed = values * _U64(0x9E3779B97F4A7C15) ^ key
    mixed = (mixed ^ mixed >> _U64(30)) * _U64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ mixed >> _U64(27)) * _U64(0x94D049BB133111EB)
    mixed ^= mixed >> _U64(31)
    return mixed
