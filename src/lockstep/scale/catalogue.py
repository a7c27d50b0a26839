"""The GPUs and links that predictions know, from one data file and from what the user adds."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, TypeVar

from lockstep.errors import SettingError
from lockstep.records import of_kind
from lockstep.scale.links import Curve, Link

T = TypeVar("T")

_FILE: Final = Path(__file__).with_name("catalogue.toml")
_MOST: Final = 1e100  # as an entry's number; an int may be greater than any float
#: Formats in the order in which one takes the other's place where a GPU does not have it.
_INSTEAD: Final = {"fp8": "bf16", "bf16": "fp16", "fp16": "fp32", "tf32": "fp32"}


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device, as its data sheet describes it."""

    name: str
    tflops: Mapping[str, float]  #: dense, by format
    memory_bytes_per_s: float
    memory_bytes: float
    within: str  #: name of the link that a node of it has
    between: str  #: name of the link that joins such nodes
    source: str
    alike: tuple[str, ...] = ()

    def flops(self, precision: str) -> float:
        """Operations a second in ``precision``; those of the next wider format where it has none of its own."""
        wanted = precision
        while wanted not in self.tflops and wanted in _INSTEAD:
            wanted = _INSTEAD[wanted]
        return 1e12 * self.tflops.get(wanted, max(self.tflops.values()))


@dataclass(frozen=True, slots=True)
class Catalogue:
    """GPUs and links by name."""

    gpus: Mapping[str, Gpu]
    links: Mapping[str, Link]
    alike: Mapping[str, tuple[str, ...]]  #: other names of a link, which may be those of several

    @classmethod
    def read(cls, text: str, more: Mapping[str, Any] | None = None) -> Catalogue:
        """From the text of a data file, and the tables ``gpus`` and ``links`` of ``more`` over it.

        Raises:
            SettingError: for an entry that lacks something, with its name.
        """
        tables = tomllib.loads(text)
        added = {kind: (more or {}).get(kind, {}) for kind in ("gpus", "links")}
        for kind, entries in added.items():
            if not isinstance(entries, Mapping):
                raise SettingError(f"predict.{kind} = {entries!r}: write a table for each, [predict.{kind}.NAME]")
        gpus, links = ({**tables[kind], **entries} for kind, entries in added.items())
        made = {name: _made(name, partial(_link, name, links)) for name in links}
        return cls(
            {name: _made(name, partial(_gpu, name, gpus, made)) for name in gpus},
            made,
            {name: tuple(map(_plain, _made(name, partial(_other_names, links[name])))) for name in links},
        )

    def gpu(self, name: str) -> Gpu:
        """The GPU that goes by ``name``, in any case, with or without what follows the model.

        Raises:
            SettingError: if there is none, with the nearest.
        """
        found = self.find_gpu(name)
        if found is None:
            raise SettingError(f"{name!r} is no GPU that the catalogue knows; {near(name, self.gpus)}")
        return found

    def find_gpu(self, name: str) -> Gpu | None:
        """As `gpu`; None if there is none."""
        wanted = _plain(name)
        exact = {_plain(word): gpu for gpu in self.gpus.values() for word in (gpu.name, *gpu.alike)}
        if wanted in exact:
            return exact[wanted]
        # The longest name within a longer description, such as NVIDIA A100-SXM4-80GB or V100-SXM2-16GB (AWS p3).
        inside = [word for word in exact if len(word) > 1 and _as_a_word(word).search(name.lower())]
        return exact[max(inside, key=len)] if inside else None

    def link(self, name: str, default: str) -> Link:
        """The link that goes by ``name``; where several do, the one like ``default``.

        Raises:
            SettingError: if there is none, with the nearest.
        """
        wanted = _plain(name)
        for known in self.links:
            if _plain(known) == wanted:
                return self.links[known]
        same = [known for known, words in self.alike.items() if wanted in words]
        if default in same:
            return self.links[default]
        place = self.links[default].place
        same = [known for known in same if self.links[known].place == place] or same
        if not same:
            every = [*self.links, *(word for words in self.alike.values() for word in words)]
            raise SettingError(f"{name!r} is no link that the catalogue knows; {near(name, every)}")
        return self.links[same[0]]


@cache
def shipped() -> str:
    """The text of the data file that comes with the package."""
    return _FILE.read_text(encoding="utf-8")


def open_catalogue(more: Mapping[str, object] | None = None) -> Catalogue:
    """What comes with the package, and ``more``, such as the table ``predict`` of the user's file."""
    return Catalogue.read(shipped(), more)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


@cache
def _as_a_word(plain: str) -> re.Pattern[str]:
    """Finds ``plain`` where no further digit makes it another model: A40 is in NVIDIA A40-48Q, and not in RTX A4000."""
    return re.compile(r"(?<!\d)" + "[^a-z0-9]*".join(map(re.escape, plain)) + r"(?!\d)")


def near(name: str, known: Iterable[str]) -> str:
    """What to write in place of ``name``: the nearest of those that are known, else all of them."""
    names = sorted(set(known))
    by_plain = {_plain(word): word for word in names}
    alike = difflib.get_close_matches(_plain(name), by_plain, n=2, cutoff=0.5)
    if alike:
        return f"did you mean {' or '.join(by_plain[word] for word in alike)}?"
    return f"there are {', '.join(names)}"


def _made(name: str, make: Callable[[], T]) -> T:
    try:
        return make()
    except (KeyError, TypeError, ValueError) as error:
        what = f"the catalogue's entry {name!r} lacks or misspells {error}"
        raise SettingError(f"{what}; compare it with others") from None


def _require_numbers(entry: Mapping[str, object], names: tuple[str, ...], least: float | None = None) -> None:
    """Raises ValueError unless each is a number above 0, or from ``least``."""
    for name in names:
        value = entry[name]
        fits = isinstance(value, int | float) and (value > 0 if least is None else value >= least) and value < _MOST
        if not fits:
            raise ValueError(f"{name}, a number {'above 0' if least is None else f'from {least:g}'}")


def _gpu(name: str, entries: Mapping[str, Any], links: Mapping[str, Link]) -> Gpu:
    entry = entries[name]
    _require_numbers(entry, ("memory_gbs", "memory_gib"))
    _require_numbers(entry["tflops"], tuple(entry["tflops"]) or ("fp32",))
    for place in ("within", "between"):
        if links[entry[place]].place != place:
            raise ValueError(f"{place}, which names a link {links[entry[place]].place} nodes")
    return Gpu(
        name=name,
        tflops=dict(entry["tflops"]),
        memory_bytes_per_s=entry["memory_gbs"] * 1e9,
        memory_bytes=entry["memory_gib"] * 2**30,
        within=entry["within"],
        between=entry["between"],
        source=entry["source"],
        alike=_other_names(entry),
    )


def _other_names(entry: Mapping[str, object]) -> tuple[str, ...]:
    names: tuple[str, ...] = of_kind(tuple[str, ...], entry.get("alike", []), "alike")
    return names


def _link(name: str, entries: Mapping[str, Any]) -> Link:
    entry = entries[name]
    if entry["place"] not in ("within", "between"):
        raise ValueError('place, which is "within" or "between"')
    _require_numbers(entry, ("gbs",))
    _require_numbers(entry, ("latency_us", "hop_us", "error"), least=0.0)
    _require_numbers(entry, ("ranks",), least=2)
    curve, scale = None, 1.0
    shape = entries[entry["like"]] if "like" in entry else entry
    if "sizes" in shape:
        times = tuple(time / 1e6 for time in shape["times_us"])
        curve = Curve(shape["ranks"], tuple(map(float, shape["sizes"])), times)
        scale = entry["gbs"] / shape["gbs"]
    link = Link(
        name=name,
        place=entry["place"],
        bytes_per_s=shape["gbs"] * 1e9,
        latency_s=entry["latency_us"] / 1e6,
        hop_s=entry["hop_us"] / 1e6,
        ranks=entry["ranks"],
        source=entry["source"],
        error=entry["error"],
        curve=curve,
        shared=entry.get("shared", False),
    )
    return link.scaled(scale)
