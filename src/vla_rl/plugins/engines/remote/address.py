"""Address of a remote policy: its validation, and the proxy through which it is reached."""

from __future__ import annotations

import os
import socket
from ipaddress import ip_address
from urllib.parse import urlsplit

from attrs import frozen

FORM = "ws://HOST:PORT (or wss://)"


def check_address(url: str) -> None:
    """Raise ValueError for an invalid address; the message says what is wrong with it."""
    wrong = f"{url!r} is not of the form {FORM}"
    if not url.lower().startswith(("ws://", "wss://")):
        raise ValueError(wrong)
    if not url.isprintable() or " " in url:
        raise ValueError(f"{wrong}: it has a space, or a sign that cannot be seen")
    try:
        parts = urlsplit(url)
        address = parts.netloc.rpartition("@")[2]
        host, port = parts.hostname, parts.port
    except ValueError as exc:
        ipv6 = "; an IPv6 address is in brackets: ws://[::1]:8000" if url.count(":") > 2 else ""
        what = "a port is a whole number within 1 and 65535" if "Port" in str(exc) else str(exc)
        raise ValueError(f"{wrong}: {what}{ipv6}") from None
    if not host:
        raise ValueError(f"{wrong}: it names no host")
    if address.endswith(":") or port == 0:
        raise ValueError(
            f"{wrong}: it names no port; one is within 1 and 65535, 8000 if the server was not told another"
        )
    if address.count(":") > 1 and "[" not in address:
        raise ValueError(f"{wrong}: an IPv6 address is in brackets: ws://[::1]:8000")
    if parts.fragment or url.endswith("#"):
        raise ValueError(f"{wrong}: it has a part after #")
    if "@" in parts.netloc and not (parts.username and parts.password):
        raise ValueError(f"{wrong}: it has a user without a password; the key of a server goes into model.api_key_file")
    try:
        host.encode("idna")
    except UnicodeError:
        raise ValueError(f"{wrong}: {host[:80]!r} is not a host name") from None


@frozen
class Proxy:
    """Proxy through which a server is reached."""

    variable: str
    """Name of the environment variable that sets the proxy."""
    url: str

    def __str__(self) -> str:
        """Return the proxy's address without a password, and the variable."""
        scheme, slashes, address = self.url.rpartition("://")
        return f"{scheme}{slashes}{address.rpartition('@')[2]} ({self.variable})"


def proxy_for(url: str) -> Proxy | None:
    """Return the proxy through which an address is reached; None: directly, as this machine always is. Variables and
    their order are those of the websockets package: `no_proxy` first, then one for websockets, SOCKS, HTTPS, and HTTP
    where the connection is not encrypted."""
    from urllib.request import getproxies, proxy_bypass

    parts = urlsplit(url)
    host = parts.hostname or ""
    secure = parts.scheme == "wss"
    proxies = getproxies()
    schemes = ("wss", "socks", "https") if secure else ("ws", "socks", "https", "http")
    named = [scheme for scheme in schemes if scheme in proxies]
    if not named or proxy_bypass(f"{host}:{parts.port or (443 if secure else 80)}") or is_here(host):
        return None
    value = proxies[named[0]]
    if named[0] == "socks" and value.startswith("http://"):
        value = f"socks5h://{value.removeprefix('http://')}"
    name = f"{named[0]}_proxy"
    return Proxy(next((known for known in (name, name.upper()) if known in os.environ), "the system's proxy"), value)


def is_here(host: str) -> bool:
    """Return whether a host name or address is this machine's loopback, however the name is resolved."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        addresses = [str(info[4][0]) for info in socket.getaddrinfo(host, None)]
    except (OSError, UnicodeError):
        return False
    return bool(addresses) and all(_is_loopback(address) for address in addresses)


def _is_loopback(host: str) -> bool:
    address = ip_address(host)
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback or address.is_unspecified
