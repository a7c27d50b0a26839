"""The host and port where the nodes of a job meet."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from lockstep.errors import SettingError
from lockstep.launch.host.machine import holder_of
from lockstep.network_interface import address_towards, is_loopback, own_address

#: A family, and an address of it as sockets have it.
_Address = tuple[int, tuple[Any, ...]]
_CONNECT_S = 2.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the store of a job listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The endpoint whose text is ``host:port``, or ``[host]:port``."""
        host, _, port = text.rpartition(":")
        return cls(host.strip("[]"), int(port))

    def addresses(self) -> list[tuple[Any, ...]]:
        """The addresses of its host, as `socket.getaddrinfo` gives them.

        Raises:
            SettingError: if the name cannot be resolved here.
        """
        try:
            return socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise SettingError(
                f"cannot resolve '{self.host}' from node {socket.gethostname()} ({error.strerror}); give "
                "--rdzv-endpoint a name or an address that every node knows"
            ) from error

    def claim(self) -> socket.socket | None:
        """A socket that listens at the endpoint; None if it is on another host, or another launcher listens already.

        Raises:
            SettingError: if a program that is not a launcher is seen to use the port.
        """
        own = [(family, address) for family, _, _, _, address in self.addresses() if _is_of_this_host(family, address)]
        if not own:
            return None
        try:
            return listen(*self._listening_at(own))
        except OSError as error:
            holder = holder_of(self.port) if error.errno == errno.EADDRINUSE else None
            if holder is not None and "lockstep" not in holder[1]:
                raise SettingError(
                    f"port {self.port} of this machine is used by process {holder[0]} ({holder[1]:.60}); "
                    f"give another one to all nodes: --rdzv-endpoint {str(self).rpartition(':')[0]}:PORT"
                ) from error
            return None

    def _listening_at(self, own: Sequence[_Address]) -> _Address:
        """Where to listen, if this host has the addresses ``own`` of the endpoint.

        At one address only, so that nobody reaches the store by another network. But a name may stand for several, of
        which other hosts may know or reach one only; and for the loopback, here alone, as on Debian.
        """
        alone = len(own) == 1 and not is_loopback(str(own[0][1][0]))
        if alone or self.host in ("localhost", "127.0.0.1", "::1"):
            return own[0]
        return (socket.AF_INET6, ("::", self.port)) if _has_both_families() else (socket.AF_INET, ("", self.port))

    def note(self) -> str:
        """What the user of this host should know of the endpoint's name here; "" for nothing."""
        name = socket.gethostname()
        if self.host == "localhost" or _short(self.host) == _short(name):
            return ""
        with contextlib.suppress(ValueError):  # it is no address
            ipaddress.ip_address(self.host.partition("%")[0])
            return ""
        if not any(is_loopback(str(address[0])) for *_, address in self.addresses()):
            return ""
        return (
            f"note: on this machine, {name}, the name {self.host} of --rdzv-endpoint stands for the machine itself; if "
            "the nodes are to meet on another one, correct /etc/hosts here, or give an address"
        )

    def local_address(self) -> str:
        """This host's own address on a connection to the endpoint, or on the route where nothing answers; "" for none.

        May take some seconds where nothing answers.
        """
        # Of two families one may lead nowhere, which only a connection shows.
        with contextlib.suppress(OSError), socket.create_connection((self.host, self.port), _CONNECT_S) as connection:
            return own_address(connection)
        return address_towards(self.host, self.port)


def _is_of_this_host(family: int, address: tuple[object, ...]) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            # With the zone of a link-local address, if it has one.
            probe.bind((address[0], 0, *address[2:]))
        except OSError:
            return False
        return True


def _has_both_families() -> bool:
    """Whether a socket may listen at all addresses of both."""
    return socket.has_dualstack_ipv6() and _is_of_this_host(socket.AF_INET6, ("::",))


def _short(host: str) -> str:
    return host.partition(".")[0].lower()


def listen(family: int, address: tuple[object, ...]) -> socket.socket:
    """A socket that listens at ``address``: at all addresses of both families for ``::``.

    Raises:
        OSError: if it is used, or not of this host.
    """
    both = address[0] == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(address, family=family, backlog=1024, dualstack_ipv6=both)
