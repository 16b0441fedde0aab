"""Files of a sandbox: every operation is a builtin of chronus that runs with the sandbox user's rights."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

import msgspec

from dsec.edge.call import MSGPACK, NDJSON, OCTETS, Call
from dsec.edge.channel import MODE_CAPTURE, MODE_STREAM, STDIN_INLINE, STDIN_NONE, STDIN_STREAM, Channel, Start, Stream
from dsec.edge.exec import INLINE_STDIN_MAX
from dsec.edge.failures import of_builtin, of_complaint
from dsec.edge.ids import new_exec_id
from dsec.edge.sandbox import Sandbox
from dsec.edge.sandboxes import Sandboxes
from dsec.edge.sequence import Sequence
from dsec.edge.validation import PATH_MAX, check_user
from libdsec.errors import FileError, InvalidArgument
from libdsec.schema import FileEvent, FileInfo, TarSummary

STDERR, STDOUT = 2, 1
COMPLAINT_MAX = 64 << 10
"""Bytes kept of what a builtin writes to stderr: one map."""
SIGKILL = 9
ANSWER_MAX = 1 << 20
"""Bytes of a short answer (stat, size)."""

_to_json = msgspec.json.Encoder().encode
_to_msgpack = msgspec.msgpack.Encoder().encode


class _FileMap(msgspec.Struct):
    """A file as chronus describes it."""

    path: bytes
    type: Literal["file", "directory", "symlink", "fifo", "socket", "char", "block"]
    size: int
    mode: int
    uid: int
    gid: int
    mtime: float
    nlink: int = 1
    target: bytes | None = None

    def info(self) -> FileInfo:
        return FileInfo(
            path_bytes=self.path,
            type=self.type,
            size=self.size,
            mode=self.mode,
            uid=self.uid,
            gid=self.gid,
            mtime=self.mtime,
            nlink=self.nlink,
            target_bytes=self.target,
        )


class _EventMap(msgspec.Struct):
    """A change as chronus describes it."""

    type: Literal["created", "modified", "removed", "moved_from", "moved_to", "attributes", "overflow"]
    path: bytes = b""

    def info(self) -> FileEvent:
        return FileEvent(type=self.type, path_bytes=self.path)


_file_map = msgspec.msgpack.Decoder(_FileMap)
_tar_summary = msgspec.msgpack.Decoder(TarSummary)


class Files:
    """The routes below ``…/files``."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes

    async def read(self, call: Call, sandbox: Sandbox) -> None:
        """GET …/files"""
        path, user = _path(call), _user(call, sandbox)
        length = call.integer("length", -1) if call.query("length") is not None else None
        args: dict[str, object] = {"path": path, "offset": call.integer("offset", 0), "length": length}
        channel = await self._sandboxes.agents.channel(sandbox)
        async with _builtin(channel, "read", args, user) as reading:
            # The first piece comes before the answer begins: an error is then still an error.
            piece = await reading.next()
            size = (await self._stat(channel, path, user, follow=True)).size
            await call.begin(OCTETS, [(b"x-dsec-size", b"%d" % size)])
            async with call.until_disconnect():
                while piece is not None:
                    await call.send(piece)
                    piece = await reading.next()
        await call.end()

    async def write(self, call: Call, sandbox: Sandbox) -> None:
        """PUT …/files"""
        path, user = _path(call), _user(call, sandbox)
        args: dict[str, object] = {
            "path": path,
            "mode": _mode(call, None),
            "append": call.flag("append"),
            "parents": call.flag("parents", True),
            "exclusive": call.flag("exclusive"),
        }
        channel = await self._sandboxes.agents.channel(sandbox)
        length = call.header(b"content-length")
        if length is not None and int(length) <= INLINE_STDIN_MAX:
            await self._run(channel, "write", args, user, await call.body())
        else:
            await self._put(call, channel, "write", args, user)
        await call.reply((await self._stat(channel, path, user, follow=True)).info())

    async def stat(self, call: Call, sandbox: Sandbox) -> None:
        """GET …/files/stat"""
        channel = await self._sandboxes.agents.channel(sandbox)
        found = await self._stat(channel, _path(call), _user(call, sandbox), follow=call.flag("follow"))
        await call.reply(found.info())

    async def list(self, call: Call, sandbox: Sandbox) -> None:
        """GET …/files/list"""
        args: dict[str, object] = {"path": _path(call), "recursive": call.flag("recursive")}
        if call.query("limit") is not None:
            args["limit"] = call.integer("limit", 0, least=1)
        await self._pass_sequence(call, sandbox, "list", args, Sequence(_FileMap))

    async def watch(self, call: Call, sandbox: Sandbox) -> None:
        """GET …/files/watch"""
        path = _path(call)
        # What can't be watched is refused before the answer begins.
        await self._stat(await self._sandboxes.agents.channel(sandbox), path, _user(call, sandbox), follow=True)
        args: dict[str, object] = {"path": path, "recursive": call.flag("recursive")}
        await self._pass_sequence(call, sandbox, "watch", args, Sequence(_EventMap))

    async def mkdir(self, call: Call, sandbox: Sandbox) -> None:
        """POST …/files/mkdir"""
        args: dict[str, object] = {"path": _path(call), "parents": call.flag("parents", True), "mode": _mode(call, 0o777)}
        await self._do(call, sandbox, "mkdir", args)

    async def move(self, call: Call, sandbox: Sandbox) -> None:
        """POST …/files/move"""
        await self._do(call, sandbox, "move", {"path": _path(call), "to": _path(call, "to")})

    async def remove(self, call: Call, sandbox: Sandbox) -> None:
        """POST …/files/remove"""
        await self._do(call, sandbox, "remove", {"path": _path(call), "recursive": call.flag("recursive")})

    async def chmod(self, call: Call, sandbox: Sandbox) -> None:
        """POST …/files/chmod"""
        mode = _mode(call, None)
        if mode is None:
            raise InvalidArgument("mode (octal) is needed", field="mode")
        await self._do(call, sandbox, "chmod", {"path": _path(call), "mode": mode})

    async def chown(self, call: Call, sandbox: Sandbox) -> None:
        """POST …/files/chown"""
        owner = call.text("owner")
        if owner is None:
            raise InvalidArgument("owner is needed", field="owner")
        check_user("owner", owner)
        await self._do(call, sandbox, "chown", {"path": _path(call), "owner": owner})

    async def tar_out(self, call: Call, sandbox: Sandbox) -> None:
        """GET …/files/tar"""
        channel = await self._sandboxes.agents.channel(sandbox)
        async with _builtin(channel, "tar_out", {"path": _path(call), "name": call.query("name")}, _user(call, sandbox)) as reading:
            piece = await reading.next()
            await call.begin(b"application/x-tar")
            async with call.until_disconnect():
                while piece is not None:
                    await call.send(piece)
                    piece = await reading.next()
        await call.end()

    async def tar_in(self, call: Call, sandbox: Sandbox) -> None:
        """PUT …/files/tar"""
        channel = await self._sandboxes.agents.channel(sandbox)
        args: dict[str, object] = {"path": _path(call), "parents": call.flag("parents", True)}
        answer = await self._put(call, channel, "tar_in", args, _user(call, sandbox))
        await call.reply(_tar_summary.decode(answer))

    async def _do(self, call: Call, sandbox: Sandbox, name: str, args: dict[str, object]) -> None:
        channel = await self._sandboxes.agents.channel(sandbox)
        await self._run(channel, name, args, _user(call, sandbox))
        await call.reply_empty()

    async def _run(self, channel: Channel, name: str, args: dict[str, object], user: str, stdin: bytes | None = None) -> bytes:
        start = _start(name, args, user, MODE_CAPTURE)
        if stdin is not None:
            start.stdin, start.stdin_data = STDIN_INLINE, stdin
        exit = await channel.run(start)
        if exit.exit_code != 0:
            raise of_builtin(exit, _what(name, args))
        return exit.stdout

    async def _stat(self, channel: Channel, path: bytes, user: str, *, follow: bool) -> _FileMap:
        return _file_map.decode(await self._run(channel, "stat", {"path": path, "follow": follow}, user))

    async def _put(self, call: Call, channel: Channel, name: str, args: dict[str, object], user: str) -> bytes:
        """Streams the body into a builtin and returns its answer. A client that goes away ends it: nothing of the file is kept."""
        async with _builtin(channel, name, args, user, stdin=True) as writing:
            await writing.take(call.chunks())
            answer = bytearray()
            while (piece := await writing.next()) is not None:
                answer += piece
                if len(answer) > ANSWER_MAX:
                    raise FileError(f"{name} answered more than {ANSWER_MAX} bytes")
            return bytes(answer)

    async def _pass_sequence(
        self, call: Call, sandbox: Sandbox, name: str, args: dict[str, object], values: Sequence[_FileMap] | Sequence[_EventMap]
    ) -> None:
        """Streams what a builtin finds, one value a line (or one msgpack value after the other)."""
        msgpack = call.accepts_msgpack() and NDJSON not in (call.header(b"accept") or b"")
        encode, tail = (_to_msgpack, b"") if msgpack else (_to_json, b"\n")
        channel = await self._sandboxes.agents.channel(sandbox)
        async with _builtin(channel, name, args, _user(call, sandbox)) as reading:
            # A watch may have nothing to tell for long: its answer begins at once.
            piece = b"" if name == "watch" else await reading.next()
            await call.begin(MSGPACK if msgpack else NDJSON)
            async with call.until_disconnect():
                while piece is not None:
                    if found := values.feed(piece):
                        await call.send(b"".join([encode(value.info()) + tail for value in found]))
                    piece = await reading.next()
        await call.end()


class _Running:
    """A builtin that streams: its output piece by piece, and its failure as an error."""

    def __init__(self, stream: Stream, what: str) -> None:
        self.ended = False
        self._stream = stream
        self._what = what
        self._complaint = bytearray()

    async def next(self) -> bytes | None:
        """The next piece of output; None: that was all. Raises what the builtin complains of."""
        while (piece := await self._stream.read()) is not None:
            if piece[0] == STDOUT:
                return piece[2]
            if len(self._complaint) < COMPLAINT_MAX:
                self._complaint += piece[2]
        exit = await self._stream.wait()
        self.ended = True
        if exit.exit_code == 0:
            return None
        if exit.start_error is not None or not self._complaint:
            raise of_builtin(exit, self._what)
        raise of_complaint(bytes(self._complaint), self._what)

    async def take(self, chunks: AsyncIterator[bytes]) -> None:
        """Sends the input, and its end. A builtin that has ended meanwhile says why in :meth:`next`."""
        async for chunk in chunks:
            await self._stream.write(chunk)
        await self._stream.write_eof()


@asynccontextmanager
async def _builtin(channel: Channel, name: str, args: dict[str, object], user: str, *, stdin: bool = False) -> AsyncIterator[_Running]:
    """A builtin in stream mode; one that hasn't ended when the block is left is killed."""
    start = _start(name, args, user, MODE_STREAM)
    start.stdin = STDIN_STREAM if stdin else STDIN_NONE
    stream = await channel.start(start, follow=True)
    running = _Running(stream, _what(name, args))
    try:
        yield running
    finally:
        if not running.ended:
            await stream.signal(SIGKILL)
        stream.detach()


def _start(name: str, args: dict[str, object], user: str, mode: int) -> Start:
    return Start(exec_id=new_exec_id(), builtin=name, args=args, user=user, mode=mode, max_output=ANSWER_MAX)


def _what(name: str, args: dict[str, object]) -> str:
    path = args.get("path", b"")
    return f"{name} {os.fsdecode(path)!r}" if isinstance(path, bytes) else name


def _path(call: Call, name: str = "path") -> bytes:
    path = call.query(name)
    if not path:
        raise InvalidArgument(f"{name} is needed", field=name)
    if b"\0" in path or len(path) > PATH_MAX:
        raise InvalidArgument(f"{name} is no path: it has a NUL, or more than {PATH_MAX} bytes", field=name)
    return path


def _user(call: Call, sandbox: Sandbox) -> str:
    user = call.text("user")
    if user is None:
        return sandbox.record.init_user
    check_user("user", user)
    return user


def _mode(call: Call, default: int | None) -> int | None:
    text = call.query("mode")
    if text is None:
        return default
    try:
        mode = int(text, 8)
    except ValueError:
        raise InvalidArgument("mode is no octal number", field="mode") from None
    if not 0 <= mode <= 0o7777:
        raise InvalidArgument("mode must be between 0 and 7777 (octal)", field="mode")
    return mode
