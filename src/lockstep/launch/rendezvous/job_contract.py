"""What the nodes of a job must have in common, and the secret by which they know each other.

Signed are the values that nodes write to their store, so that values of other processes are ignored.

    run directory/.secret, only its user's  ──►  Signature  ──►  "9f86d081... {"number": 3, ...}"
    LOCKSTEP_SECRET, where that is set      ─┘

A value that is not signed by a launcher of this run is no value. A signature covers the key, so that one value cannot
stand for another, and the launch, named after its coordinator, so that none of an earlier launch, which has had the
same secret, stands for one of this. What reads them takes no number that is smaller than one it has seen.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal, Self

from lockstep.errors import SettingError
from lockstep.records import JsonRecord, from_known, object_from, read_bytes

#: In the run directory: the node id of the coordinator of the newest launch.
COORDINATOR_FILE: Final = ".coordinator"
#: The environment variable that may hold the secret.
SECRET = "LOCKSTEP_SECRET"
#: Its file in the run directory.
SECRET_FILE = ".secret"
_BYTES = 32
#: In the environment; fewer could be found by trying.
FEWEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class JobContract(JsonRecord):
    """What must be equal on all nodes of a job, and what the others take over from the coordinator."""

    coordinator: str  #: its node id
    host: str  #: of the coordinator
    must_match: Mapping[str, str]  #: versions, program and settings, by name
    run_dir: str
    begins: Literal["new", "resume", "fresh"]
    generation: int  #: the first one
    term: int = 0  #: of the coordinator's lease; 0: nobody takes over from it
    #: What may differ between nodes, but seldom does for a reason: variables of torch, NCCL and gloo.
    variables: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_text(cls, text: str | bytes) -> Self:
        """The contract in ``text``.

        Raises:
            ValueError: if it is something else.
        """
        values = object_from(text if isinstance(text, str) else text.decode(errors="replace"))
        if not isinstance(values.get("must_match"), dict):
            raise ValueError(f"no contract of a job: {text!r:.80}")
        return from_known(cls, values)


def version_in(text: str | bytes) -> str:
    """The version of Lockstep that wrote the contract ``text``, whatever else it says; "" if it does not say.

    Raises:
        ValueError: if it is no contract.
    """
    must_match = object_from(text if isinstance(text, str) else text.decode(errors="replace")).get("must_match")
    version = must_match.get("lockstep") if isinstance(must_match, dict) else None
    return version if isinstance(version, str) else ""


def differences(ours: Mapping[str, str], host: str, theirs: Mapping[str, str], their_host: str) -> list[str]:
    """Where this node differs from the coordinator, such as ``torch is 2.11 on n2, 2.12 on n1``."""
    return [
        f"{name} is {ours.get(name, 'none')} on {host}, {theirs.get(name, 'none')} on {their_host}"
        for name in sorted({*ours, *theirs})
        if ours.get(name) != theirs.get(name)
    ]


def is_newest_coordinator(run_dir: Path, node_id: str) -> bool:
    """Whether the newest launch in ``run_dir`` is that of the coordinator ``node_id``, as far as this node sees."""
    try:
        return read_bytes(run_dir / COORDINATOR_FILE) == node_id.encode("ascii")
    except (OSError, ValueError):
        return False


@dataclass(frozen=True, slots=True)
class Signature:
    """What only launchers of one run can write under a value."""

    secret: bytes
    launch: str = ""  #: the id of the coordinator whose launch it is; "": of none yet, and no value is signed with it

    def __repr__(self) -> str:
        return "Signature(...)"

    def of_launch(self, coordinator: str) -> Signature:
        """The same for the launch of that ``coordinator`` alone: what others have signed is not signed."""
        return replace(self, launch=coordinator)

    def sign(self, key: str, text: str) -> str:
        """``text`` as it is written to the store under ``key``."""
        return f"{self._mark(key, text)} {text}"

    def text_of(self, key: str, value: str | bytes) -> str:
        """What `sign` was given.

        Raises:
            ValueError: if another secret, or none, has signed the ``value`` that is under ``key``.
        """
        # Late: it loads a library of some megabytes, which launchers of one machine do without.
        import hmac

        mark, _, text = (value if isinstance(value, str) else value.decode(errors="replace")).partition(" ")
        if not hmac.compare_digest(mark.encode(), self._mark(key, text).encode()):
            raise ValueError(f"the value of {key} in the store is not signed by a launcher of this run")
        return text

    def _mark(self, key: str, text: str) -> str:
        import hmac

        return hmac.new(self.secret, f"{self.launch}\n{key}\n{text}".encode(errors="replace"), "sha256").hexdigest()


def make_signature(run_dir: Path, env: Mapping[str, str]) -> Signature:
    """The signature of the run in ``run_dir``, for its coordinator; its secret is made where there is none.

    Raises:
        SettingError: if somebody else may read the secret that is there, or it is too short.
        OSError: if the secret cannot be written.
    """
    if SECRET not in env:
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(run_dir / SECRET_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(os.urandom(_BYTES))
    return read_signature(run_dir, env)


def read_signature(run_dir: Path, env: Mapping[str, str]) -> Signature:
    """The signature of the run in ``run_dir``.

    Raises:
        SettingError: if there is none, it is too short, or somebody else may read or write it.
    """
    if SECRET in env:
        import hashlib

        given = env[SECRET].encode(errors="surrogateescape")
        if len(given.strip()) < FEWEST_BYTES:
            raise SettingError(
                f"{SECRET} has {len(given.strip())} bytes; give at least {FEWEST_BYTES} that nobody can guess, such as "
                "those of: openssl rand -hex 32"
            )
        return Signature(hashlib.sha256(given).digest())
    path = run_dir / SECRET_FILE
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            about = os.fstat(file.fileno())
            content = file.read(_BYTES + 1)
    except OSError as error:
        raise SettingError(
            f"the secret of this run, {path}, cannot be read: {error.strerror}; the launchers of all nodes need it: "
            f"the same user on each, or the same {SECRET} in the environment of each"
        ) from error
    private = stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid() and not about.st_mode & 0o077
    if not private or len(content) != _BYTES:
        raise SettingError(
            f"{path} is not the secret of this run: it must be a file of {_BYTES} bytes that only its user can read "
            f"(chmod 600); remove it and start again, or set {SECRET} in the environment of each node"
        )
    return Signature(content)
