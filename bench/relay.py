"""A TCP relay to a port of its own loopback, which holds back what clients send.

``python -m bench.relay ADDRESS PORT TARGET_PORT DELAY_S``

It stands for a millisecond of cable, so it should cost the processors as little as one: what servers answer is spliced, never copied.
"""

from __future__ import annotations

import fcntl
import os
import socket
import sys
import threading
import time
from contextlib import suppress

PIECE = 1 << 20
BACKLOG = 512


def relay(address: str, port: int, target: int, delay_s: float) -> None:
    """Serves until the process is ended."""
    with socket.create_server((address, port), backlog=BACKLOG) as listener:
        while True:
            near, _ = listener.accept()
            threading.Thread(target=_connection, args=(near, target, delay_s), daemon=True).start()


def _connection(near: socket.socket, target: int, delay_s: float) -> None:
    with near, suppress(OSError), socket.create_connection(("127.0.0.1", target)) as far:
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        back = threading.Thread(target=_splice, args=(far, near), daemon=True)
        back.start()
        _hold_back(near, far, delay_s)
        back.join()


def _hold_back(near: socket.socket, far: socket.socket, delay_s: float) -> None:
    with suppress(OSError):
        while data := near.recv(PIECE):
            time.sleep(delay_s)
            far.sendall(data)
    with suppress(OSError):
        far.shutdown(socket.SHUT_WR)


def _splice(far: socket.socket, near: socket.socket) -> None:
    out, into = os.pipe()
    try:
        fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, PIECE)
        with suppress(OSError):
            while count := os.splice(far.fileno(), into, PIECE):
                while count:
                    count -= os.splice(out, near.fileno(), count)
    finally:
        os.close(out)
        os.close(into)
    # Whoever sends to a server that has gone is told.
    with suppress(OSError):
        near.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    relay(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
