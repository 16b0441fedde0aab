"""The HTTP contract in memory, with the failures that the SDK must live through: what it was asked, and what it breaks, are plain
attributes."""

from __future__ import annotations

import asyncio
import errno
import os
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeVar
from urllib.parse import parse_qsl, unquote_to_bytes

import msgspec
from aiohttp import WSMsgType, web

from libdsec.errors import (
    DSecError,
    ErrorEnvelope,
    FileNotFound,
    InvalidArgument,
    NoCapacity,
    ProcessNotFound,
    SandboxFailed,
    SandboxGone,
    SandboxNotFound,
)
from libdsec.schema import (
    CommandResult,
    CreateItem,
    CreateRequest,
    DSecContainerRunArgs,
    ExecRequest,
    FileEvent,
    FileInfo,
    ForkRequest,
    PatchRequest,
    PortUrl,
    ProcessInfo,
    RunArgs,
    SandboxInfo,
    SandboxPage,
    ShellRequest,
    SignalRequest,
    TarSummary,
)

MSGPACK = "application/msgpack"
T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Cut(Exception):
    """Break the connection instead of answering."""


class FakeServer:
    """One server. Attributes named ``cut_…`` and ``fail_…`` say how often something still breaks."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[tuple[str, str]] = []
        self.headers: list[dict[str, str]] = []
        self.error: DSecError | None = None
        """What every request is answered with, while set."""
        self.errors_as_msgpack = False
        self.fail_next: list[DSecError] = []
        """Answers to the next requests, one each."""
        self.cut_after_act = 0
        """So many acts are carried out and then not answered: the connection breaks."""
        self.sandboxes: dict[str, SandboxInfo] = {}
        self.by_key: dict[str, str] = {}
        self.forks: list[ForkRequest] = []
        self.asked: list[list[str | None]] = []
        """The idempotency keys of each create request."""
        self.cut_create_after: list[int] = []
        """Lines after which the next create answers break."""
        self.refuse_images: dict[str, list[DSecError]] = {}
        self.fork_errors: list[dict[int, DSecError]] = []
        """What each of the next fork requests is told instead of a sandbox, by its place."""
        self.told = asyncio.Event()
        """All lines of a create or fork request were written."""
        self.hold_answers = False
        """Answers to create and fork requests don't end behind their lines."""
        self.create_silent = asyncio.Event()
        self.create_silent.set()
        self.runs: Counter[str] = Counter()
        """How often each exec_id was run."""
        self.execs: dict[str, ExecRequest] = {}
        self.shells: list[ShellRequest] = []
        self.result = CommandResult(exit_code=0)
        self.stdin: dict[str, bytes] = {}
        self.stdin_ended: dict[str, asyncio.Event] = {}
        self.stdin_needed = True
        self.signals: list[SignalRequest] = []
        self.output = b""
        self.cut_output_every = 0
        """Bytes of output after which its connections break; 0: never."""
        self.output_offsets: list[int] = []
        self.files: dict[bytes, bytes] = {}
        self.write_begun = asyncio.Event()
        """The head of a request that writes a file was there."""
        self.directories: set[bytes] = set()
        self.stat_errno: int | None = None
        """What the kernel says to every stat, while set."""
        self.tar = b""
        self.tars_put: list[bytes] = []
        self.last_query: dict[str, bytes] = {}
        self.changes: list[str] = []
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen on a free port of the loopback."""
        await self.start_at(0)

    async def start_at(self, port: int) -> None:
        app = web.Application(middlewares=[self._middleware], client_max_size=1 << 30)
        box = "/v1/sandboxes/{id}"
        app.add_routes(
            [
                web.post("/v1/sandboxes", self._create),
                web.get("/v1/sandboxes", self._list),
                web.get(box, self._get),
                web.post(box + "/attach", self._get),
                web.patch(box, self._patch),
                web.delete(box, self._stop),
                web.post(box + "/fork", self._fork),
                web.post(box + "/exec", self._exec),
                web.post(box + "/shell", self._shell),
                web.get(box + "/exec/{exec}", self._process),
                web.get(box + "/exec/{exec}/wait", self._wait),
                web.get(box + "/exec/{exec}/stdout", self._stdout),
                web.put(box + "/exec/{exec}/stdin", self._stdin),
                web.post(box + "/exec/{exec}/signal", self._signal),
                web.get(box + "/files", self._read),
                web.put(box + "/files", self._write),
                web.get(box + "/files/stat", self._stat),
                web.get(box + "/files/list", self._list_files),
                web.get(box + "/files/watch", self._watch),
                web.get(box + "/files/tar", self._tar_out),
                web.put(box + "/files/tar", self._tar_in),
                web.post(box + "/files/{verb}", self._change),
                web.get(box + "/tcp/{port}", self._tcp),
                web.get(box + "/url/{port}", self._url),
                web.delete("/v1/images/{reference}", self._remove_image),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port, reuse_address=True)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    @web.middleware
    async def _middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self.requests.append((request.method, request.path_qs))
        self.headers.append(dict(request.headers))
        self.last_query = {
            name: unquote_to_bytes(value)
            for name, value in (pair.split("=", 1) for pair in request.rel_url.raw_query_string.split("&") if pair)
        }
        try:
            if self.error is not None:
                raise self.error
            if self.fail_next:
                raise self.fail_next.pop(0)
            return await handler(request)
        except Cut:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        except DSecError as error:
            envelope = ErrorEnvelope(error.body())
            if self.errors_as_msgpack:
                return web.Response(body=msgspec.msgpack.encode(envelope), status=error.status, content_type=MSGPACK)
            return web.Response(body=msgspec.json.encode(envelope), status=error.status, content_type="application/json")

    def _maybe_cut(self) -> None:
        if self.cut_after_act:
            self.cut_after_act -= 1
            raise Cut

    def _answer(self, request: web.Request, value: object) -> web.Response:
        assert request.headers["Accept"] == MSGPACK
        return web.Response(body=msgspec.msgpack.encode(value), content_type=MSGPACK)

    async def _body(self, request: web.Request, kind: type[T]) -> T:
        assert request.headers["Content-Type"] == MSGPACK
        return msgspec.msgpack.decode(await request.read(), type=kind)

    # -- sandboxes ------------------------------------------------------------------------------------------------------------------------

    async def _create(self, request: web.Request) -> web.StreamResponse:
        wanted = await self._body(request, CreateRequest)
        items = wanted.items if wanted.items is not None else [wanted.args] if wanted.args is not None else []
        self.asked.append([item.idempotency_key for item in items])
        await self.create_silent.wait()
        lines_left = self.cut_create_after.pop(0) if self.cut_create_after else None
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        for index, args in reversed(list(enumerate(items))):
            item = self._make(index, args)
            if lines_left == 0:
                assert request.transport is not None
                request.transport.abort()
                return response
            if lines_left is not None:
                lines_left -= 1
            await response.write(msgspec.json.encode(item) + b"\n")
        return await self._all_told(response)

    async def _all_told(self, response: web.StreamResponse) -> web.StreamResponse:
        self.told.set()
        if self.hold_answers:
            await asyncio.Event().wait()
        return response

    async def _fork(self, request: web.Request) -> web.StreamResponse:
        parent = self._live(request)
        wanted = await self._body(request, ForkRequest)
        self.forks.append(wanted)
        errors = self.fork_errors.pop(0) if self.fork_errors else {}
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        for index in range(wanted.count):
            key = wanted.idempotency_key if wanted.count == 1 else f"{wanted.idempotency_key}/{index}"
            args = DSecContainerRunArgs(container_image=parent.image, idempotency_key=key)
            item = CreateItem(index=index, error=errors[index].body()) if index in errors else self._make(index, args)
            await response.write(msgspec.json.encode(item) + b"\n")
        return await self._all_told(response)

    def _make(self, index: int, args: RunArgs) -> CreateItem:
        refusals = self.refuse_images.get(args.container_image)
        if refusals:
            return CreateItem(index=index, error=refusals.pop(0).body())
        assert args.idempotency_key is not None
        sandbox_id = self.by_key.setdefault(args.idempotency_key, f"sb-e1-{len(self.by_key):08}")
        info = SandboxInfo(
            id=sandbox_id,
            backend="container",
            state="running",
            image=args.container_image,
            workdir=args.workdir or "/home/me",
            labels=args.labels,
            ports_url="http://ports",
            ports_key="key",
        )
        return CreateItem(index=index, sandbox=self.sandboxes.setdefault(sandbox_id, info))

    async def _list(self, request: web.Request) -> web.Response:
        wanted = [value.split("=", 1) for name, value in parse_qsl(request.query_string) if name == "label"]
        found = [info for info in self.sandboxes.values() if all(info.labels.get(name) == value for name, value in wanted)]
        start, limit = int(request.query.get("cursor", "0")), int(request.query["limit"])
        cursor = str(start + limit) if start + limit < len(found) else None
        return self._answer(request, SandboxPage(sandboxes=found[start : start + limit], cursor=cursor))

    def _info(self, request: web.Request) -> SandboxInfo:
        info = self.sandboxes.get(request.match_info["id"])
        if info is None:
            raise SandboxNotFound("no such sandbox")
        return info

    def _live(self, request: web.Request) -> SandboxInfo:
        info = self._info(request)
        if info.state == "stopped":
            raise SandboxGone("it was stopped", reason="stopped", at=1.0)
        return info

    async def _get(self, request: web.Request) -> web.Response:
        return self._answer(request, self._live(request))

    async def _patch(self, request: web.Request) -> web.Response:
        change = await self._body(request, PatchRequest)
        info = self._info(request)
        info.labels = change.labels if change.labels is not None else info.labels
        info.ttl_total = change.ttl_total if change.ttl_total is not None else info.ttl_total
        return self._answer(request, info)

    async def _stop(self, request: web.Request) -> web.Response:
        info = self._info(request)
        info.state, info.reason, info.ended_at = "stopped", "stopped", 1.0
        self._maybe_cut()
        return self._answer(request, info)

    # -- commands -------------------------------------------------------------------------------------------------------------------------

    async def _exec(self, request: web.Request) -> web.Response:
        self._live(request)
        wanted = await self._body(request, ExecRequest)
        assert wanted.exec_id is not None
        if wanted.exec_id not in self.execs:
            self.execs[wanted.exec_id] = wanted
            self.runs[wanted.exec_id] += 1
            self.stdin_ended[wanted.exec_id] = asyncio.Event()
        self._maybe_cut()
        if wanted.mode == "start":
            return self._answer(request, ProcessInfo(exec_id=wanted.exec_id, pid=7))
        if wanted.stdin_stream and self.stdin_needed:
            await self.stdin_ended[wanted.exec_id].wait()
        return self._answer(request, msgspec.structs.replace(self.result, exec_id=wanted.exec_id))

    async def _shell(self, request: web.Request) -> web.Response:
        self._live(request)
        wanted = await self._body(request, ShellRequest)
        assert wanted.exec_id is not None
        self.shells.append(wanted)
        self.runs[wanted.exec_id] = 1
        self._maybe_cut()
        return self._answer(request, self.result)

    def _known(self, request: web.Request) -> str:
        exec_id = request.match_info["exec"]
        if exec_id not in self.execs:
            raise ProcessNotFound(f"no command {exec_id}")
        return exec_id

    async def _process(self, request: web.Request) -> web.Response:
        exec_id = self._known(request)
        return self._answer(request, ProcessInfo(exec_id=exec_id, pid=7, running=not self.stdin_ended[exec_id].is_set()))

    async def _wait(self, request: web.Request) -> web.Response:
        exec_id = self._known(request)
        await self.stdin_ended[exec_id].wait()
        return self._answer(request, msgspec.structs.replace(self.result, exec_id=exec_id))

    async def _stdout(self, request: web.Request) -> web.StreamResponse:
        self._known(request)
        offset = int(request.query["from_offset"])
        self.output_offsets.append(offset)
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream", "X-DSec-Offset": str(offset)})
        await response.prepare(request)
        end = len(self.output) if not self.cut_output_every else min(len(self.output), offset + self.cut_output_every)
        await response.write(self.output[offset:end])
        if end < len(self.output):
            assert request.transport is not None
            # What was written must be on its way before the connection is torn down.
            request.transport.close()
        return response

    async def _stdin(self, request: web.Request) -> web.Response:
        exec_id = self._known(request)
        async for chunk in request.content.iter_any():
            self.stdin[exec_id] = self.stdin.get(exec_id, b"") + chunk
        if request.query["eof"] == "true":
            self.stdin_ended[exec_id].set()
        return web.Response(status=204)

    async def _signal(self, request: web.Request) -> web.Response:
        exec_id = self._known(request)
        self.signals.append(await self._body(request, SignalRequest))
        self.changes.append(request.headers.get("Idempotency-Key", ""))
        self.stdin_ended[exec_id].set()
        self._maybe_cut()
        return web.Response(status=204)

    # -- files ----------------------------------------------------------------------------------------------------------------------------

    def _file_info(self, path: bytes) -> FileInfo:
        if path in self.directories:
            return FileInfo(path_bytes=path, type="directory", size=0, mode=0o755, uid=0, gid=0, mtime=0.0)
        if path not in self.files:
            raise FileNotFound(os.fsdecode(path), errno=errno.ENOENT)
        return FileInfo(path_bytes=path, type="file", size=len(self.files[path]), mode=0o4755, uid=0, gid=0, mtime=0.0)

    async def _read(self, request: web.Request) -> web.Response:
        path = self.last_query["path"]
        self._file_info(path)
        self._maybe_cut()
        start = int(self.last_query.get("offset", b"0"))
        length = self.last_query.get("length")
        return web.Response(body=self.files[path][start : None if length is None else start + int(length)])

    async def _write(self, request: web.Request) -> web.Response:
        path = self.last_query["path"]
        self.write_begun.set()
        content = b"".join([chunk async for chunk in request.content.iter_any()])
        self.files[path] = self.files.get(path, b"") + content if "append" in self.last_query else content
        self._maybe_cut()
        return self._answer(request, self._file_info(path))

    async def _stat(self, request: web.Request) -> web.Response:
        if self.stat_errno is not None:
            raise InvalidArgument(os.strerror(self.stat_errno), errno=self.stat_errno)
        return self._answer(request, self._file_info(self.last_query["path"]))

    async def _list_files(self, request: web.Request) -> web.Response:
        below = self.last_query["path"].rstrip(b"/") + b"/"
        names = [path for path in sorted(self.files) if path.startswith(below)]
        lines = [msgspec.json.encode(self._file_info(path)) for path in names]
        return web.Response(body=b"\n".join(lines), content_type="application/x-ndjson")

    async def _watch(self, request: web.Request) -> web.Response:
        event = FileEvent(type="created", path_bytes=b"/w/\xff")
        return web.Response(body=msgspec.json.encode(event) + b"\n", content_type="application/x-ndjson")

    async def _tar_out(self, request: web.Request) -> web.Response:
        return web.Response(body=self.tar)

    async def _tar_in(self, request: web.Request) -> web.Response:
        self.tars_put.append(await request.read())
        self._maybe_cut()
        return self._answer(request, TarSummary(entries=1, bytes=1))

    async def _change(self, request: web.Request) -> web.Response:
        self.changes.append(request.headers["Idempotency-Key"])
        self._maybe_cut()
        return web.Response(status=204)

    async def _remove_image(self, request: web.Request) -> web.Response:
        raise Cut

    # -- ports ----------------------------------------------------------------------------------------------------------------------------

    async def _tcp(self, request: web.Request) -> web.StreamResponse:
        if self._live(request).state == "failed":
            raise SandboxFailed("its agent died")
        if request.match_info["port"] == "9":
            raise web.HTTPConflict
        websocket = web.WebSocketResponse()
        await websocket.prepare(request)
        if request.match_info["port"] == "7":
            # Takes the connection and reads nothing.
            await asyncio.Event().wait()
        async for message in websocket:
            assert message.type is WSMsgType.BINARY
            if message.data == b"bye":
                await websocket.close()
            elif message.data == b"break":
                await websocket.close(code=1011, message=b"the sandbox failed")
            else:
                await websocket.send_bytes(message.data)
        return websocket

    async def _url(self, request: web.Request) -> web.Response:
        return self._answer(request, PortUrl(url=f"http://ports/{request.match_info['id']}/{request.match_info['port']}/sig/"))


CAPACITY = NoCapacity("no memory left", reason="memory", retry_after=0.01)
