"""The profile of a script as a file, so that a prediction can be made elsewhere and later.

::

    {"schema": "lockstep-profile", "version": 1, "step": {...}, "link": {...} or null}

``step`` has the fields of `StepProfile` and ``link`` those of `LinkProfile`, under their names. A field may be added
under the same version; a reader leaves out what it does not know. What is there keeps its name and unit as long as the
version stays.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from lockstep.errors import DataError
from lockstep.records import from_known, read_object
from lockstep.scale.step_profile import GradientReady, LinkProfile, StepProfile, Timing
from lockstep.small_files import replace_text

SCHEMA, VERSION = "lockstep-profile", 1

T = TypeVar("T", StepProfile, LinkProfile, Timing, GradientReady)


def write_profile(path: Path, step: StepProfile, link: LinkProfile | None = None) -> None:
    """Write both to ``path``, as JSON, completely or not at all."""
    content = {
        "schema": SCHEMA,
        "version": VERSION,
        "step": asdict(step),
        "link": None if link is None else asdict(link),
    }
    replace_text(path, json.dumps(content, indent=1) + "\n")


def read_profile(path: Path) -> tuple[StepProfile, LinkProfile | None]:
    """What `write_profile` has written, of this version.

    Raises:
        DataError: if ``path`` holds something else, or a newer version.
        OSError: if it cannot be read.
    """
    try:
        content = read_object(path)
        if content.get("schema") != SCHEMA:
            raise DataError(f"{path} is no profile of a script; lockstep bench --profile FILE writes one")
        if content["version"] != VERSION:
            raise DataError(
                f"{path} has version {content['version']} and this is of version {VERSION}: measure the script again"
            )
        step, link = content["step"], content["link"]
        profile = from_known(StepProfile, step)
        _check_step(profile)
        if link is None:
            return profile, None
        measured = from_known(LinkProfile, link)
        _check_link(measured)
        return profile, measured
    except (ValueError, KeyError) as error:
        raise DataError(f"{path} is no whole profile of a script: {error!r}") from error


def _check_step(profile: StepProfile) -> None:
    """Raises ValueError for what no measurement can be."""
    sizes = (profile.global_batch, profile.micro_batch, profile.micro_batches, profile.steps)
    timings = (profile.data, profile.forward, profile.backward, profile.optimizer, profile.other)
    seconds = [s for timing in timings for s in (timing.median_s, timing.p10_s, timing.p90_s)]
    seconds += [gradient.ready_s for gradient in profile.gradients]
    if min(sizes) < 1 or not all(0 <= s < math.inf for s in seconds) or not profile.forward.median_s > 0:
        raise ValueError(
            "batches and steps must be at least 1, durations at least 0, and that of a forward pass above 0"
        )


def _check_link(profile: LinkProfile) -> None:
    """Raises ValueError for what no measurement can be."""
    sizes, seconds = profile.bytes, profile.seconds
    if profile.ranks < 2 or not sizes or len(sizes) != len(seconds) or list(sizes) != sorted(set(sizes)):
        raise ValueError("a link must have two ranks or more, and a duration for each of its sizes, which must ascend")
    if not all(0 < s < math.inf for s in (*sizes, *seconds)):
        raise ValueError("sizes and durations of a link must be above 0")
