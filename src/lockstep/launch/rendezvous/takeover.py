"""A node's part in taking over from a lost coordinator: keeps its lease, or watches that of another one.

Called from the agent's loop, which never waits for the file system: see `FileThread`. What is decided, and why no two
worlds train at once, is in `lease`.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from lockstep.launch.host.timed_calls import FileThread
from lockstep.launch.rendezvous.endpoint import Endpoint
from lockstep.launch.rendezvous.lease import Lease, LeaseFiles, follower_acts, holder_acts
from lockstep.launch.timeouts import NodeTimeouts, Silence

#: A lease that has not changed in so many looks is nobody's.
_LOOKS = 4


@dataclass(frozen=True, slots=True)
class NewCoordinator:
    """The job has another coordinator now."""

    lease: Lease
    listening: socket.socket | None  #: where this node serves the others; None: it is not the new coordinator


Duty = Literal["go on", "suspend"]


class Takeover:
    """What a node does so that the job survives the loss of its coordinator: this one waits for it."""

    def poll(self, silent_s: float, *, running: bool) -> Duty | NewCoordinator:
        """To be called often; ``suspend``: end the ranks, and decide nothing.

        Args:
            silent_s: for how long the coordinator has not been heard.
            running: whether ranks of this node live.
        """
        return "go on"

    def leave(self) -> None:
        """This node leaves a job that goes on; no rank of its last generation lives, on any node."""


class LeaseHolder(Takeover):
    """The coordinator's part: it renews its lease.

    Args:
        lease: which it holds.
        claimed_s: when it began to make it.
        directory: of the leases.
        times: of the job.
        files: makes the calls to the file system.
    """

    def __init__(
        self, lease: Lease, claimed_s: float, directory: LeaseFiles, times: NodeTimeouts, files: FileThread
    ) -> None:
        self._lease, self._renewed_s, self._directory, self._times, self._files = (
            lease,
            claimed_s,
            directory,
            times,
            files,
        )
        self._next_s = 0.0

    def poll(self, silent_s: float, *, running: bool) -> Duty | NewCoordinator:
        """Renew the lease when it is time."""
        now_s = time.monotonic()
        newest = None
        # A node that was stopped looks before it does anything else.
        if now_s >= self._next_s or now_s - self._renewed_s >= self._times.lost_after_s:
            self._next_s = now_s + self._times.every_s
            self._lease = replace(self._lease, beat=self._lease.beat + 1)
            renew = partial(self._directory.renew, self._lease)
            newest = self._files.ask(renew, None, of=self._directory.path, urgent=running)
            if newest is not None:
                self._renewed_s = now_s
        match holder_acts(self._lease, newest, self._renewed_s, self._times, time.monotonic()):
            case "follow":
                assert newest is not None, "it is followed"
                return NewCoordinator(newest, None)
            case "suspend":
                return "suspend"
            case "lead":
                return "go on"

    def leave(self) -> None:
        """Let another node have the lease at once."""
        renew = partial(self._directory.renew, replace(self._lease, beat=self._lease.beat + 1, left=True))
        self._files.ask(renew, None, of=self._directory.path, urgent=True)


class LeaseFollower(Takeover):
    """The part of a node that is not the coordinator: it watches the lease while it does not hear its holder.

    Args:
        term: tells that of the coordinator that it follows now.
        node_id: of this node.
        host: its name.
        listen: listens for the other nodes on this host.
        directory: of the leases.
        times: of the job.
        files: makes the calls to the file system.
    """

    def __init__(
        self,
        term: Callable[[], int],
        node_id: str,
        host: str,
        listen: Callable[[], socket.socket],
        directory: LeaseFiles,
        times: NodeTimeouts,
        files: FileThread,
    ) -> None:
        self._term, self._node_id, self._host, self._listen = term, node_id, host, listen
        self._directory, self._times, self._files = directory, times, files
        self._seen: Silence[Lease | None] = Silence(None)
        self._next_s = 0.0
        self._listening: socket.socket | None = None

    def poll(self, silent_s: float, *, running: bool) -> Duty | NewCoordinator:
        """Look at the lease; make the next term, or follow another node that has."""
        now_s = time.monotonic()
        if silent_s < self._times.every_s or now_s < self._next_s:
            return "go on"
        self._next_s = now_s + self._times.every_s
        path = self._directory.path
        if (newest := self._files.ask(self._directory.newest, None, of=path)) is None:
            return "go on"
        self._seen = self._seen.after(newest, time.monotonic())
        match follower_acts(self._term(), self._seen, silent_s, running, self._times, now_s):
            case "claim":
                if self._listening is None:
                    self._listening = self._listen()
                endpoint = str(Endpoint(*self._listening.getsockname()[:2]))
                claim = partial(self._directory.claim, self._node_id, self._host, endpoint, after=newest.term)
                # What it made is read the next time, also where that took longer than this call.
                self._files.ask(claim, None, of=path, urgent=True)
                self._next_s = now_s
            case "follow":
                return NewCoordinator(newest, self._listening if newest.node_id == self._node_id else None)
        return "go on"


def living_holder(
    read: Callable[[], Lease | None], times: NodeTimeouts, sleep: Callable[[float], None]
) -> Lease | None:
    """The lease that another launcher keeps now; None if nobody does, which takes some seconds to see.

    ``read`` reads the lease of the highest term.
    """
    first = read()
    for _ in range(_LOOKS if first is not None else 0):
        sleep(times.every_s)
        if (newest := read()) != first:
            return newest
    return None
