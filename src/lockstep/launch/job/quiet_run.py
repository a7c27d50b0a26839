"""One run of the user's script beside others, through the launcher like any other: what it prints goes nowhere."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from lockstep.errors import LaunchError, LockstepError
from lockstep.formatting import duration
from lockstep.launch.diagnosis.error_record import Failure, first_failure
from lockstep.launch.host.child_process import die_with_parent
from lockstep.launch.job.request import Module, Request, Script
from lockstep.launch.launcher import watch
from lockstep.launch_contract import BARE, EXIT_FAILED, EXIT_USAGE, STOP_SIGNALS

_LAST_LINES = 3  # of the launcher, where no rank has said why it failed


@dataclass(frozen=True, slots=True)
class QuietRun:
    """What to start on this machine. No tracker is told, and nothing is saved unless ``settings`` say so."""

    program: Script | Module
    run_dir: Path
    ranks: int = 1
    settings: Mapping[str, str] = field(default_factory=dict)  #: over those of the script
    resume: bool = False
    env: Mapping[str, str] = field(default_factory=dict)  #: more variables
    directory: Path | None = None  #: to work in; None: that of this process
    time_limit_s: float = 900.0  #: then it is ended
    #: Whether launcher and ranks are copies of this process, which has imported torch already and has no other threads:
    #: seconds of imports less. They have its hash seed.
    copied: bool = False

    def carry_out(self) -> QuietEnd:
        """Start the run and wait for its end. Nothing of it goes on when this returns or raises."""
        if self.copied:
            code, said = self._by_copy()
        else:
            code, said = launch_quietly(self._options(), self._environment(), self.time_limit_s, self.directory)
        return QuietEnd.of(self.run_dir, code, said, self.time_limit_s)

    def _by_copy(self) -> tuple[int | None, str]:
        said = self.run_dir.with_suffix(".txt")
        process = multiprocessing.get_context("fork").Process(target=self._be_launcher, args=(said, os.getpid()))
        with warnings.catch_warnings():
            # Python warns of other threads, such as those of a test runner; the copy does not use them.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        try:
            process.join(self.time_limit_s)
        finally:
            if process.exitcode is None:
                process.terminate()
                process.join()
                code = None
            else:
                code = process.exitcode
            process.close()
        return code, said.read_text(encoding="utf-8", errors="replace") if said.exists() else ""

    def _be_launcher(self, said: Path, parent: int) -> NoReturn:
        """The process that starts and watches the ranks; it exits as ``lockstep run`` does."""
        die_with_parent(parent)
        os.setsid()
        for signum in STOP_SIGNALS:
            signal.signal(signum, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(self._environment())
        for descriptor, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY)):
            os.dup2(os.open(os.devnull, mode), descriptor)
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        request = Request(
            self.program,
            nproc_per_node=self.ranks,
            run_dir=str(self.run_dir),
            resume=self.resume,
            settings=self._all_settings(),
            start_method="copy",
            everywhere=False,
        )
        try:
            if self.directory is not None:
                os.chdir(self.directory)
            code, why = watch(request, lambda exits, generation: False)
        except LockstepError as error:
            code, why = EXIT_FAILED if isinstance(error, LaunchError) else EXIT_USAGE, str(error)
        os.write(2, f"{why}\n".encode())
        os._exit(code)

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "LOCKSTEP_VIEW": "silent", **self.env}

    def _all_settings(self) -> dict[str, str]:
        return {"track": "none", "save_every": "none", **self.settings}

    def _options(self) -> list[str]:
        words = [word for name, value in self._all_settings().items() for word in ("--set", f"{name}={value}")]
        module = ["-m"] if isinstance(self.program, Module) else []
        ranks = ["--standalone", "--nproc-per-node", str(self.ranks), "--run-dir", str(self.run_dir)]
        ranks += ["--resume"] if self.resume else []
        return [*ranks, *words, *module, self.program.name, *self.program.args]


def launch_quietly(
    options: Sequence[str], env: Mapping[str, str], time_limit_s: float, directory: Path | None = None
) -> tuple[int | None, str]:
    """Carry out ``lockstep run`` with ``options``: its exit code, None if its time was over, and what it said itself.

    What its ranks print goes nowhere. When this returns or raises, none of its processes is left.

    Args:
        options: as on the command line, with the program at their end.
        env: all variables of the environment.
        time_limit_s: seconds; then it is ended.
        directory: to work in; None: that of this process.
    """
    with subprocess.Popen(
        [sys.executable, "-m", "lockstep", "run", *options],
        env={**env, BARE: "1"},
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as launcher:
        try:
            _, said = launcher.communicate(timeout=time_limit_s)
        except BaseException as error:
            # Not killed: it has ranks to end.
            launcher.terminate()
            _, said = launcher.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                return None, said
            raise
    return launcher.returncode, said


@dataclass(frozen=True, slots=True)
class QuietEnd:
    """How such a run has ended."""

    code: int | None  #: the launcher's; None: it was ended after its time limit
    said: str  #: the last of what the launcher said
    failure: Failure | None = None  #: what failed first, if a rank has said so

    @classmethod
    def of(cls, run_dir: Path, code: int | None, said: str, time_limit_s: float) -> QuietEnd:
        """That of a run in ``run_dir`` whose launcher ended with ``code`` and has ``said`` something."""
        if code is None:
            return cls(None, f"not done after {duration(time_limit_s)}")
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        last = " ".join(lines[-_LAST_LINES:]).removeprefix("lockstep run: ")
        return cls(code, last, first_failure(run_dir) if code else None)

    @property
    def cause(self) -> str:
        """Why it failed, in one line."""
        if self.failure is not None:
            first_line = self.failure.message.partition("\n")[0]
            return f"rank {self.failure.rank}: {self.failure.kind.rpartition('.')[2]}: {first_line}"
        return self.said or f"exit code {self.code}"
