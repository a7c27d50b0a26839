"""A connection to the store where the nodes of a job meet, and what a node reads there before it takes part."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol, TypeVar, cast

from lockstep.errors import LaunchError, SettingError
from lockstep.launch.host.timed_calls import StoppedWaiting, TaskThread, done_within
from lockstep.launch.rendezvous.endpoint import Endpoint
from lockstep.launch.rendezvous.job_contract import JobContract, Signature, version_in
from lockstep.network_interface import far_address

T = TypeVar("T")

#: The environment variable from which torch reads how much its C++ code writes.
LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
_CONNECT_S = 2.0
_ANSWER_S = 5.0
_TICK_S = 0.1
#: The key under which nodes say that they cannot take part.
REFUSED = "refused"
_MOST_REFUSED, _REFUSAL_SIGNS = 8, 400
_WAIT_NOTICE_S = (3.0, 60.0)


class ReachedHost:
    """By which address an endpoint was reached last; "": it was not yet."""

    def __init__(self) -> None:
        self.address = ""


class ConnectedStore(Protocol):
    """What the launcher uses of torch's TCPStore, whose own types know only a part of it."""

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""

    def append(self, key: str, value: str, /) -> None:
        """Write ``value`` behind what is there."""

    def get(self, key: str, /) -> bytes:
        """Read a value; waits for one."""

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Read several values in one exchange; waits for all of them."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all of the keys are there; does not wait."""


def open_store(endpoint: Endpoint, reached: ReachedHost | None = None) -> ConnectedStore:
    """A connection to the store at ``endpoint``, or, while its name cannot be resolved, where it was ``reached`` last.

    Raises:
        OSError: if the endpoint cannot be reached.
        RuntimeError: if what listens there is no such store.
    """
    # First with a plain socket: torch would try for long, and write about each try.
    try:
        connection = socket.create_connection((endpoint.host, endpoint.port), _CONNECT_S)
    except socket.gaierror:
        if reached is None or not reached.address:
            raise
        connection = socket.create_connection((reached.address, endpoint.port), _CONNECT_S)
    with connection:
        address = far_address(connection)
    if reached is not None:
        reached.address = address
    make_store = _tcp_store_class()
    return make_store(
        address,
        endpoint.port,
        world_size=None,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=_ANSWER_S),
    )


def ask_store(endpoint: Endpoint, ask: Callable[[ConnectedStore], T], stopped: Callable[[], bool] = lambda: False) -> T:
    """What ``ask`` returns for the store at ``endpoint``, once it is connected.

    Once torch is loaded it takes some seconds at most, also where who listens does not answer: torch waits for ever
    then, in a thread that is left behind.

    Raises:
        OSError: if the endpoint cannot be reached, or does not answer.
        RuntimeError: if what listens there is no such store.
        StoppedWaiting: if ``stopped``.
    """
    thread = TaskThread("lockstep store connection")
    # Which may take longer than any answer, on a busy machine.
    loaded = thread.start(_tcp_store_class)
    asked = thread.start(lambda: ask(open_store(endpoint)))
    thread.close()
    end_s = float("inf")
    while not done_within(asked, _TICK_S):
        if stopped():
            raise StoppedWaiting
        if end_s == float("inf") and loaded.done():
            end_s = time.monotonic() + _CONNECT_S + _ANSWER_S
        if time.monotonic() > end_s:
            raise TimeoutError(f"what listens at {endpoint} does not answer")
    return asked.result()


def _tcp_store_class() -> Callable[..., ConnectedStore]:
    """Torch's TCPStore, imported so that it writes errors only: it would warn of names that it need not resolve."""
    before = os.environ.get(LOG_LEVEL)
    os.environ.setdefault(LOG_LEVEL, "ERROR")
    try:
        # Imported late, so that the launcher of one machine does not load torch.
        from torch._C._distributed_c10d import TCPStore  # as torch.distributed hands it on, with types

        return cast("Callable[..., ConnectedStore]", TCPStore)
    finally:
        if before is None:
            del os.environ[LOG_LEVEL]


def tell_refused(endpoint: Endpoint, why: str) -> None:
    """Tell the coordinator at ``endpoint``, as far as it answers, why this node does not take part in its job."""
    with contextlib.suppress(OSError, RuntimeError):
        ask_store(endpoint, lambda store: store.append(REFUSED, f"{socket.gethostname()}: {' '.join(why.split())}\n"))


def refusals(store: ConnectedStore) -> tuple[str, ...]:
    """What nodes have told with `tell_refused`.

    They may lack the secret of the run, so this is not signed: it is shown, as plain text of bounded length, and
    decides nothing.
    """
    if not store.check([REFUSED]):
        return ()
    lines = store.get(REFUSED)[: _MOST_REFUSED * _REFUSAL_SIGNS].decode(errors="replace").splitlines()
    plain = ("".join(sign for sign in line[:_REFUSAL_SIGNS] if sign.isprintable()) for line in lines)
    return tuple(dict.fromkeys(plain))[:_MOST_REFUSED]


def read_contract(
    endpoint: Endpoint,
    sign: Callable[[JobContract], Signature],
    *,
    version: str,
    within_s: float,
    say: Callable[[str], None],
    stopped: Callable[[], bool],
) -> tuple[JobContract, Signature]:
    """The contract in the store at ``endpoint``, once there is one, and the signature that it bears.

    Args:
        endpoint: where the store listens.
        sign: finds the signature of the run that a contract speaks of; the contract is not trusted before that.
        version: of this launcher; a contract of another one is not read further.
        within_s: how long to wait.
        say: tells the user what is waited for.
        stopped: whether the user asks for the end.

    Raises:
        LaunchError: if there is none within ``within_s``, or something else listens there.
        SettingError: if the launcher there is of another version.
        StoppedWaiting: if ``stopped``.
    """
    start_s = time.monotonic()
    next_notice_s, host = _WAIT_NOTICE_S[0], socket.gethostname()
    why = ""
    while not stopped():
        waited_s = time.monotonic() - start_s
        if waited_s >= within_s:
            raise LaunchError(
                f"node {host} found no store of this job at {endpoint} within {waited_s:.0f} s ({why}); start "
                f"lockstep run on {endpoint.host} too, and see that no firewall closes port {endpoint.port}"
            )
        if waited_s >= next_notice_s:
            say(f"waiting for {endpoint}, where the nodes meet: {why} ({waited_s:.0f} s)")
            next_notice_s = min(2 * next_notice_s, next_notice_s + _WAIT_NOTICE_S[1])
        try:
            value = ask_store(endpoint, lambda store: store.get("contract"), stopped)
            _, _, text = value.decode(errors="replace").partition(" ")
            if (theirs := version_in(text)) != version:
                raise SettingError(
                    f"this node cannot take part in the job at {endpoint}: lockstep is {version} on {host}, "
                    f"{theirs or 'another one'} there; install the same version on both"
                )
            signature = sign(JobContract.from_text(text))
            return JobContract.from_text(signature.text_of("contract", value)), signature
        except (SettingError, StoppedWaiting):
            raise
        except OSError as error:
            why = error.strerror or str(error) or type(error).__name__
        except (RuntimeError, ValueError) as error:
            why = f"something else may use the port: {str(error).splitlines()[0]}"
        time.sleep(_TICK_S)
    raise StoppedWaiting
