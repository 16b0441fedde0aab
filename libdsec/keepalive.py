"""TCP keepalive: how a host that vanished is noticed, which sends no word of its end.

Without it a connection on which nothing is sent stands for ever; with the kernel's own figures a host is given up after two hours. It sees
silence only: what is being sent to a vanished host is sent again by the kernel for a quarter of an hour (tcp_retries2, tcp(7)).
"""

from __future__ import annotations

import socket

IDLE_S = 15
"""Seconds of silence after which the first probe is sent."""
PROBE_EVERY_S = 10
PROBES = 3
"""Probes without an answer after which the host is given up."""
NOTICED_S = IDLE_S + PROBE_EVERY_S * PROBES
"""Seconds of silence until then."""


def keep_alive(connection: socket.socket) -> None:
    """Probe the other side of a TCP socket. Set on one that listens, it holds for those that it accepts."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Not every system has the figures.
    for name, value in (("TCP_KEEPIDLE", IDLE_S), ("TCP_KEEPINTVL", PROBE_EVERY_S), ("TCP_KEEPCNT", PROBES)):
        option = getattr(socket, name, None)
        if option is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
