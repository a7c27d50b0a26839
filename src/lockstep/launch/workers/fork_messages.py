"""The messages between the launcher and its fork server, as values and as lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RankSpec:
    """One rank to start."""

    rank: int
    env: Mapping[str, str]  #: what differs from the fork server's own environment
    log: str


@dataclass(frozen=True, slots=True)
class RankExited:
    """A rank's process has ended."""

    rank: int
    status: int  #: exit code, or minus the signal that killed it
    at_s: float  #: on the host's monotonic clock


@dataclass(frozen=True, slots=True)
class ForkUnavailable:
    """The fork server will start ranks as separate Python processes, though it was to fork them."""

    why: str


@dataclass(frozen=True, slots=True)
class ForkServerDied:
    """The fork server has ended, and its ranks with it."""

    status: int | None  #: exit code, or minus the signal that killed it; None: it lives on without its connection
    why: str = ""  #: the error by which it ended, in one line; "" if it had no time to tell


@dataclass(frozen=True, slots=True)
class StoreExited:
    """The store where the ranks meet has ended, unasked."""

    status: int  #: exit code, or minus the signal that killed it
    at_s: float  #: on the host's monotonic clock


@dataclass(frozen=True, slots=True)
class StoreUnused:
    """The ranks of this node have ended, and no rank has ever written to the store where they could meet."""


@dataclass(frozen=True, slots=True)
class LeaseExpired:
    """The launcher has not renewed the lease of its ranks, so they were killed."""


@dataclass(frozen=True, slots=True)
class Started:
    """A process of a generation has started."""

    process: int
    rank: int | None  #: None: it is the store


@dataclass(frozen=True, slots=True)
class LastWords:
    """The fork server ends because of an error."""

    why: str  #: the error, in one line


@dataclass(frozen=True, slots=True)
class OrderReceived:
    """The fork server is about to carry out this order, and has carried out those before it."""

    number: int


Event = RankExited | ForkUnavailable | ForkServerDied | StoreExited | StoreUnused | LeaseExpired
_EVENTS: Mapping[str, type[Event | Started | OrderReceived | LastWords]] = {
    "rank-exited": RankExited,
    "fork-unavailable": ForkUnavailable,
    "store-exited": StoreExited,
    "store-unused": StoreUnused,
    "lease-expired": LeaseExpired,
    "started": Started,
    "order-received": OrderReceived,
    "last-words": LastWords,
}


def message(**fields: object) -> bytes:
    """One message, as a line."""
    return json.dumps(fields).encode() + b"\n"


def event_from(line: bytes) -> Event | Started | OrderReceived | LastWords:
    """The event that the fork server has sent as ``line``."""
    fields: dict[str, Any] = json.loads(line)
    return _EVENTS[fields.pop("event")](**fields)
