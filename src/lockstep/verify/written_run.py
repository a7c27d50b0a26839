"""One way to run a script, carried out: what its ranks wrote down, and what its lines read of their surroundings."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from lockstep.errors import SettingError
from lockstep.formatting import duration
from lockstep.launch import Failure, Module, QuietEnd, QuietRun, Script
from lockstep.launch_contract import EXIT_OK, TRANSCRIPT
from lockstep.records import JsonRecord
from lockstep.transcript import Transcript, TranscriptRequest
from lockstep.verify.surroundings import DIRECTORY, reads_in
from lockstep.verify.way import HASHES, Way

SURROUNDINGS: Final = "LOCKSTEP_VERIFY"  #: the environment variable with a `SurroundingsRequest`
_PROCESS: Final = "lockstep.verify.script_process"


@dataclass(frozen=True, slots=True)
class SurroundingsRequest(JsonRecord):
    """What the process of a script does beside running it."""

    file: str  #: where it notes what lines of the script read
    shifted: tuple[str, ...] = ()
    is_module: bool = False
    is_plain: bool = False  #: whether the script does without `Run`, and torch's calls are written down


@dataclass(frozen=True, slots=True)
class VerifiedScript:
    """What is verified."""

    program: Script | Module
    is_plain: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)  #: over those of the script
    time_limit_s: float = 900.0  #: of each run


@dataclass(frozen=True, slots=True)
class WrittenRun:
    """What is known of a run."""

    transcript: Transcript
    end: QuietEnd
    took_s: float
    reads: tuple[tuple[str, str, int], ...]  #: kind, file and line

    @property
    def failure(self) -> Failure | None:
        """What failed first, if a rank has said so."""
        return self.end.failure


def carry_out(script: VerifiedScript, way: Way, request: TranscriptRequest, place: Path) -> WrittenRun:
    """Run the script in one ``way``, with its files in ``place``, which is removed again.

    A run that is killed on purpose and goes on counts as one.
    """
    began = time.monotonic()
    place.mkdir(parents=True)
    try:
        reads = place / "reads"
        reads.touch()
        if way.killed_after is None:
            end, transcript = _start(script, way, request, place, "transcript")
        else:
            before = replace(request, kill_after=way.killed_after)
            end, transcript = _start(script, way, before, place, "before")
            if end.code not in (None, EXIT_OK) and (end.failure is None or end.failure.collateral):
                first = transcript
                end, transcript = _start(script, replace(way, ranks=way.resumed_on), request, place, "after")
                if script.is_plain:  # which counts its steps from 0 again
                    transcript.about = first.about | transcript.about
                else:
                    transcript = first.followed_by(transcript)
            elif end.code == EXIT_OK and not script.is_plain:
                end = QuietEnd(None, f"the script ended before step {way.killed_after + 1}, so it was not killed")
        noted = tuple(reads_in(reads.read_text(encoding="utf-8")))
        return WrittenRun(transcript, end, time.monotonic() - began, noted)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _start(
    script: VerifiedScript, way: Way, request: TranscriptRequest, place: Path, name: str
) -> tuple[QuietEnd, Transcript]:
    written = place / name
    written.mkdir()
    surroundings = SurroundingsRequest(
        str(place / "reads"), way.shifted, isinstance(script.program, Module), script.is_plain
    )
    env = {
        TRANSCRIPT: replace(
            request, directory=str(written), evaluates=way.evaluates, saves=way.killed_after is not None
        ).to_text(),
        SURROUNDINGS: surroundings.to_text(),
        **way.variables,
    }
    directory = _mirror(place / "elsewhere") if DIRECTORY in way.shifted else None
    name_of_program = script.program.name
    if isinstance(script.program, Script):
        name_of_program = str(Path(name_of_program).absolute())
    program = Module(_PROCESS, (name_of_program, *script.program.args))
    if script.is_plain:
        end = _start_alone(program, env, directory, script.time_limit_s)
        return end, Transcript.read(written)
    saves = {"checkpoint": str(place / "checkpoints")}
    if way.killed_after is not None:
        saves["save_every"] = f"{way.killed_after} steps"
    run = QuietRun(
        program,
        place / "run",
        way.ranks,
        settings=saves | way.settings(script.settings),
        resume=name == "after",
        env=env,
        directory=directory,
        time_limit_s=script.time_limit_s,
        copied=HASHES not in way.shifted,  # for which Python begins anew
    )
    return run.carry_out(), Transcript.read(written)


def _start_alone(program: Module, env: Mapping[str, str], directory: Path | None, time_limit_s: float) -> QuietEnd:
    """Run a script that does without `Run`, as Python would."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", program.name, *program.args],
            env={**os.environ, **env},
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=time_limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return QuietEnd(None, f"not done after {duration(time_limit_s)}")
    return QuietEnd(done.returncode, (done.stderr.strip().splitlines() or [""])[-1])


def _mirror(place: Path) -> Path:
    """A directory with a link to everything in the working directory: what is read by a relative path is found."""
    if not place.exists():
        place.mkdir()
        try:
            for entry in Path.cwd().iterdir():
                (place / entry.name).symlink_to(entry)
        except OSError as error:
            raise SettingError(f"the working directory {Path.cwd()} cannot be listed: {error}") from error
    return place
