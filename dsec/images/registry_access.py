"""From where images may be fetched, and for whom: the service fetches, so its place in the network must not become the caller's.

Three rules. An admin's key may name any registry; a project's key only one that the operator has listed. Where the registry sends us
(another host for the token, a redirect to the blobs) the address must be public, unless the registry's own address is a private one: a
public registry can't make us knock on doors inside. And nobody reaches link-local addresses, where clouds keep their credentials.
Addresses are looked at when the socket is made, so neither a name that resolves to something else the second time nor a literal slips by.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection
from dataclasses import dataclass, field

from libdsec.docker_hub import registry_host
from libdsec.errors import PermissionDenied

AddressInfo = tuple[int, int, int, str, tuple[str, int] | tuple[str, int, int, int]]
"""An entry of getaddrinfo."""

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
"""RFC 6052: IPv4 addresses as IPv6-only networks reach them."""


class RefusedAddress(OSError):
    """The address is one to which this import may not connect."""


@dataclass(frozen=True)
class RegistryPolicy:
    """Which registries a project's key may name, as ``host`` or ``host:port``. Admins' keys may name any."""

    allowed: frozenset[str] = frozenset()

    @classmethod
    def of(cls, hosts: Collection[str]) -> RegistryPolicy:
        return cls(frozenset(map(registry_host, hosts)))

    def check(self, host: str, *, admin: bool) -> None:
        """Raises PermissionDenied for a registry that the caller may not name."""
        if not admin and registry_host(host) not in self.allowed:
            raise PermissionDenied(
                f"this key may not have the service fetch from {host}: an admin's key may, or the operator lists the registry with "
                "`dsec up --allow-registry`; what you fetched yourself (`skopeo copy … oci-archive:FILE`) can be imported with any key"
            )


@dataclass
class Gate:
    """Makes the sockets of one import, to the addresses that it may reach: to the registry itself (``direct``), or to where it sends us."""

    direct: bool
    private_allowed: bool = False
    """For a gate that isn't direct: the registry's own address is private, so its helpers' may be, too."""
    saw_private: bool = False
    """An address that isn't public was let through."""
    refused: list[str] = field(default_factory=list)

    def make_socket(self, address: AddressInfo) -> socket.socket:
        """What aiohttp calls for each address that it tries. Raises RefusedAddress."""
        family, kind, protocol, _, place = address
        problem = self.problem(place[0])
        if problem is not None:
            self.refused.append(problem)
            raise RefusedAddress(problem)
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made

    def problem(self, text: str) -> str | None:
        """Why this gate doesn't lead to an address; None: it does."""
        address = _effective(text)
        if address.is_link_local or address.is_multicast or address.is_unspecified:
            return f"{address} is a link-local or special address, from which nothing is fetched"
        if address.is_global:
            return None
        if not self.direct and not self.private_allowed:
            return f"{address} is not a public address, but a public registry leads there"
        self.saw_private = True
        return None


def _effective(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The address, without a zone; an IPv4 address that is wrapped in an IPv6 one counts as itself."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    return address
