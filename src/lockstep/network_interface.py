"""Which of this host's addresses and network interfaces leads to another host.

A host may have several: a network for management beside a fast one, bridges of containers with the same address on
every host, two families. And its own name may stand for its loopback, as on Debian: ``127.0.1.1 n1`` in ``/etc/hosts``.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from typing import Any, Final

#: Variables that name the network interface of torch's CPU backends. Gloo takes its first address, IPv4 before IPv6.
INTERFACES: Final = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_IP = (socket.AF_INET, socket.AF_INET6)


def address_towards(host: str, port: int) -> str:
    """This host's own address on the route to ``host``; "" if there is no route. Nothing is sent."""
    with contextlib.suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                return own_address(probe)
    return ""


def own_address(connected: socket.socket) -> str:
    """The address of this end of a socket; one that holds on one network only with its zone, ``fe80::1%eth0``."""
    return _with_zone(connected.getsockname())


def far_address(connected: socket.socket) -> str:
    """The address of the other end, in the same way."""
    return _with_zone(connected.getpeername())


def _with_zone(of_socket: tuple[Any, ...]) -> str:
    address, _, *rest = of_socket
    return f"{address}%{socket.if_indextoname(rest[1])}" if rest and rest[1] else str(address)


def interface_of(address: str) -> str:
    """The name of the network interface that has this IPv4 or IPv6 ``address``; "" if none has, or there is none."""
    # Late, for most commands do without it.
    import psutil

    if not address:
        return ""
    host = plain_address(address)
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.family in _IP and plain_address(each.address) == host for each in addresses):
            return str(name)
    return ""


def address_of(interface: str) -> str:
    """The address of this network interface that gloo takes: IPv4 before IPv6; "" if it has none, or is not there."""
    import psutil

    found = [each for each in psutil.net_if_addrs().get(interface, ()) if each.family in _IP]
    # Of IPv6, one that holds on this network only comes last: elsewhere the interface may have another name.
    found.sort(key=lambda each: (_IP.index(each.family), "%" in each.address))
    return str(found[0].address) if found else ""


def own_addresses() -> tuple[str, ...]:
    """The IPv4 and IPv6 addresses of this host, as `plain_address` spells them, but for those of its loopback."""
    import psutil

    every = (each.address for found in psutil.net_if_addrs().values() for each in found if each.family in _IP)
    return tuple(dict.fromkeys(plain_address(address) for address in every if not is_loopback(address)))


def is_loopback(address: str) -> bool:
    """Whether only this host can reach this IPv4 or IPv6 ``address``; of none ("") that is true, too."""
    return not address or ipaddress.ip_address(plain_address(address)).is_loopback


def plain_address(address: str) -> str:
    """The one spelling of an IP address: ``fe80::1%eth0`` as ``fe80::1``, ``::ffff:10.0.0.1`` as ``10.0.0.1``."""
    plain = ipaddress.ip_address(address.partition("%")[0])
    return str(getattr(plain, "ipv4_mapped", None) or plain)
