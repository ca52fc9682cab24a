"""Which addresses a host's name stands for, and which of them may be called.

A name is resolved once, all its addresses are looked at, and the connection goes to one of them as
it is: a name that means something else a moment later changes nothing.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence

from adapter_store.errors import SourceError

Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the addresses of a host, as text; raises `OSError` for a name that has none."""

_NOT_FOR_US = tuple(
    ipaddress.ip_network(network)
    for network in (
        "168.63.129.16/32",  # Azure's own services, under an address that looks public
        "64:ff9b::/96",  # these three carry an IPv4 address, which may be a private one
        "64:ff9b:1::/48",
        "2002::/16",
        "2001::/32",
    )
)


async def system_resolver(host: str, port: int) -> Sequence[str]:
    """The machine's own resolver."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_public(address: str) -> bool:
    """Whether an address is that of one host on the public internet."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return is_public(str(ip.ipv4_mapped))
        if ip.scope_id is not None:
            return False
    if any(ip.version == network.version and ip in network for network in _NOT_FOR_US):
        return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified)


async def callable_addresses(
    host: str, port: int, resolve: Resolver, *, may_be_private: bool
) -> Sequence[str]:
    """The addresses of a host; raises `SourceError` if one of them is not public."""
    try:
        addresses = await resolve(host, port)
    except (OSError, UnicodeError):
        addresses = ()
    if not addresses:
        raise SourceError("source_unavailable", f"the host {host[:255]} has no address")
    if not may_be_private and not all(map(is_public, addresses)):
        raise SourceError(
            "private_address", f"the host {host[:255]} has an address that is not public"
        )
    return addresses
