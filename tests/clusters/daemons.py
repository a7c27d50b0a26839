"""Daemons of a scheduler of our own, on hosts of their own (see `benchmarks/hosts.py`), in a directory of their own.

They need root, for only then do they start jobs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hosts import Hosts, hosts, why_not

#: Longer than any command takes on a busy machine; one of them is salloc, which waits for nodes and runs a script.
COMMAND_TIMEOUT_S = 600

#: Of a job in which the tests may run: none of it reaches the daemons, from which jobs inherit.
FOREIGN = ("SGE_", "SLURM_", "LOCKSTEP_")


@dataclass(frozen=True)
class Kind:
    """A scheduler, and how to have one of our own."""

    title: str
    hosts: int  #: n1, n2...
    login: str  #: the host where commands are given
    programs: tuple[str, ...]  #: what must be installed
    files: tuple[Path, ...]  #: likewise
    logs: tuple[str, ...]  #: patterns of the files that its daemons write
    env: Callable[[Path], dict[str, str]]  #: by which commands and daemons of a directory find each other
    start: Callable[[Daemons], None]  #: returns when jobs can be submitted

    def missing(self) -> list[str]:
        """What this machine lacks for it; nothing, if it can have one."""
        absent = [name for name in self.programs if shutil.which(name) is None]
        absent += [str(file) for file in self.files if not file.exists()]
        return absent or [why for why in [why_not()] if why]

    @contextlib.contextmanager
    def running(self, here: Path) -> Iterator[Daemons]:
        """Daemons that take jobs; they and all that they have started end with their hosts."""
        with hosts(self.hosts) as machines:
            daemons = Daemons(self, here, machines)
            self.start(daemons)
            yield daemons


@dataclass(frozen=True)
class Daemons:
    """The daemons of a directory; commands for them are given with `__call__`."""

    kind: Kind
    here: Path
    machines: Hosts

    def __call__(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Give a command, such as ``slurm("squeue")`` or ``engine("qstat")``."""
        given = self.machines[self.kind.login].start(
            words,
            cwd=self.here,
            env={**os.environ, **self.kind.env(self.here), **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        out, err = given.communicate(timeout=COMMAND_TIMEOUT_S)
        return subprocess.CompletedProcess(words, given.returncode, out, err)

    def must(self, *words: str) -> str:
        """As `__call__`; what it printed. It must succeed."""
        done = self(*words)
        assert done.returncode == 0, f"{words}: {done}"
        return done.stdout

    def daemon(self, host: str, *words: str, **env: str) -> None:
        """Start one of the daemons."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        with (self.here / f"{Path(words[0]).name}-{host}.out").open("w") as out:
            self.machines[host].start(
                words, cwd=self.here, env={**inherited, **self.kind.env(self.here), **env}, stdout=out, stderr=out
            )

    def logs(self) -> str:
        """The end of what each daemon wrote."""
        files = [file for pattern in ("*.out", *self.kind.logs) for file in sorted(self.here.glob(pattern))]
        return "\n".join(f"{file.relative_to(self.here)}: {file.read_text()[-2000:]}" for file in files)
