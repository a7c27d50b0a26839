"""The script is run in all ways, each is compared with the first one, and what differs is looked at once more.

as it is ║ the same again        side by side; how many steps fit the time
all other ways                   as many side by side as there are CPUs; one that varies several things at once and
                                 differs is taken apart
a second pass of what differs    with hooks on modules, and the variables of the script
"""

from __future__ import annotations

import importlib
import math
import multiprocessing
import os
import re
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Final, TypeVar

from lockstep.errors import LaunchError, SettingError
from lockstep.formatting import duration, plural
from lockstep.launch import (
    Machine,
    Module,
    Script,
    check_program,
    die_with_parent,
    import_torch,
    mentions_lockstep,
    require_linux,
    sources_hash,
)
from lockstep.launch_contract import EXIT_OK
from lockstep.strategy_kinds import BUILT_IN, kind_of
from lockstep.transcript import MICRO_BATCH, SECONDS, STATE, Transcript, TranscriptRequest
from lockstep.verify.difference import (
    STEPS,
    Difference,
    aligned,
    described,
    first_difference,
    other_losses,
    other_variables,
)
from lockstep.verify.plain_script import LOADED, SAVED
from lockstep.verify.reason import Evidence, Reason, reason_of
from lockstep.verify.result import StandsInTheWay, VerifyResult, WayResult
from lockstep.verify.script_source import ScriptSource
from lockstep.verify.surroundings import DIRECTORY
from lockstep.verify.way import (
    MOST_RANKS,
    RunPlan,
    Varies,
    Way,
    first_ways,
    resumes_and_strategies,
    ways_of_plain,
    worlds_and_surroundings,
)
from lockstep.verify.written_run import VerifiedScript, WrittenRun, carry_out

_MOST_STEPS: Final = 24
_LEAST_STEPS: Final = 6  # two passes, and a step behind a kill
_PASS_STEPS: Final = 4
_OF_STEPS: Final = 0.06  # of the time, for the steps of the first run
_KEPT: Final = 0.3  # of the time, for second passes

_MICRO_BATCHES: Final = (
    "What is trained depends on which samples share a micro-batch: by a normalisation over a batch, a loss over pairs, "
    "a mean over something else than samples, a hook on gradients or a buffer that a forward pass fills; or by random "
    "numbers, which each micro-batch draws for itself, as for dropout"
)

T = TypeVar("T")
Say = Callable[[str], None]
#: Of a line, and what takes its place.
_INSTEAD: Final = (
    (r"\bDataLoader\(|DistributedSampler\(", "run.loader(dataset, global_batch=..., micro_batch=...)"),
    (r"\.backward\(\)", "run.step(loss), which takes the place of backward, optimizer.step and zero_grad"),
    (r"optim\w*\.step\(|\.zero_grad\(", "leave it out: run.step(loss) does it"),
    (r"DistributedDataParallel\(|\bDDP\(|\bDataParallel\(", "run.model(model); lockstep run --strategy ddp"),
    (r"init_process_group\(|destroy_process_group\(", "with lockstep.Run(seed=0) as run: it connects the ranks"),
    (
        r"torch\.save\(|torch\.load\(",
        "leave it out: a run saves and resumes by itself; lockstep export gives the model",
    ),
    (r"clip_grad_norm_\(", "lockstep.Run(clip_norm=...)"),
    (r"GradScaler\(|autocast\(", 'lockstep.Run(precision="bf16")'),
    (r"sched\w*\.step\(", "run.scheduler(scheduler), or run.keep(...) for one that steps once an epoch"),
    (r"manual_seed\(|random\.seed\(", "lockstep.Run(seed=...), which seeds all generators"),
    (r"for \w+ in range\(.*epoch", "for epoch in run.epochs(n):"),
    (r"\.cuda\(|\.to\((\"cuda|'cuda|device)", "leave it out: run.model moves the model, run.train the data"),
    (r"all_reduce\(|all_gather\(|\bbarrier\(", "run.sum, run.mean, run.gather, run.measure"),
    (r"get_rank\(|\blocal_rank\b|\[.RANK.\]", "nothing depends on the rank; if run.leads: for what one rank does"),
)


@dataclass(frozen=True, slots=True)
class VerifyPlan:
    """What is to be verified."""

    program: Script | Module
    strategies: tuple[str, ...] = ()  #: that are to give the same bits as the script's own
    settings: Mapping[str, str] = field(default_factory=dict)  #: for `Run`, over those of the script
    only: tuple[Varies, ...] = ()  #: what ways vary that are tried, beside running it again; (): all
    time_s: float = 120.0  #: that all of it may take, about
    time_limit_s: float = 900.0  #: of each run


def verify(plan: VerifyPlan, say: Say = lambda _: None) -> VerifyResult:
    """Run the script in several ways and compare all that it does, step by step.

    Nothing of the runs is left on disk but what the script itself writes; no tracker is told.

    Args:
        plan: what is verified.
        say: is told what goes on, in lines.

    Raises:
        SettingError: if there is no such script, or a strategy does not exist, or this is not Linux.
        LaunchError: if the script fails as it is, or trains no step.
    """
    require_linux("one rank needs no launcher: python train.py")
    check_program(plan.program)
    for strategy in plan.strategies:
        if not (kind := kind_of(strategy)).same_bits:
            raise SettingError(
                f"--strategies {strategy}: {kind.name} computes something else by design; of equal bits are "
                f"{', '.join(name for name, one in BUILT_IN.items() if one.same_bits)}"
            )
    import_torch()
    importlib.import_module(BUILT_IN["ddp"].module)
    with tempfile.TemporaryDirectory(prefix="lockstep-verify-") as place:
        return _Verification(plan, say, Path(place)).result()


class _Verification:
    def __init__(self, plan: VerifyPlan, say: Say, place: Path) -> None:
        self._plan: Final = plan
        self._say: Final = say
        self._place: Final = place
        self._began_s: Final = time.monotonic()
        self._numbers: Final = count()
        self._machine: Final = Machine.detect(os.environ)
        self._uses_run: Final = mentions_lockstep(plan.program)
        shared = {"rehearse": "true"} if 0 < self._machine.gpus < MOST_RANKS else {}
        settings = {**shared, **plan.settings}
        self._script: Final = VerifiedScript(plan.program, not self._uses_run, settings, plan.time_limit_s)
        self._source: Final = ScriptSource.of(plan.program)
        self._side_by_side: Final = 1 if self._machine.gpus else max(1, self._machine.cpus // 2)
        self._request = TranscriptRequest(
            directory="",
            steps=_MOST_STEPS,
            pass_steps=_PASS_STEPS,
            budget_s=_OF_STEPS * plan.time_s,
            least_steps=_LEAST_STEPS,
        )
        self._looked_into: Final[set[str]] = set()  # what ways vary that had a second pass
        self._reasons: Final[dict[tuple[str, str], Reason]] = {}  # by that, and by what differs
        self._details: Final[dict[int, WrittenRun]] = {}  # second passes of the script as it is, by step

    def result(self) -> VerifyResult:
        """All of it."""
        as_it_is, again = first_ways()
        reference, repeated = self._all([as_it_is, again])
        if reference.end.code != EXIT_OK and self._uses_run:
            # It may count what an epoch holds: then passes stay whole.
            self._request = replace(self._request, pass_steps=None)
            reference, repeated = self._all([as_it_is, again])
        if reference.end.code != EXIT_OK:
            where = f" ({reference.failure.file}:{reference.failure.line})" if reference.failure else ""
            raise LaunchError(f"{self._plan.program.name} fails as it is: {reference.end.cause}{where}")
        transcript = reference.transcript
        if transcript.steps < 2:
            raise LaunchError(
                f"{self._plan.program.name} trained {plural(transcript.steps, 'step')}: "
                + ("give one that trains two" if self._uses_run else "no optimizer of torch's has stepped twice")
            )
        steps = min(transcript.steps, repeated.transcript.steps) or transcript.steps
        self._request = replace(self._request, budget_s=math.inf, steps=steps)
        results = [self._compared(again, reference, repeated)]
        if results[0].status == "differs":
            # What else may differ would differ for the same reason.
            text = "it is not even the same when it is run again"
            results.append(WayResult("all other ways", "left out", reason=text))
        else:
            results += self._other_ways(reference)
        return VerifyResult(
            script=self._plan.program.name,
            sha256=sources_hash(self._plan.program),
            steps=self._request.steps,
            took_s=round(time.monotonic() - self._began_s, 1),
            uses_run=self._uses_run,
            ways=tuple(results),
            to_change=() if self._uses_run else to_change(self._source),
        )

    def _other_ways(self, reference: WrittenRun) -> Iterator[WayResult]:
        micro_batches = int(reference.transcript.about.get("micro_batches", ("1", "1"))[0])
        micro_batch = int(reference.transcript.about.get("micro_batch", ("1", "1"))[0])
        whole = int(reference.transcript.about.get("steps_per_epoch", ("0", ""))[0])
        pass_steps = self._request.pass_steps or whole or _PASS_STEPS
        plan = RunPlan(micro_batches, micro_batch, self._request.steps, pass_steps)
        runs = len(worlds_and_surroundings(plan)) + 6 + len(self._plan.strategies)
        self._request = replace(self._request, steps=self._steps_that_fit(reference, runs))
        plan = replace(plan, steps=self._request.steps)
        reference = replace(reference, transcript=_cut(reference.transcript, plan.steps))
        ways = self._wanted(worlds_and_surroundings(plan) if self._uses_run else ways_of_plain())
        worlds_differ = False
        for way, run in zip(ways, self._all(ways), strict=True):
            found = self._taken_apart(way, reference, run, is_known=worlds_differ)
            worlds_differ |= way.varies == "ranks" and any(one.status == "differs" for one in found)
            yield from found
        if not self._uses_run:
            return
        if micro_batches == 1:
            text = "a step has one micro-batch, so it cannot be divided: give a smaller micro_batch"
            yield WayResult("2 ranks", "left out", reason=text)
        ways = self._wanted(resumes_and_strategies(plan, self._plan.strategies, worlds_differ=worlds_differ))
        for way, run in zip(ways, self._all(ways), strict=True):
            yield self._compared(way, reference, run)

    def _wanted(self, ways: Sequence[Way]) -> list[Way]:
        only = self._plan.only
        if not only:
            return list(ways)
        found = (each for way in ways for each in ([way] if way.varies in only else way.parts))
        return [way for way in found if way.varies in only]

    # ---- running -------------------------------------------------------------------------------------------------

    def _all(self, ways: Sequence[Way]) -> list[WrittenRun]:
        """The runs of all ``ways``, several of them side by side."""
        runs = _side_by_side([partial(self._run, way, str(next(self._numbers))) for way in ways], self._side_by_side)
        found: dict[int, WrittenRun] = {}
        for number, run in runs:
            found[number] = run
            self._say_end(str(ways[number]), run)
        return [found[number] for number in range(len(ways))]

    def _run(self, way: Way, name: str, detail: int | None = None) -> WrittenRun:
        request = self._request
        if detail is not None:
            steps = max(detail + 1, 0 if way.killed_after is None else way.killed_after + 2)
            request = replace(request, detail=detail, steps=steps)
        return carry_out(self._script, way, request, self._place / name)

    def _by_modules(self, way: Way, step: int) -> WrittenRun:
        """Once more, with the outputs of modules and the variables of the script in one step."""
        run = self._run(way, str(next(self._numbers)), step)
        self._say_end(f"{way} once more, by modules", run)
        return run

    def _say_end(self, what: str, run: WrittenRun) -> None:
        ended = "" if run.end.code == EXIT_OK else f", {run.end.cause}"
        self._say(f"{what}: {plural(run.transcript.steps, 'step')}, {duration(run.took_s)}{ended}")

    def _steps_that_fit(self, reference: WrittenRun, runs: int) -> int:
        """How many steps the other ways may train, of those of the first run."""
        steps, steps_s = self._request.steps, float(reference.transcript.about.get(SECONDS, ("0", ""))[0])
        start_s = max(0.0, reference.took_s - steps_s)
        left_s = (1 - _KEPT) * self._plan.time_s - (time.monotonic() - self._began_s)
        # To leave out steps that take less than the start gains little.
        of_steps_s = max(left_s * self._side_by_side / max(1, runs) - start_s, start_s / 2)
        return min(steps, max(_LEAST_STEPS, int(steps * of_steps_s / steps_s) if steps_s else steps))

    # ---- comparing -----------------------------------------------------------------------------------------------

    def _taken_apart(self, way: Way, reference: WrittenRun, run: WrittenRun, *, is_known: bool) -> Sequence[WayResult]:
        """The result of a way; if it differs and varies several things, those of its parts unless that ``is_known``."""
        if self._judged(reference, run) is None or not way.parts or (is_known and way.varies == "ranks"):
            return [self._compared(way, reference, run)]
        read = {kind for kind, _, _ in (*reference.reads, *run.reads)}
        # One after another, what lines of the script have read before the rest: the first that differs is enough.
        parts = sorted(way.parts, key=lambda part: not read & set(part.shifted))
        found: list[WayResult] = []
        while parts and not any(one.status == "differs" for one in found):
            some, parts = parts[: self._side_by_side], parts[self._side_by_side :]
            found += [self._compared(each, reference, ran) for each, ran in zip(some, self._all(some), strict=True)]
        # A script that fails in another directory, as by a path that leads out of it, is told in a note of that part.
        return found if any(one.status != "equal" for one in found) else [self._compared(way, reference, run)]

    def _judged(self, reference: WrittenRun, run: WrittenRun) -> Difference | str | None:
        """The first difference, also before the run failed, or why it did; None if all is equal."""
        found = first_difference(reference.transcript, run.transcript)
        if run.end.code == EXIT_OK or (found is not None and found.what != STEPS):
            return found
        return run.end.cause or f"exit code {run.end.code}"

    def _compared(self, way: Way, reference: WrittenRun, run: WrittenRun) -> WayResult:
        if way.varies == "checkpoint" and run.end.code == EXIT_OK:
            if why := _not_resumed(run.transcript):
                return WayResult(str(way), "left out", reason=why)
            moved = aligned(reference.transcript, run.transcript)
            if moved is None:
                text = "it begins with other weights than it had after any step"
                return WayResult(str(way), "differs", run.transcript.steps, place="after the kill", what=text)
            run = replace(run, transcript=moved)
        result = WayResult(str(way), "equal", run.transcript.steps, round(run.took_s, 1))
        if way.varies == "micro-batch" and run.end.code == EXIT_OK:
            text = other_losses(reference.transcript, run.transcript)
            return replace(result, status="note", reason=f"{text}. {_MICRO_BATCHES}") if text else result
        found = self._judged(reference, run)
        if found is None:
            return result
        if isinstance(found, str):
            return self._failed(result, way, run, found)
        if way.varies == "evaluation":
            text = f"{found}: what is trained depends on what an evaluation measures, or does"
            return replace(result, status="note", reason=text)
        evidence = self._looked_at(Evidence(way, found, reads=(*reference.reads, *run.reads)))
        reason = self._reasons.setdefault((way.varies, found.what), reason_of(evidence, self._source))
        detail = evidence.detail
        fails = "" if run.end.code == EXIT_OK else f"; later it fails: {run.end.cause}"
        return replace(
            result,
            status="differs",
            place=str(found.place),
            what=str(found).removeprefix(f"{found.place}: ") + fails,
            module=described(detail.what) if detail is not None and detail.what != found.what else "",
            reason=reason.text,
            file=reason.line.file if reason.line else "",
            line=reason.line.number if reason.line else 0,
            source=reason.line.text if reason.line else "",
        )

    def _failed(self, result: WayResult, way: Way, run: WrittenRun, cause: str) -> WayResult:
        failure = run.failure
        if way.varies in ("evaluation", "micro-batch") or way.shifted == (DIRECTORY,):
            return replace(result, status="note", reason=f"it does not run so: {cause}")
        if failure is None:
            return replace(result, status="differs", place="at its end", what=cause, reason="the run failed")
        named = re.match(r"run\.(\w+)\((\w+)=", failure.message)
        calls = self._source.calls(named[1], keyword=named[2]) if named else []
        line = calls[0] if calls else self._source.line(failure.file, failure.line)
        return replace(
            result,
            status="differs",
            place=f"after step {run.transcript.steps}",
            what=f"it fails: {failure.kind.rpartition('.')[2]}",
            reason=failure.message.partition("\n")[0],
            file=line.file,
            line=line.number,
            source=line.text or failure.source,
        )

    def _looked_at(self, evidence: Evidence) -> Evidence:
        """With a second pass of both runs, in which modules and variables of the step are written down."""
        varies = evidence.way.varies
        if not self._uses_run or varies in self._looked_into:
            return evidence
        self._looked_into.add(varies)
        place = evidence.difference.place
        step = place.step if place.kind == MICRO_BATCH else max(0, place.step - (place.kind == STATE))
        if step not in self._details:
            self._details[step] = self._by_modules(first_ways()[0], step)
        first, other = self._details[step].transcript, self._by_modules(evidence.way, step).transcript
        places = [place] if place.kind == MICRO_BATCH else sorted(first.variables.keys() & other.variables.keys())
        variables: dict[str, tuple[str, str]] = {}
        for each in places:
            variables |= other_variables(first.variables.get(each, {}), other.variables.get(each, {}))
        detail = first_difference(_only(first, step), _only(other, step))
        return replace(evidence, detail=detail, variables=variables)


def _not_resumed(transcript: Transcript) -> str:
    """Why a script in plain torch was not resumed; "" if it was."""
    if SAVED not in transcript.about:
        return "it calls no torch.save with a path in these steps"
    return "" if LOADED in transcript.about else "it saves, and does not load that when it is run again"


def _only(transcript: Transcript, step: int) -> Transcript:
    """The micro-batches of one step, and what follows."""
    notes = {place: notes for place, notes in transcript.notes.items() if place.step >= step}
    return Transcript(transcript.about, notes, transcript.variables)


def _cut(transcript: Transcript, steps: int) -> Transcript:
    """The first ``steps`` of it."""
    notes = {
        place: notes
        for place, notes in transcript.notes.items()
        if place.step < steps or (place.step == steps and place.kind == STATE)
    }
    return Transcript(transcript.about, notes, transcript.variables)


def to_change(source: ScriptSource) -> tuple[StandsInTheWay, ...]:
    """The lines of ``source`` that would change, each with what to write instead."""
    return tuple(
        StandsInTheWay(file, number, text.strip(), instead)
        for file, lines in source.lines.items()
        for number, text in enumerate(lines, 1)
        for pattern, instead in _INSTEAD
        if re.search(pattern, text.partition("#")[0])
    )


def _side_by_side(tasks: Sequence[Callable[[], T]], at_once: int) -> Iterator[tuple[int, T]]:
    """The number and the result of each task, in the order in which they end.

    So many run ``at_once``, each in a copy of this process. When this is left, also by an error, none of them goes on.

    Raises:
        LaunchError: if a copy has died, or its task has failed.
    """
    context = multiprocessing.get_context("fork")
    waiting = list(enumerate(tasks))[::-1]
    running: dict[Connection, tuple[int, ForkProcess]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                number, task = waiting.pop()
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_carry_out, args=(task, theirs, os.getpid()))
                with warnings.catch_warnings():
                    # Python warns of other threads, such as those of a test runner; the copy does not use them.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
                theirs.close()
                running[ours] = number, process
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                number, process = running.pop(ready)
                with ready:
                    try:
                        result, error = ready.recv()
                    except EOFError:
                        result, error = None, "its process died"
                process.join()
                process.close()
                if error:
                    raise LaunchError(f"a run could not be made: {error}")
                yield number, result
    finally:
        for connection, (_, process) in running.items():
            connection.close()
            process.terminate()
            process.join()
            process.close()


def _carry_out(task: Callable[[], object], pipe: Connection, parent: int) -> None:
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the original ends its copies
    try:
        pipe.send((task(), ""))
    except Exception as error:  # noqa: BLE001 - whatever it is, the original says it
        pipe.send((None, f"{type(error).__name__}: {error}"))
