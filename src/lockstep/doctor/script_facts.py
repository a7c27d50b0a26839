"""What a minute of training has shown of a script on each rank, how the parent reads it, and what the source says.

No run shows a mean that is taken twice. DistributedDataParallel leaves the mean of the ranks' gradients: a loss that is
divided by their number before its backward pass, or gradients that the script sums up itself, give a step that is too
small by that number.
"""

from __future__ import annotations

import ast
import json
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Self

from lockstep.records import from_known, read_object
from lockstep.small_files import replace_text
from lockstep.step_record import HostWait, RankRecord

_RANKS: Final = re.compile(
    r"(?i)\b(world_?size|n_?ranks|num_?ranks|num_?replicas|get_world_size\(\)|ngpus?|n_gpus?)\b|WORLD_SIZE"
)


@dataclass(frozen=True, slots=True)
class PassFacts:
    """One pass of a script without `Run` over a loader, which was ended early."""

    file: str
    line: int
    evaluates: bool  #: all forward passes in it were without gradients
    steps: int = 0  #: of an optimizer
    length: int | None = None  #: samples of the data set
    batch_size: int | None = None
    drop_last: bool = False
    divided: int = 0  #: ranks among which a `DistributedSampler` divides it; 0: there is none
    own_order: bool = False  #: a sampler of the script's decides, or the data set is iterated
    part: str = ""  #: digest of the indices of a `Subset`
    shuffles: bool = False
    epoch: int = 0  #: of that sampler
    watched: bool = True  #: whether collectives were counted
    reductions: int = 0  #: sums and gathers between ranks, since it began and until the next pass


@dataclass(frozen=True, slots=True)
class SaveFacts:
    """A file that a script without `Run` wanted to write by `torch.save`."""

    path: str
    file: str
    line: int


@dataclass(frozen=True, slots=True)
class ScriptFacts:
    """One rank."""

    rank: int
    ranks: int
    uses_run: bool
    on_gpu: bool = False
    step_s: float = 0.0  #: median of the steps; 0: none was measured
    data_s: float = 0.0  #: of these, waiting for the loader
    samples: float = 0.0  #: of a step, over all ranks
    workers: int = 0  #: loader processes of this rank
    peak_bytes: int = 0
    free_bytes: int = 0
    unused: tuple[str, ...] = ()  #: parameters without a gradient
    waits: tuple[HostWait, ...] = ()
    global_batch: int = 0  #: with `Run`
    micro_batch: int = 0
    samples_per_epoch: int | None = None
    activation_bytes: int | None = None  #: of a micro-batch
    joined: bool = True  #: whether it was in a process group
    waits_for_all: bool = False  #: its model is in a DistributedDataParallel that expects each gradient
    passes: tuple[PassFacts, ...] = ()
    saves: tuple[SaveFacts, ...] = ()

    @classmethod
    def of(cls, record: RankRecord) -> Self:
        """What a measured run with `Run` has shown."""
        steps = [step for step in record.steps if not step.begins_pass] or list(record.steps)
        return cls(
            rank=record.rank,
            ranks=record.ranks,
            uses_run=True,
            on_gpu=record.on_gpu,
            step_s=statistics.median(step.total_s for step in steps),
            data_s=statistics.median(sum(step.data_s) for step in steps),
            samples=statistics.median(step.samples for step in steps),
            workers=record.workers,
            peak_bytes=record.peak_bytes,
            free_bytes=record.free_bytes,
            unused=record.unused,
            waits=record.waits,
            global_batch=record.global_batch,
            micro_batch=record.micro_batch,
            samples_per_epoch=record.samples_per_epoch,
            activation_bytes=record.activation_bytes,
        )

    def write(self, directory: Path) -> None:
        """Write it for the parent, completely or not at all."""
        replace_text(directory / f"watched-{self.rank:04d}.json", json.dumps(asdict(self)))


def read_facts(directory: Path) -> Sequence[ScriptFacts]:
    """What the ranks have written to ``directory``, in their order."""
    return [from_known(ScriptFacts, read_object(path)) for path in sorted(directory.glob("watched-*.json"))]


@dataclass(frozen=True, slots=True)
class SourceFault:
    """A line."""

    file: str
    line: int
    what: str


def averaged_twice(file: str, source: str) -> list[SourceFault]:
    """The lines of ``source`` where a mean over ranks is taken that DistributedDataParallel takes, too."""
    if "DistributedDataParallel" not in source:
        return []
    tree = ast.parse(source)
    scopes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.Module)]
    return sorted({fault for scope in scopes for fault in _in_scope(file, scope)}, key=lambda fault: fault.line)


def _in_scope(file: str, scope: ast.AST) -> Iterator[SourceFault]:
    own = list(_own_nodes(scope))
    assigned = sorted(_assignments(own), key=lambda each: each[1])
    for node in own:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr == "backward":
            for name in [part.id for part in ast.walk(node.func.value) if isinstance(part, ast.Name)]:
                before = [each for each in assigned if each[0] == name and each[1] < node.lineno]
                if before and before[-1][2]:
                    yield SourceFault(file, before[-1][1], "the loss is divided by the number of ranks")
            if _divides(node.func.value):
                yield SourceFault(file, node.lineno, "the loss is divided by the number of ranks")
        elif (
            node.func.attr == "all_reduce" and node.args and ast.unparse(node.args[0]).endswith((".grad", ".grad.data"))
        ):
            yield SourceFault(file, node.lineno, "gradients are summed over ranks")


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a scope, without those of functions in it."""
    for child in ast.iter_child_nodes(scope):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from _own_nodes(child)


def _assignments(nodes: Sequence[ast.AST]) -> Iterator[tuple[str, int, bool]]:
    """Name, line, and whether it is divided by the number of ranks there."""
    for node in nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    yield target.id, node.lineno, _divides(node.value)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.lineno, isinstance(node.op, ast.Div) and _is_ranks(node.value)


def _divides(value: ast.AST) -> bool:
    return any(
        isinstance(part, ast.BinOp) and isinstance(part.op, ast.Div) and _is_ranks(part.right)
        for part in ast.walk(value)
    )


def _is_ranks(value: ast.AST) -> bool:
    return _RANKS.search(ast.unparse(value)) is not None
