"""Finding ports that nobody listens on, and who listens on a port."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from contextlib import ExitStack

import psutil


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether one could listen on `port` of `host` now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
        try:
            probe.bind((host, port))
            probe.listen()
        except OSError:
            return False
    return True


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """`count` different free ports. Another process may take one before it is used; the caller then fails clearly."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((host, 0))
        return [probe.getsockname()[1] for probe in probes]


def listening_ports(processes: Iterable[psutil.Process]) -> set[int]:
    """The TCP ports on which any of `processes` listens; none of one that has ended meanwhile."""
    ports = set()
    for process in processes:
        try:
            connections = process.net_connections("tcp")
        except psutil.NoSuchProcess:
            continue
        ports |= {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}
    return ports
