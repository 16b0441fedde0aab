"""Hosts that vanish are noticed on both sides."""

from __future__ import annotations

import socket
from contextlib import ExitStack

from dsec.api.listener import bind
from libdsec.keepalive import IDLE_S, PROBE_EVERY_S, PROBES
from libdsec.transport import _make_socket


def probing(connection: socket.socket) -> tuple[int, ...]:
    tcp = [connection.getsockopt(socket.IPPROTO_TCP, name) for name in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)]
    return (connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), *tcp)


def test_connections_probe_their_other_side_on_both_sides() -> None:
    with ExitStack() as open_sockets:
        listening = open_sockets.enter_context(bind("127.0.0.1", 0))
        listening.listen()
        listening.setblocking(True)
        client = open_sockets.enter_context(_make_socket((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("", 0))))
        client.connect(listening.getsockname())
        accepted = open_sockets.enter_context(listening.accept()[0])
        assert probing(client) == probing(accepted) == (1, IDLE_S, PROBE_EVERY_S, PROBES)
