"""What docs/wire.md promises to callers without the SDK: the WebSocket of a command, and HTTP to a port inside."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from libdsec import PtySize, Sandbox
from tests.conftest import Instance

DEADLINE_S = 30.0


def headers(instance: Instance) -> dict[str, str]:
    return {"Authorization": f"Bearer {instance.api_key}"}


@dataclass
class Attached:
    """What came through the WebSocket of a command."""

    socket: aiohttp.ClientWebSocketResponse
    output: dict[int, bytearray] = field(default_factory=lambda: {1: bytearray(), 2: bytearray()})
    exit: dict[str, Any] | None = None

    async def read_until(self, stream: int, end: bytes) -> None:
        """Until the stream's output ends so."""
        while not self.output[stream].endswith(end):
            await self._take()

    async def read_to_the_end(self) -> dict[str, Any]:
        """What is told of the command's end; nothing comes after it."""
        while self.exit is None:
            await self._take()
        assert (await self.socket.receive(DEADLINE_S)).type is aiohttp.WSMsgType.CLOSE and self.socket.close_code == 1000
        return self.exit

    async def _take(self) -> None:
        message = await self.socket.receive(DEADLINE_S)
        if message.type is aiohttp.WSMsgType.BINARY:
            self.output[message.data[0]] += message.data[1:]
        else:
            assert message.type is aiohttp.WSMsgType.TEXT, message
            self.exit = json.loads(message.data)["exit"]


async def test_the_websocket_of_a_command_carries_output_input_and_its_end(instance: Instance, sandbox: Sandbox) -> None:
    process = await sandbox.start(["sh", "-c", "echo ready; read line; echo got $line; cat >&2; exit 4"])
    url = f"{instance.url}/v1/sandboxes/{sandbox.id}/exec/{process.exec_id}/attach"
    async with aiohttp.ClientSession(headers=headers(instance)) as session:
        async with session.ws_connect(url) as socket:
            attached = Attached(socket)
            await attached.read_until(1, b"ready\n")
            await socket.send_bytes(b"a word\n")
            await attached.read_until(1, b"got a word\n")
            await socket.send_bytes(b"\0\xff bytes")
            await socket.send_str('{"eof": true}')
            end = await attached.read_to_the_end()
        assert attached.output == {1: b"ready\ngot a word\n", 2: b"\0\xff bytes"}
        assert (end["exec_id"], end["exit_code"], end["stdout_total"], end["stderr_total"]) == (process.exec_id, 4, 17, 8)
        # It is kept: whoever comes later gets the same, from where he wants it.
        async with session.ws_connect(f"{url}?stdout_from=6&stderr_from=3") as socket:
            later = Attached(socket)
            assert (await later.read_to_the_end())["exit_code"] == 4
        assert later.output == {1: b"got a word\n", 2: b"bytes"}


async def test_the_websocket_of_a_terminal_resizes_it_and_signals(instance: Instance, sandbox: Sandbox) -> None:
    script = "trap 'stty size' WINCH; stty size; while :; do sleep 0.05; done"
    process = await sandbox.start(["sh", "-c", script], pty=PtySize(30, 100))
    url = f"{instance.url}/v1/sandboxes/{sandbox.id}/exec/{process.exec_id}/attach"
    async with aiohttp.ClientSession(headers=headers(instance)) as session, session.ws_connect(url) as socket:
        attached = Attached(socket)
        await attached.read_until(1, b"30 100\r\n")
        await socket.send_str('{"resize": [40, 120]}')
        await attached.read_until(1, b"40 120\r\n")
        await socket.send_str('{"signal": "KILL"}')
        end = await attached.read_to_the_end()
    assert (end["exit_code"], end["signal"]) == (137, 9)


@pytest.mark.parametrize("key", [None, "dsec_x_y"])
async def test_the_websocket_of_a_command_wants_a_key(instance: Instance, sandbox: Sandbox, key: str | None) -> None:
    process = await sandbox.start(["cat"])
    url = f"{instance.url}/v1/sandboxes/{sandbox.id}/exec/{process.exec_id}/attach"
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await session.ws_connect(url, headers={} if key is None else {"Authorization": f"Bearer {key}"})
    assert refused.value.status in (401, 403)
    assert (await process.info()).running


SERVER = """
import hashlib, http.server, json
class Teller(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        told = {"path": self.path, "headers": self.headers.items(), "size": len(body), "digest": hashlib.sha256(body).hexdigest()}
        answer = json.dumps(told).encode()
        self.send_response(201)
        self.send_header("Content-Length", str(len(answer)))
        self.send_header("X-From", "inside")
        self.end_headers()
        self.wfile.write(answer)
server = http.server.HTTPServer(("127.0.0.1", 8000), Teller)
print("listening", flush=True)
server.serve_forever()
"""
BODY = random.Random(1).randbytes(3 << 20)


async def posted(session: aiohttp.ClientSession, url: str, **more: Any) -> dict[str, Any]:
    """What the program inside says that it got."""
    async with session.post(f"{url}a%2Fb?c=d", data=BODY, **more) as reply:
        assert (reply.status, reply.headers["X-From"]) == (201, "inside"), await reply.text()
        told: dict[str, Any] = await reply.json(content_type=None)
    assert (told["path"], told["size"], told["digest"]) == ("/a%2Fb?c=d", len(BODY), hashlib.sha256(BODY).hexdigest())
    told["headers"] = {name.lower(): value for name, value in told["headers"]}
    return told


async def test_a_post_reaches_the_program_inside_and_the_callers_key_does_not(instance: Instance, sandbox: Sandbox) -> None:
    server = await sandbox.start(["python3", "-c", SERVER])
    assert await anext(aiter(server.stdout)) == b"listening\n"
    below_the_api = f"{instance.url}/v1/sandboxes/{sandbox.id}/ports/8000/"
    async with aiohttp.ClientSession() as session:
        own = {"X-Own": "kept", "Cookie": "session=1"}
        told = await posted(session, below_the_api, headers={**headers(instance), **own})
        assert told["headers"]["x-own"] == "kept"
        assert not {"authorization", "cookie"} & told["headers"].keys() and instance.api_key not in json.dumps(told)
        # Nobody needs a key at the ports' origin: what stands there as one is the program's own.
        told = await posted(session, sandbox.url(8000), headers={"Authorization": "Bearer its-own", **own})
        assert (told["headers"]["authorization"], told["headers"]["cookie"]) == ("Bearer its-own", "session=1")
        assert told["headers"]["x-forwarded-prefix"] + "/" in sandbox.url(8000)
        # But a key of ours, given by a slip, is not.
        told = await posted(session, sandbox.url(8000), headers={"Authorization": f"bearer {instance.api_key}"})
        assert "authorization" not in told["headers"] and instance.api_key not in json.dumps(told)
        async with session.post(below_the_api, data=b"") as refused:
            assert refused.status == 401
    await server.kill()


CRUMBS = 100_000
UNFRIENDLY = """
import base64, hashlib, socketserver, sys
CRUMBS = int(sys.argv[1])
CHUNKED = b"HTTP/1.1 200 OK\\r\\nTransfer-Encoding: chunked\\r\\n"
GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
class Server(socketserver.StreamRequestHandler):
    def handle(self):
        path = self.rfile.readline().split()[1].decode()
        headers = dict(line.decode().rstrip().split(": ", 1) for line in iter(self.rfile.readline, b"\\r\\n"))
        if path == "/crumbs":
            self.wfile.write(CHUNKED + b"\\r\\n" + b"1\\r\\nx\\r\\n" * CRUMBS + b"0\\r\\n\\r\\n")
        elif path == "/both":
            self.wfile.write(CHUNKED + b"Content-Length: 1\\r\\n\\r\\n5\\r\\nhello\\r\\n0\\r\\n\\r\\n")
        elif path == "/same":
            self.wfile.write(b"HTTP/1.1 304 Not Modified\\r\\nContent-Length: 500\\r\\n\\r\\n")
        elif path == "/wait":
            self.wfile.write(b"HTTP/1.1 103 Early Hints\\r\\n\\r\\n" * CRUMBS)
        elif path == "/ws":
            accept = base64.b64encode(hashlib.sha1(headers["Sec-WebSocket-Key"].encode() + GUID).digest())
            head = b"HTTP/1.1 101 Switching Protocols\\r\\nUpgrade: websocket\\r\\nConnection: Upgrade\\r\\nSec-WebSocket-Accept: " + accept
            self.wfile.write(head + b"\\r\\n\\r\\n" + b"\\x02\\x00" + b"\\x00\\x00" * CRUMBS + b"\\x80\\x05hello")
            self.rfile.read(1)
socketserver.ThreadingTCPServer.allow_reuse_address = True
server = socketserver.ThreadingTCPServer(("127.0.0.1", 8001), Server)
print("listening", flush=True)
server.serve_forever()
"""


async def test_a_server_inside_that_answers_in_crumbs_holds_up_nobody_else(instance: Instance, sandbox: Sandbox) -> None:
    server = await sandbox.start(["python3", "-c", UNFRIENDLY, str(CRUMBS)])
    assert await anext(aiter(server.stdout)) == b"listening\n"
    url = sandbox.url(8001)
    async with aiohttp.ClientSession() as session:

        async def crumbs() -> None:
            async with session.get(f"{url}crumbs") as reply:
                assert await reply.read() == b"x" * CRUMBS

        async def websocket() -> None:
            async with session.ws_connect(f"{url}ws") as socket:
                assert await socket.receive_bytes() == b"hello"

        for one in (crumbs, websocket):
            running, answers = asyncio.create_task(one()), 0
            while not running.done():
                async with session.get(f"{instance.url}/healthz") as reply:
                    answers += reply.status == 200
            await running
            # Before, all crumbs of a megabyte were dealt with in one turn.
            assert answers > 10
        async with session.get(f"{url}both") as reply:
            assert (reply.status, await reply.read()) == (200, b"hello")
        async with session.get(f"{url}same") as reply:
            assert (reply.status, await reply.read()) == (304, b"")
        async with session.get(f"{url}wait") as reply:
            assert reply.status == 503
    await server.kill()
