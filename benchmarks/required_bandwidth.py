"""How fast a link must be for a compute utilization: the tables of the papers on DiLoCo, by the simulator.

python benchmarks/required_bandwidth.py

Streaming DiLoCo (arXiv 2501.18512) and the scaling laws for DiLoCo (arXiv 2503.09799) tabulate it for two sites, with
the reduction overlapped with the backward pass. Their values lie on a grid: 50 speeds from 0.1 to 1000 Gbit/s, evenly
on a log scale, 20.7 % apart, of which the first that suffices is printed. So a value that is computed exactly belongs
between the speed before the printed one and the printed one; `off` is by how far it lies outside of that.

What a parameter sends is not what the papers say (16 bits): their tables fit 13.6 and 11.6 bits. These two numbers were
chosen on the rows of data parallelism, but some rows of DiLoCo were looked at before they were kept, so these are no
blind predictions. How many layers a model has, the papers do not say: 24, 48 and 108 are assumed.
"""

import math
import sys
from dataclasses import dataclass

from lockstep.scale.catalogue import open_catalogue
from lockstep.scale.links import Link
from lockstep.scale.simulated_strategy import SimulatedStrategy
from lockstep.scale.simulator import alone_s, simulate
from lockstep.scale.step_profile import GradientReady, StepProfile, Timing
from lockstep.scale.systems import System

UTILIZATIONS = (0.5, 0.8, 0.9, 0.95, 0.99)
GRID = tuple(10 ** (-1 + 4 * k / 49) for k in range(50))
DATA_PARALLEL = SimulatedStrategy("ddp", reduction="fast", bucket_bytes=1.0)


@dataclass(frozen=True)
class Table:
    """One row of a paper: Gbit/s for each of `UTILIZATIONS`."""

    name: str
    parameters: float
    layers: int
    step_s: float
    bits: float  #: that a parameter sends
    strategy: SimulatedStrategy
    published: tuple[float, ...]
    chosen_on: bool = False  #: `bits` was


def diloco(period: int, fragments: int = 1, overlap: int = 0) -> SimulatedStrategy:
    """DiLoCo as the papers model it."""
    options = {"period": str(period), "fragments": str(fragments), "overlap": str(overlap)}
    return SimulatedStrategy("diloco", options, within_backward=True)


ONE, TEN, HUNDRED = (1e9, 24, 0.1), (10e9, 48, 0.8), (100e9, 108, 4.9)
TABLES = (
    Table("1B, data parallel", *ONE, 13.6, DATA_PARALLEL, (86.8, 152.6, 184.2, 222.3, 569.0), True),
    Table("100B, data parallel", *HUNDRED, 13.6, DATA_PARALLEL, (184.2, 323.8, 390.7, 390.7, 471.5), True),
    Table("1B, streaming, H=100", *ONE, 13.6, diloco(100, 8), (1.4, 5.2, 9.1, 16.0, 28.1)),
    Table("1B, streaming, 1 step overlapped, 4 bits", *ONE, 3.4, diloco(100, 8, 1), (0.4, 0.95, 1.7, 2.0, 2.95)),
    Table("10B, data parallel", *TEN, 11.6, DATA_PARALLEL, (104.8, 184.2, 222.3, 222.3, 390.7), True),
    Table("10B, DiLoCo, H=10", *TEN, 11.6, diloco(10), (16.0, 49.4, 86.8, 152.6, 222.3)),
    Table("10B, DiLoCo, H=50", *TEN, 11.6, diloco(50), (2.95, 11.0, 23.3, 41.0, 126.5)),
    Table("10B, DiLoCo, H=100", *TEN, 11.6, diloco(100), (1.4, 6.2, 13.3, 23.3, 86.8)),
    Table("10B, DiLoCo, H=300", *TEN, 11.6, diloco(300), (0.54, 2.0, 4.3, 9.1, 41.0)),
)


def profile_of(table: Table) -> StepProfile:
    """A third of a step is its forward pass; layers are equal."""

    def steady(seconds: float) -> Timing:
        return Timing(seconds, seconds, seconds)

    size = table.parameters * table.bits / 8
    backward = table.step_s * 2 / 3
    gradients = tuple(
        GradientReady(f"layer {n}", round(size / table.layers), backward * (n + 1) / table.layers)
        for n in range(table.layers)
    )
    nothing = steady(0.0)
    return StepProfile(
        script=table.name,
        device="cpu",
        precision="bf16",
        global_batch=1,
        micro_batch=1,
        micro_batches=1,
        steps=1,
        data=nothing,
        forward=steady(table.step_s / 3),
        backward=steady(backward),
        optimizer=nothing,
        other=nothing,
        gradients=gradients,
        parameter_bytes=round(size),
        optimizer_bytes=0,
        peak_bytes=None,
    )


def required_gbits(table: Table, utilization: float) -> float:
    """The slowest link between two sites with which computation is that part of a step, in Gbit/s: by bisection."""
    profile, catalogue = profile_of(table), open_catalogue()
    low, high = math.log(1e-3), math.log(1e5)
    for _ in range(60):
        middle = (low + high) / 2
        link = Link("site", "between", math.exp(middle) * 1e9 / 8, 0.0, 0.0, 2, "as asked", 0.0)
        system = System(catalogue.gpu("cpu"), 2, 1, link, link)
        reached = alone_s(profile) / simulate(profile, system, table.strategy).seconds
        low, high = (low, middle) if reached >= utilization else (middle, high)
    return math.exp(high)


def off(required: float, published: float) -> float:
    """By which part ``required`` lies outside of the step of the grid that ends in ``published``; 0 within it."""
    number = min(range(len(GRID)), key=lambda k: abs(math.log(GRID[k] / published)))
    before, printed = GRID[number - 1] if number else 0.0, GRID[number]
    return max(0.0, required / printed - 1, before / required - 1)


def main() -> None:
    """Print each table, ours above what is published."""
    worst = 0.0
    print(f"{'':<44}" + "".join(f"{u:>9.0%}" for u in UTILIZATIONS))
    for table in TABLES:
        ours = [required_gbits(table, u) for u in UTILIZATIONS]
        print(f"{table.name:<44}" + "".join(f"{value:>9.2f}" for value in ours))
        print(f"{'  published' + (', bits chosen here' if table.chosen_on else ''):<44}", end="")
        print("".join(f"{value:>9.2f}" for value in table.published))
        worst = max(worst, *map(off, ours, table.published))
    print(f"off by at most {worst:.1%}", file=sys.stderr)


if __name__ == "__main__":
    main()
