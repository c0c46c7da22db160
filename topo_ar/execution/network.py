"""Which addresses and interfaces of this host the flows between nodes use."""

import fcntl
import ipaddress
import logging
import os
import socket
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from topo_ar.errors import ConfigError

logger = logging.getLogger("topo_ar")

INTERFACE_ENVS = ("TOPO_AR_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
_SIOCGIFADDR = 0x8915
_SIOCGIFNETMASK = 0x891B
_SETTINGS = Path("/proc/sys/net/ipv4/conf")


class Nic(msgspec.Struct, frozen=True):
    """An interface that carries flows.

    Attributes
    ----------
    name : str
        Empty where only an address is known.
    address : str
        Its IPv4 address.
    network : str
        The subnet that it leads to without a router, such as ``10.0.1.0/24``; empty where the host
        uses one interface only.
    shared : bool
        Another interface leads to that subnet as well: an address alone does not choose between
        them, a socket has to be bound to the interface.
    """

    name: str
    address: str
    network: str = ""
    shared: bool = False

    def bind(self, sock: socket.socket) -> None:
        """Let what leaves and enters `sock` use this interface."""
        if self.shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, self.name.encode())
        sock.bind((self.address, 0))


def _ask(name: str, request: int) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(probe.fileno(), request, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(reply[20:24])


def interface_address(name: str) -> str | None:
    """Return the IPv4 address of interface `name`, or None when it has none."""
    return _ask(name, _SIOCGIFADDR)


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


def local_nics(rank: int, *, warn: bool = False) -> tuple[Nic, ...]:
    """Return the interfaces that this host's flows may use, at least one.

    All of ``TOPO_AR_SOCKET_IFNAME`` or ``GLOO_SOCKET_IFNAME``, in that order; without these, the
    one at `local_address`.

    Parameters
    ----------
    rank : int
        As for `local_address`.
    warn : bool
        Log which are left out, and why.

    Raises
    ------
    ConfigError
        If the environment names an interface that is absent or has no IPv4 address.
    """
    names = tuple(dict.fromkeys(configured_interfaces(rank)))
    if len(names) < 2:
        address = local_address(rank)
        name = next((each for each in interface_names() if interface_address(each) == address), "")
        return (Nic(name, address),)
    nics = []
    for name in names:
        own, mask = interface_address(name), _ask(name, _SIOCGIFNETMASK)
        if own is None or mask is None:
            raise ConfigError(f"interface {name} of rank {rank}'s host has no IPv4 address")
        network = ipaddress.ip_network(f"{own}/{mask}", strict=False)
        nics.append(Nic(name, own, str(network)))
    usable, reasons = kept_apart(nics, _why_mixed)
    for reason in reasons if warn else ():
        logger.warning("%s", reason)
    return usable


def kept_apart(
    nics: Sequence[Nic], why_mixed: Callable[[str], str]
) -> tuple[tuple[Nic, ...], tuple[str, ...]]:
    """Return the NICs that can be chosen between, and why the others are left out.

    Of several in one subnet only the first counts where the system mixes them up.

    Parameters
    ----------
    nics : sequence of Nic
        With their networks.
    why_mixed : callable
        Says why a flow cannot be kept to an interface of this name; empty if it can.
    """
    usable: list[Nic] = []
    reasons = []
    for network in dict.fromkeys(nic.network for nic in nics):
        alike = [nic for nic in nics if nic.network == network]
        why = "" if len(alike) == 1 else next(filter(None, (why_mixed(n.name) for n in alike)), "")
        if why:
            others = ", ".join(nic.name for nic in alike[1:])
            reasons.append(
                f"flows do not use {others}: like {alike[0].name} it leads to {network}, and {why}"
            )
            alike = alike[:1]
        shared = len(alike) > 1
        usable += [Nic(nic.name, nic.address, network, shared) for nic in alike]
    names = [nic.name for nic in nics]
    return tuple(sorted(usable, key=lambda nic: names.index(nic.name))), tuple(reasons)


def _why_mixed(name: str) -> str:
    with socket.socket() as probe:
        try:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, name.encode())
        except OSError as error:
            return f"a socket cannot be bound to an interface here ({error.strerror})"
    # The larger of both settings counts.
    if max(_setting("all", "arp_ignore"), _setting(name, "arp_ignore")) < 1:
        return "every interface answers for the addresses of all others; set arp_ignore=1"
    if max(_setting("all", "rp_filter"), _setting(name, "rp_filter")) == 1:
        return (
            "what enters by another interface than answers would take is dropped; set rp_filter=2"
        )
    return ""


def _setting(interface: str, name: str) -> int:
    try:
        return int((_SETTINGS / interface / name).read_text())
    except (OSError, ValueError):
        return 0
