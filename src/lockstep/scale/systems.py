"""A system: so many nodes of so many GPUs, and the links within and between them; how long collectives take on it.

A collective over several nodes is pipelined by NCCL, so that the slower of the two levels sets its pace, while their
latencies add up:

    T = floor_within + floor_between + max(2 (g - 1) / g * S / B_within, 2 (m - 1) / m * S / B_between)

for m nodes of g ranks; B_between is that of all adapters of a node. Summing both levels instead is what a reduction
within the node, then between nodes, then a broadcast would take.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from lockstep.errors import SettingError
from lockstep.scale.catalogue import Catalogue, Gpu, near
from lockstep.scale.links import Link


@dataclass(frozen=True, slots=True)
class System:
    """Where a script would run."""

    gpu: Gpu
    nodes: int
    gpus_per_node: int
    within: Link
    between: Link
    #: What N > 1 costs in each step beside what is simulated, in seconds: hooks, waking, waiting for each other.
    fixed_s: float = 0.0
    #: By what part computation is slower while data is moving, as where the same processors do both.
    contention: float = 0.0
    #: Samples that the input pipeline of a node can deliver in a second; None: it is never what limits.
    node_samples_per_s: float | None = None

    @property
    def ranks(self) -> int:
        """One for each GPU."""
        return self.nodes * self.gpus_per_node

    @property
    def name(self) -> str:
        """As it is spelt."""
        nodes = f"{self.nodes}x" if self.nodes > 1 else ""
        return f"{nodes}{self.gpus_per_node}x{self.gpu.name}-{(self.between if self.nodes > 1 else self.within).name}"

    @property
    def link(self) -> Link:
        """The slower one of those in use."""
        return self.between if self.nodes > 1 else self.within

    def of_ranks(self, ranks: int, per_node: int) -> System:
        """The same kind of nodes, as many as ``ranks`` need with at most ``per_node`` on each, equally many on all."""
        nodes = -(-ranks // per_node)
        return replace(self, nodes=nodes, gpus_per_node=-(-ranks // nodes))

    def all_reduce_s(self, size: float, factor: float = 1.0) -> float:
        """Seconds of an all-reduce of ``size`` bytes on each rank; ``factor`` times the traffic of a ring's."""
        floor, volume = 0.0, 0.0
        if self.gpus_per_node > 1:
            floor += self.within.floor_s(self.gpus_per_node, size)
            volume = self.within.volume_s(size, self.gpus_per_node)
        if self.nodes > 1:
            floor += self.between.floor_s(self.nodes, size)
            volume = max(volume, self.between.volume_s(size, self.nodes))
        return floor + factor * volume

    def half_s(self, size: float) -> float:
        """Seconds of a reduce-scatter or an all-gather of ``size`` bytes in all: half of an all-reduce."""
        return self.all_reduce_s(size) / 2

    def move_s(self, size: float) -> float:
        """Seconds until ``size`` bytes have gone from one rank to another over the slower link in use."""
        if self.ranks == 1:
            return 0.0
        return self.link.latency_s / 2 + size / self.link.bytes_per_s

    @property
    def node_only(self) -> System:
        """One of its nodes."""
        return replace(self, nodes=1)

    @property
    def across_nodes(self) -> System:
        """One rank of each node."""
        return replace(self, gpus_per_node=1)


def parse_system(text: str, catalogue: Catalogue) -> System:
    """What ``4xV100-nvlink``, ``8xA100`` or ``16x8xH100-ib`` (nodes, GPUs of a node, kind, link) says.

    A link that joins nodes may be named after the one within them, as in ``2x8xA100-nvlink-100gbe``.

    Raises:
        SettingError: if it cannot be read, or names a GPU or link that the catalogue does not know, with the nearest.
    """
    found = re.fullmatch(r"(?:(\d+)x)?(?:(\d+)x)?([A-Za-z].*)", text.strip())
    if found is None:
        raise SettingError(f"system {text!r}: write GPUS x KIND or NODES x GPUS x KIND, as in 8xA100 or 16x8xH100-ib")
    first, second, rest = found.groups()
    nodes, gpus = (int(first or 1), int(second)) if second else (1, int(first or 1))
    if nodes < 1 or gpus < 1:
        raise SettingError(f"system {text!r}: {nodes} nodes of {gpus} GPUs; give numbers from 1")
    gpu, words = _gpu_and_links(rest, text, catalogue)
    within, between = catalogue.links[gpu.within], catalogue.links[gpu.between]
    for place, word in enumerate(words):
        first_of_two = place == 0 and len(words) > 1
        link = catalogue.link(word, gpu.within if first_of_two else _default(word, gpu, catalogue))
        if link.place == "within":
            within = link
        else:
            between = link
    return System(gpu, nodes, gpus, within, between)


def _gpu_and_links(rest: str, text: str, catalogue: Catalogue) -> tuple[Gpu, list[str]]:
    """The longest beginning that is a GPU's name, and the words after it, each a link's."""
    parts = rest.split("-")
    exact = {word.lower() for gpu in catalogue.gpus.values() for word in (gpu.name, *gpu.alike)}
    for end in range(len(parts), 0, -1):
        if "-".join(parts[:end]).lower() in exact:
            return catalogue.gpu("-".join(parts[:end])), _links(parts[end:], catalogue)
    known = near(parts[0], catalogue.gpus)
    raise SettingError(f"system {text!r}: {parts[0]!r} is no GPU that the catalogue knows; {known}")


def _links(parts: list[str], catalogue: Catalogue) -> list[str]:
    """Words joined again where a link's name holds a hyphen."""
    words: list[str] = []
    while parts:
        for end in range(len(parts), 0, -1):
            word = "-".join(parts[:end])
            if end == 1 or word.lower() in catalogue.links:
                words.append(word)
                parts = parts[end:]
                break
    return words


def _default(word: str, gpu: Gpu, catalogue: Catalogue) -> str:
    plain = word.lower()
    return gpu.between if plain in catalogue.alike[gpu.between] else gpu.within
