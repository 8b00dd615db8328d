"""Rules for the web pages and host names that a server answers.

Every page that is open in a browser may open websockets to any address, this machine's loopback too. Browsers name
the page in the header `Origin`, which robots and simulators do not send. A page can also have its own host name point
at this machine (DNS rebinding); then the header `Host` has that name.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Sequence
from ipaddress import ip_address
from pathlib import Path

from attrs import frozen

from vla_rl.core.errors import UserError

_HOST = re.compile(r"(\[[0-9a-f:.%]+(?:[0-9a-z]+)?\]|[^\[\]:/@\s]+)(?::\d*)?", re.IGNORECASE)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/@\s]+", re.IGNORECASE)


@frozen(kw_only=True)
class Access:
    hosts: frozenset[str]
    """Names, in lower case."""
    any_address: bool
    """Whether every IP address is a valid host. A page cannot redirect one, and a machine does not know all of its
    addresses: those of a container's host and of a router are others. False: only loopback addresses are valid."""
    origins: frozenset[str]

    @classmethod
    def for_server(cls, host: str, hosts: Sequence[str], origins: Sequence[str]) -> Access:
        """Build the rules for a server that listens on `host`. Raises UserError for names that no request can have."""
        for name in hosts:
            if not _is_address(_normalise_host(name)) and ("*" in name or _host_name(name) != _normalise_host(name)):
                raise UserError(f"--allow-host: {name!r} is not a host name; give it without a scheme, port or path")
        for origin in origins:
            if "*" in origin or not _ORIGIN.fullmatch(origin):
                raise UserError(
                    f"--allow-origin: {origin!r} is not an origin; it is what browsers send, such as "
                    f"http://localhost:3000 (no path, no slash at the end)"
                )
        local = is_loopback(host)
        names = {"localhost", host, *hosts, *(() if local else own_names())}
        return cls(
            hosts=frozenset(map(_normalise_host, names)),
            any_address=not local,
            origins=frozenset(origin.lower() for origin in origins),
        )

    def find_refusal(self, hosts: Sequence[str], origins: Iterable[str]) -> str | None:
        """Return the refusal of a request with these headers `Host` and `Origin`; None if it is accepted."""
        for origin in origins:
            if origin.lower() not in self.origins:
                given = _shorten_text(origin)
                return (
                    f"this server does not answer web pages: the request has the header Origin: {given}; leave it out, "
                    f"or start the server with --allow-origin {given}"
                )
        name = _host_name(hosts[0]) if len(hosts) == 1 else None
        if name is None:
            return "the request has no valid header Host"
        if name in self.hosts or (_is_address(name) and (self.any_address or is_loopback(name))):
            return None
        given = _shorten_text(name)
        return (
            f"this server does not answer to the host {given}; ask for it by its address, or start it with "
            f"--allow-host {given}"
        )


def is_loopback(host: str) -> bool:
    if not _is_address(host):
        return host.lower().rstrip(".") == "localhost"
    address = ip_address(host)
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def url_of(host: str, port: int) -> str:
    return f"ws://[{host}]:{port}" if ":" in host else f"ws://{host}:{port}"


def own_names() -> set[str]:
    """Return the names that other machines reach this one by: its own, also with its domains. Asks no DNS."""
    name = socket.gethostname().lower()
    short = name.partition(".")[0]
    try:
        text = Path("/etc/resolv.conf").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    lines = [line.split() for line in text.splitlines()]
    domains = {domain for words in lines if words[:1] in (["search"], ["domain"]) for domain in words[1:]}
    return {name, short, *(f"{short}.{domain.strip('.')}" for domain in (*domains, "local"))}


def _host_name(host: str) -> str | None:
    """The host of a header `Host`, without its port. Ports may differ from ours, behind a tunnel or a container."""
    parts = _HOST.fullmatch(host.strip())
    return _normalise_host(parts[1]) if parts else None


def _normalise_host(name: str) -> str:
    return name.lower().strip("[]").rstrip(".")


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _shorten_text(text: str) -> str:
    return text[:80] if text.isprintable() else ascii(text[:80])
