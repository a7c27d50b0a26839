"""How long small sums take, by the links of the catalogue that do not know the curve, held against measured curves.

python benchmarks/small_sums.py

A curve is left out: a link within a node takes the shape and the latency of the other one that was measured, at its own
bandwidth; the link between nodes has no curve, and the latency of InfiniBand. Of the two nodes with TCPX, whose latency
nothing else says, only the sizes below 32 KiB are left out; the one number that says them was chosen on them.
"""

import csv
from dataclasses import replace
from pathlib import Path

from lockstep.scale.catalogue import open_catalogue
from lockstep.scale.links import Link
from lockstep.scale.systems import System

TABLE = Path(__file__).parent / "published" / "nccl_curves.csv"
SMALL = 100_000
CATALOGUE = open_catalogue()
LINKS = CATALOGUE.links


def shaped_like(name: str, other: str) -> Link:
    """The link ``name`` with nothing of its own but the bandwidth."""
    return LINKS[other].scaled(LINKS[name].bytes_per_s / LINKS[other].bytes_per_s)


def systems_without_their_curve() -> dict[str, System]:
    """For the first words of each curve's name, the system that it was measured on."""
    infiniband = replace(LINKS["ib-hdr8"], curve=None, bytes_per_s=LINKS["rdma-measured"].bytes_per_s)
    a100, h100 = CATALOGUE.gpu("A100"), CATALOGUE.gpu("H100")
    return {
        "DGX/HGX A100": System(a100, 1, 8, shaped_like("nvlink3", "nvlink4-nvls"), infiniband),
        "8x H200": System(CATALOGUE.gpu("H200"), 1, 8, shaped_like("nvlink4-nvls", "nvlink3"), infiniband),
        "4 nodes x8": System(a100, 4, 8, LINKS["nvlink3"], infiniband),
        "2 nodes x8 H100": System(h100, 2, 8, LINKS["nvlink4"], LINKS["tcpx"]),
    }


def errors() -> dict[str, list[tuple[int, float, float]]]:
    """For each curve: bytes, measured seconds, and by which part what is said differs from them; below `SMALL`."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    found: dict[str, list[tuple[int, float, float]]] = {}
    for name, system in systems_without_their_curve().items():
        known = [] if system.between.curve is None else system.between.curve.sizes
        for row in rows:
            size, seconds = int(row["bytes"]), float(row["time_us"]) / 1e6
            if row["system"].startswith(name) and size < SMALL and size not in known:
                found.setdefault(name, []).append((size, seconds, system.all_reduce_s(size) / seconds - 1))
    return found


def main() -> None:
    """Print each curve."""
    for name, points in errors().items():
        for size, seconds, error in points:
            print(f"{name:<16} {size:>6} bytes {1e6 * seconds:>6.1f} us {error:>+6.0%}")


if __name__ == "__main__":
    main()
