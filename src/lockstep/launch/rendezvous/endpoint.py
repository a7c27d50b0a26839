"""The host and port where the nodes of a job meet."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
from dataclasses import dataclass
from typing import Any, Self

from lockstep.errors import SettingError
from lockstep.launch.host import holder_of


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
        for family, kind, _, _, address in self.addresses():
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((address[0], 0))
                except OSError:
                    continue  # an address of another host
            try:
                return listen(family, self._bound_to(family, address))
            except OSError as error:
                holder = holder_of(self.port) if error.errno == errno.EADDRINUSE else None
                if holder is not None and "lockstep" not in holder[1]:
                    raise SettingError(
                        f"port {self.port} of this machine is used by process {holder[0]} ({holder[1]:.60}); "
                        f"give another one to all nodes: --rdzv-endpoint {str(self).rpartition(':')[0]}:PORT"
                    ) from error
                return None
        return None

    def _bound_to(self, family: int, address: tuple[Any, ...]) -> tuple[Any, ...]:
        """Where to listen: at that address only, unless its name stands for the network elsewhere."""
        loopback = ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback
        if not loopback or self.host in ("localhost", "127.0.0.1", "::1"):
            return address
        return ("::" if family == socket.AF_INET6 else "", self.port)

    def local_address(self) -> str:
        """This host's own address on the route to the endpoint; "" if there is no route."""
        with contextlib.suppress(SettingError):
            for family, _, _, _, address in self.addresses():
                with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                    probe.connect(address)
                    return str(probe.getsockname()[0])
        return ""


def listen(family: int, address: tuple[Any, ...]) -> socket.socket:
    """A socket that listens at ``address``: at all addresses of both families for ``::``.

    Raises:
        OSError: if it is used, or not of this host.
    """
    both = address[0] == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(address, family=family, backlog=1024, dualstack_ipv6=both)
