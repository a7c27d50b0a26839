"""What two runs did differently first."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isclose
from typing import Final

from lockstep.transcript import MICRO_BATCH, SAID, STATE, STOPPED, Notes, Place, Transcript

_NOTHING: Final = "", ""
#: What a run has no notes of, if its ranks hold parts of a model, or compute several micro-batches at once.
_MAY_LACK: Final = re.compile(r"the (gradient|output|buffer|loss|count|random numbers)|what run\.step was given")
_ROUNDING: Final = 1e-3  # of sums in another order, over some steps
STEPS: Final = "how many steps are trained"  #: what differs where one run trains more of them
_STATE_NAME: Final = re.compile(r"state\.(models|optimizers|schedulers)\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class Difference:
    """The first thing that one run has otherwise than another."""

    place: Place
    what: str  #: its name in the transcripts
    value: str = ""  #: in the run that it is compared with, if it is a number
    other: str = ""  #: in the run itself
    others: int = 0  #: differences of the same place that follow

    def __str__(self) -> str:
        values = f": {self.value or 'nothing'}, and then {self.other or 'nothing'}" if self.value or self.other else ""
        more = f" (and {self.others} more there)" if self.others else ""
        return f"{self.place}: {described(self.what)}{values}{more}"


def described(what: str) -> str:
    """The name of something in a transcript, as a user knows it."""
    if found := _STATE_NAME.fullmatch(what):
        kind, number, name = found.groups()
        of = "" if number == "0" else f" of {kind[:-1]} {number}"
        if kind == "models":
            return f"{name}{of}"
        return f"{kind[:-1]} state {name}{of}" if "param_groups" not in name else f"optimizer option {name}{of}"
    return re.sub(r"^(state\.)?kept(_values)?\.", "run.kept.", what).removeprefix("state.")


def first_difference(reference: Transcript, other: Transcript) -> Difference | None:
    """What the two have otherwise first, in the order in which a run comes to it; None if nothing.

    Of a run that failed, what came before the step in which it did is compared.
    """
    first, last = other.first_step(), min(reference.steps, other.steps)
    for place in sorted(reference.notes.keys() | other.notes.keys()):
        if place.step < first or place.step > last or (place.step == last and place.kind != STATE):
            continue
        # What was logged up to the checkpoint is not logged again.
        if place.kind == SAID and place.step == other.resumed_at and place.step:
            continue
        here, there = reference.notes.get(place), other.notes.get(place)
        if here is None or there is None:
            if place.kind == MICRO_BATCH:
                return Difference(place, "the micro-batch itself", *(("", "there") if here is None else ("there", "")))
            continue
        if found := _of_place(place, here, there):
            return found
    shorter = min(reference, other, key=lambda each: each.steps)
    if reference.steps != other.steps and STOPPED not in shorter.about:
        step = Place.of(STATE, last)
        return Difference(step, STEPS, str(reference.steps), str(other.steps))
    return None


def other_losses(reference: Transcript, other: Transcript) -> str:
    """The first step with another mean loss, but for rounding, in words; "" for none."""
    for step in range(min(reference.steps, other.steps)):
        loss, there = _mean_loss(reference, step), _mean_loss(other, step)
        if loss is not None and there is not None and not isclose(loss, there, rel_tol=_ROUNDING, abs_tol=_ROUNDING):
            return f"the loss of step {step + 1} was {loss:.5g}, and then {there:.5g}"
    return ""


def _mean_loss(transcript: Transcript, step: int) -> float | None:
    """The mean of the first loss of each micro-batch, weighed by its count or its samples; None if not known."""
    total, items = 0.0, 0.0
    for place, notes in transcript.notes.items():
        if place.step != step or place.kind != MICRO_BATCH:
            continue
        loss, count = notes.get("the loss", _NOTHING)[1], notes.get("the count of the loss", _NOTHING)[1]
        if not loss:
            return None
        weight = float(count) if count not in ("", "None") else sum(name.startswith("sample ") for name in notes) or 1.0
        total, items = total + float(loss) * weight, items + weight
    return total / items if items else None


def aligned(reference: Transcript, other: Transcript) -> Transcript | None:
    """The transcript of a run that counts its steps from 0 again, by those of ``reference`` whose weights it has.

    None if no step of that ended with these weights.
    """
    begin = other.notes.get(Place.of(STATE, 0), {})
    weights = {name: note for name, note in begin.items() if name.startswith("state.models")}
    for step in range(reference.steps, -1, -1):
        there = reference.notes.get(Place.of(STATE, step), {})
        if weights and all(there.get(name, _NOTHING)[0] == mark for name, (mark, _) in weights.items()):
            moved = {place._replace(step=place.step + step): notes for place, notes in other.notes.items()}
            return Transcript(other.about, moved)
    return None


def _of_place(place: Place, here: Notes, there: Notes) -> Difference | None:
    names = [name for name in dict.fromkeys((*here, *there)) if _differs(name, place, here, there)]
    if not names:
        return None
    name = names[0]
    (_, value), (_, other) = here.get(name, _NOTHING), there.get(name, _NOTHING)
    return Difference(place, name, value, other, len(names) - 1)


def _differs(name: str, place: Place, here: Notes, there: Notes) -> bool:
    if name in here and name in there:
        return here[name][0] != there[name][0]
    # An evaluation that is left out measures nothing, and what is said depends on where a run was resumed.
    return place.kind == MICRO_BATCH and not _MAY_LACK.match(name)


def other_variables(
    reference: Mapping[str, tuple[str, str]], other: Mapping[str, tuple[str, str]]
) -> dict[str, tuple[str, str]]:
    """Variables of the script that were otherwise as the same micro-batch was handed out, those that tell most first.

    A pair of values for each path; a path that only one of the two has is left out.
    """
    paths = [path for path, (mark, _) in other.items() if path in reference and reference[path][0] != mark]
    paths.sort(key=lambda path: (reference[path][0].partition(" ")[0], path.count(".") + path.count("[")))
    return {path: (reference[path][1], other[path][1]) for path in paths}
