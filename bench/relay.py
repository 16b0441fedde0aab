"""A TCP relay to a port of its own loopback, which holds back what clients send.

``python -m bench.relay ADDRESS PORT TARGET_PORT DELAY_S``
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress

import uvloop

PIECE = 1 << 20


async def relay(address: str, port: int, target: int, delay_s: float) -> None:
    """Serves until it is ended."""

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", target, limit=PIECE)
        except OSError:
            writer.close()
            return
        try:
            await asyncio.gather(_copy(reader, far_writer, delay_s), _copy(far_reader, writer, 0.0))
        finally:
            writer.close()
            far_writer.close()

    server = await asyncio.start_server(connection, address, port, limit=PIECE)
    async with server:
        await server.serve_forever()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(PIECE):
            if delay_s:
                await asyncio.sleep(delay_s)
            writer.write(data)
            await writer.drain()
        writer.write_eof()


if __name__ == "__main__":
    uvloop.run(relay(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])))
