"""Rendezvous of ranks: torch's store and connections on one address, where torch would listen on all."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from ipaddress import ip_address
from urllib.parse import urlsplit

import psutil
import torch

STORE_TIMEOUT = timedelta(minutes=5)
"""Time that a store waits for a key; torch's own default."""


def open_listener(host: str) -> socket.socket:
    """Return a listening socket at a free port of this address. It keeps the port for rank 0 until the ranks join."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen()
    return listener


def address_of(listener: socket.socket) -> str:
    """Return the address of a listening socket, as `enter_group` takes it."""
    host, port = listener.getsockname()[:2]
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def enter_group(backend: str, address: str, rank: int, world: int, listener: socket.socket | None) -> None:
    """Enter the torch.distributed group of all learners.

    Args:
        address: address of rank 0's listening socket; or any other `init_method` of torch.
        listener: the listening socket, on rank 0; None on other ranks.
    """
    where = urlsplit(address)
    if where.scheme != "tcp" or where.hostname is None or where.port is None:
        torch.distributed.init_process_group(backend, init_method=address, rank=rank, world_size=world)
        return
    store = open_store(address, rank, world, listener)
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=world)


def open_store(
    address: str, rank: int, world: int, listener: socket.socket | None, timeout: timedelta = STORE_TIMEOUT
) -> torch.distributed.TCPStore:  # type: ignore[name-defined]
    """Return torch's store at rank 0's listening socket, and let groups of it connect through the same interface."""
    where = urlsplit(address)
    assert where.hostname is not None
    assert where.port is not None
    _connect_through(where.hostname, listener)
    return torch.distributed.TCPStore(  # type: ignore[attr-defined]
        where.hostname,
        where.port,
        world_size=world,
        is_master=rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        # Detached, since the store closes it.
        master_listen_fd=None if listener is None else listener.detach(),
    )


def _connect_through(host: str, listener: socket.socket | None) -> None:
    """Let ranks connect through the network interface of rank 0's socket, unless the user has chosen one. NCCL chooses
    among the networks of a cluster by itself, so it is restricted on the loopback only."""
    address = host if listener is not None else _own_address_towards(host)
    interface = next(
        (name for name, of in psutil.net_if_addrs().items() if any(a.address == address for a in of)), None
    )
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if ip_address(address).is_loopback:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def _own_address_towards(host: str) -> str:
    """Return this machine's address on the route to another host."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))  # UDP: this sends nothing, it only looks up the route
        address: str = probe.getsockname()[0]
        return address
