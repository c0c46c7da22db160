"""Which address of this host the flows between nodes use."""

import fcntl
import os
import socket
import struct

from topo_ar.errors import ConfigError

INTERFACE_ENVS = ("TOPO_AR_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
_SIOCGIFADDR = 0x8915


def interface_address(name: str) -> str | None:
    """Return the IPv4 address of interface `name`, or None when it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(
                probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15])
            )
        except OSError:
            return None
    return socket.inet_ntoa(reply[20:24])


def interface_names() -> list[str]:
    """Return the names of this host's network interfaces."""
    return [name for _, name in socket.if_nameindex()]


def configured_interfaces(rank: int) -> list[str]:
    """Return the interface names that the environment asks for; empty when it does not.

    Raises
    ------
    ConfigError
        If a name does not exist here. Rank 0 explains at length; other ranks, which usually share
        its environment, are brief.
    """
    for env in INTERFACE_ENVS:
        value = os.environ.get(env)
        if not value:
            continue
        names = value.split(",")
        present = interface_names()
        if all(name in present for name in names):
            return names
        if rank != 0:
            raise ConfigError(f"{env}={value!r} names no interface of rank {rank}'s host")
        raise ConfigError(
            f"{env}={value!r} is not a comma-separated list of this host's interface names "
            "(gloo takes neither patterns nor addresses); "
            f"present are: {', '.join(present)}"
        )
    return []


def local_address(rank: int) -> str:
    """Return the IPv4 address at which this rank's flows are reached.

    The first interface of ``TOPO_AR_SOCKET_IFNAME`` or ``GLOO_SOCKET_IFNAME``; else what the host
    name resolves to; else the address of the default route.

    Raises
    ------
    ConfigError
        If the environment names an interface that is absent or has no IPv4 address.
    """
    names = configured_interfaces(rank)
    if names:
        address = interface_address(names[0])
        if address is None:
            raise ConfigError(f"interface {names[0]} of rank {rank}'s host has no IPv4 address")
        return address
    try:
        resolved = socket.gethostbyname(socket.gethostname())
    except OSError:
        resolved = ""
    if resolved and not resolved.startswith("127."):
        return resolved
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET: nothing is sent, the route is looked up
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
