"""Why two runs of a script differ, most likely, and in which of its lines.

what the way varies      of the lines that read it, the one that matters most: the clock, a set's order, ...
what the script held     variables that were otherwise, as the first micro-batch that differs was handed out, if the
                         body reads them before it sets them, and what differs depends on them
what differs             else where that is made: the loader, a module's forward, run.step, run.log
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from lockstep.transcript import MICRO_BATCH, SAID
from lockstep.verify.difference import STEPS, Difference
from lockstep.verify.script_source import Line, ScriptSource
from lockstep.verify.surroundings import CHANCE, CLOCK, DIRECTORY, HOST, LISTING, PROCESS
from lockstep.verify.way import HASHES, ZONE, Way

#: Reads that are there to be shown, not to be computed with.
_SHOWS: Final = re.compile(r"^(print|run\.say|run\.log|log|logger|logging)\b|elapsed|took|duration|started")
_DECIDES: Final = re.compile(r"seed|\bif\b|\bwhile\b|manual")
_MODULE: Final = re.compile(r"(?:the output|the gradient at the output)(?: \d+)? of (?P<name>.+) \((?P<kind>\w+)\)")
_READS: Final[Mapping[str, tuple[str, str]]] = {
    CLOCK: (CLOCK, "depends on the clock"),
    ZONE: (CLOCK, "depends on the time zone"),
    HOST: (HOST, "depends on the name of the host"),
    LISTING: (LISTING, "depends on the order in which a directory is listed: sort it"),
    DIRECTORY: (DIRECTORY, "depends on the path of the working directory"),
}


@dataclass(frozen=True, slots=True)
class Reason:
    """Why, and where."""

    text: str
    line: Line | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of a difference."""

    way: Way
    difference: Difference
    detail: Difference | None = None  #: the same, with the outputs of modules, from a second pass
    variables: Mapping[str, tuple[str, str]] | None = None  #: of the script, that were otherwise
    reads: Sequence[tuple[str, str, int]] = ()  #: of its surroundings: kind, file and line

    @property
    def first(self) -> Difference:
        """The first difference that is known."""
        return self.detail or self.difference


def reason_of(evidence: Evidence, source: ScriptSource) -> Reason:
    """The most likely reason. A pure function."""
    way, first = evidence.way, evidence.first
    if way.varies == "surroundings":
        found = _of_surroundings(way.shifted[0], evidence, source)
    elif way.varies == "again":
        found = _of_chance(evidence, source)
    elif way.varies == "workers" and (lines := source.calls("get_worker_info")):
        found = Reason("depends on which loader process a sample is read in", lines[0])
    elif not first.place.step and first.place.kind != MICRO_BATCH:
        found = _of_ranks(source, way) or _of_variables(evidence, source)
    else:
        found = _of_variables(evidence, source) or (_of_ranks(source, way) if first.place.kind == MICRO_BATCH else None)
    return found or _of_place(evidence, source)


def _of_surroundings(kind: str, evidence: Evidence, source: ScriptSource) -> Reason | None:
    if kind == HASHES:
        lines = source.hash_orders()
        text = "depends on hash values: the order of a set, or hash(...); sort it, or use zlib.crc32 of the text"
    else:
        read, text = _READS[kind]
        lines = _lines_of(read, evidence, source)
    return Reason(text, _strongest(lines)) if lines else None


def _of_chance(evidence: Evidence, source: ScriptSource) -> Reason | None:
    no_seed = [*source.unseeded_generators(), *_lines_of(CHANCE, evidence, source)]
    if no_seed:
        return Reason("draws random numbers without a seed", _strongest(no_seed))
    for kind, text in ((CLOCK, "depends on the clock"), (PROCESS, "depends on the number of the process")):
        lines = [line for line in _lines_of(kind, evidence, source) if not _SHOWS.search(line.text)]
        if lines:
            return Reason(text, _strongest(lines))
    if lines := source.hash_orders():
        return Reason("depends on an order or a number that each process has for itself: id(...), a set", lines[0])
    if lines := source.calls("Thread", "ThreadPoolExecutor", "Process"):
        return Reason("what threads or processes of the script do comes in no fixed order", lines[0])
    if found := _MODULE.match(evidence.first.what):
        kind = found["kind"]
        text = f"{found['name']} ({kind}) gave another output for the same inputs, parameters and random numbers"
        return Reason(f"{text}: a kernel in it is not deterministic", source.class_at(kind))
    if not source.calls("Run", "manual_seed", "seed_everything", "set_seed"):
        drawing = source.calls("randn", "rand", "randint", "randperm", "Linear", "Conv2d", "Embedding", "DataLoader")
        return Reason("nothing seeds torch: torch.manual_seed(0) at the top", _first(drawing))
    return None


def _of_ranks(source: ScriptSource, way: Way) -> Reason | None:
    lines = source.rank_reads() if max(way.ranks, way.resumed_on) > 1 else []
    text = "depends on a rank or on the number of ranks: nothing that is computed should"
    return Reason(text, _strongest(lines)) if lines else None


def _of_variables(evidence: Evidence, source: ScriptSource) -> Reason | None:
    variables = evidence.variables or {}
    dead, needed = source.read_by_body()
    what, place = evidence.difference.what, evidence.difference.place
    if what.startswith(("sample", "the samples")):
        needed = source.followed(source.names_given("loader"))
    elif place.kind == SAID:
        needed = source.followed(source.names_given("log", "measure"))
    elif place.kind != MICRO_BATCH:
        needed = needed | source.followed(source.names_given("log", "scheduler", "optimizer", "keep"))
    for path in variables:
        root, *parts = source.names(path)
        name = parts[-1] if parts and parts[-1] in needed else root  # of an object, what is in it may have any name
        line = source.set_at(name) if name in needed and root not in dead else None
        if line is None:
            continue
        values = " was {}, and then {}".format(*variables[path]) if all(variables[path]) else " held other values"
        why = {
            "resume": "no checkpoint holds it: give it to run.keep(...), or compute it from run.progress",
            "workers": "loader processes have copies of their own of it",
        }.get(evidence.way.varies, "the body changes it, and each rank has only some of the bodies")
        if evidence.way.varies == "ranks" and not (place.step or place.micro_batch):  # before any body
            why = "it depends on a rank or on the number of ranks"
        return Reason(f"{path}{values}: {why}", line)
    return None


def _of_place(evidence: Evidence, source: ScriptSource) -> Reason:
    first, what = evidence.first, evidence.difference.what
    if found := _MODULE.match(first.what):
        text = (
            f"first in the {'backward' if 'gradient' in first.what else 'forward'} of {found['name']} ({found['kind']})"
        )
        return Reason(text, source.class_at(found["kind"]))
    if what == STEPS:
        return Reason("the training ends after another number of steps", _first(source.breaks()))
    if what.startswith("sample 0") and (lines := source.breaks()):
        return Reason("the loop over a pass is left after another step, or the samples are others", lines[0])
    if what.startswith(("sample", "the samples", "batch")):
        return Reason("the data set, its sampler or the collate function gives other samples", _of_dataset(source))
    if found := re.match(r"run\.(?:log|metrics)(?:\['|\()(\w+)", what):
        name = found[1]
        logs = source.calls("log", keyword=name) if what.startswith("run.log") else []
        text = "is not the same on any number of ranks: run.measure(...) gives means over all samples"
        return Reason(text, _first([*logs, *source.calls("measure", keyword=name), *source.calls("log", "step")]))
    if first.place.kind == MICRO_BATCH:
        return Reason("first in what the body computes from its micro-batch", _first(source.calls("step", "backward")))
    if "optimizer" in what:
        return Reason("first in the update", _first(source.calls("scheduler", "optimizer")))
    return Reason("first in what the script changes between two steps", _first(source.calls("keep", "model")))


def _of_dataset(source: ScriptSource) -> Line | None:
    for name in source.followed(source.names_given("loader", "DataLoader")):
        for method in ("__getitem__", "__iter__", "__getitems__"):
            if line := source.class_at(name, method):
                return line
    return _first(source.calls("loader", "DataLoader"))


def _lines_of(kind: str, evidence: Evidence, source: ScriptSource) -> list[Line]:
    return [source.line(file, number) for each, file, number in evidence.reads if each == kind]


def _strongest(lines: Sequence[Line]) -> Line | None:
    """A line that decides or seeds, else one that does not only show something, else the first."""
    for tells in (_DECIDES.search, lambda text: not _SHOWS.search(text), lambda _: True):
        if found := next((line for line in lines if tells(line.text)), None):
            return found
    return None


def _first(lines: Sequence[Line]) -> Line | None:
    return lines[0] if lines else None
