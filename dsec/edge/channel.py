"""The edge's end of the connection to one chronus: frames, credit, and which frame belongs to whom. `docs/wire.md` is the contract.

It knows nothing of sandboxes, states or HTTP. Thousands of channels live in one process, so an idle one owns no buffer: all read into one
block of memory, and only what is incomplete is copied aside.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable
from typing import cast

import msgspec

from dsec.edge.turns import Turns

MAX_PAYLOAD = 4 << 20
"""The most that a frame may carry: a command line of 1 MiB in one-byte arguments takes three times that much."""
PIECE_BYTES = 256 << 10
"""Standard input travels in pieces of at most this size."""
CREDIT_PIECE = 256 << 10
"""Credit is returned in pieces of at least this size (or when the reader has nothing left to read)."""
READ_BUFFER = bytearray(1 << 20)
"""Where all channels read into: the loop hands each read over before it begins another."""
BACKLOG_PIECES = 16
"""Pieces of output that wait for their reader as they came. Behind them small ones are joined."""
JOINED_BYTES = 4 << 10
"""How large a joined piece gets: the credit may come byte by byte, and a piece takes 140 bytes more than its content."""
WRITE_HIGH = 1 << 20
"""Bytes waiting in the transport above which stdin waits."""

_HEADER = struct.Struct(">IBBIBBQBI")
_PREFIX = 4
_ARRAY_OF_4, _U32, _U64, _BIN32 = 0x94, 0xCE, 0xCF, 0xC6

_START, _STDIN, _STDIN_EOF, _CREDIT, _SIGNAL, _RESIZE, _ATTACH, _DETACH, _LIST, _SHELL, _CLOSE_SESSION, _CONNECT = range(1, 13)
_HELLO, _STARTED, _STDOUT, _STDERR, _STDIN_CREDIT, _EXIT, _ERROR, _LISTING = range(32, 40)

PROTOCOL_VERSION = 1
STDIN_NONE, STDIN_INLINE, STDIN_STREAM = 0, 1, 2
MODE_CAPTURE, MODE_STREAM = 0, 1
LEFTOVERS_KILL, LEFTOVERS_KEEP = 0, 1


class Start(msgspec.Struct, kw_only=True, omit_defaults=True):
    """START: a command (``argv``) or a builtin (``builtin``, ``args``)."""

    exec_id: str = ""
    argv: list[bytes] | None = None
    builtin: str | None = None
    args: dict[str, object] | None = None
    cwd: bytes | None = None
    env: dict[bytes, bytes] = {}
    user: str = ""
    stdin: int = STDIN_NONE
    stdin_data: bytes = b""
    mode: int = MODE_CAPTURE
    follow: bool = True
    """False: no output comes on the stream that starts it, only the exit."""
    max_output: int = 10 << 20
    timeout_ms: int = 0
    leftovers: int = LEFTOVERS_KILL
    pty: tuple[int, int] | None = None
    no_new_privs: bool = False


class Shell(msgspec.Struct, kw_only=True, omit_defaults=True):
    """SHELL: a command in a session. ``base_*`` is for opening the session; ``cwd``, ``env`` and ``user`` are refused on an open one."""

    exec_id: str = ""
    session: str
    command: bytes
    timeout_ms: int = 0
    max_output: int = 10 << 20
    cwd: bytes | None = None
    env: dict[bytes, bytes] | None = None
    user: str | None = None
    no_new_privs: bool = False
    base_env: dict[bytes, bytes] = {}
    base_cwd: bytes | None = None
    base_user: str = ""


class Exit(msgspec.Struct, kw_only=True):
    """EXIT: how a command ended. ``stdout`` and ``stderr`` are what was captured (empty on streams: there it came by ``read``)."""

    exec_id: str = ""
    exit_code: int = 0
    signal: int | None = None
    timed_out: bool = False
    stdout_total: int = 0
    stderr_total: int = 0
    truncated: bool = False
    duration_us: int = 0
    stdout: bytes = b""
    stderr: bytes = b""
    start_error: str | None = None
    start_errno: int = 0
    session_restarted: bool = False


class ExecEntry(msgspec.Struct, kw_only=True):
    """One command of LISTING. ``argv`` is cut to about 1 KB."""

    exec_id: str
    argv: list[bytes] = []
    pid: int = 0
    running: bool = True
    started_ms: int = 0
    stdout_total: int = 0
    stderr_total: int = 0
    exit_code: int | None = None
    capture: bool = True


class ChannelLost(Exception):
    """The connection broke: chronus or its sandbox is dead, or a new connection replaced this one."""


class ChannelError(Exception):
    """An ERROR frame. ``code`` is one of the codes of :mod:`libdsec.errors`; ``errno`` is 0 where the kernel wasn't asked."""

    def __init__(self, code: str, message: str, errno: int = 0) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.errno = errno


class _Attach(msgspec.Struct, kw_only=True):
    exec_id: str
    stdout_from: int | None = None
    stderr_from: int | None = None
    stdin: bool = False


class _Hello(msgspec.Struct):
    running: int = 0


class _Started(msgspec.Struct):
    exec_id: str = ""
    attached: bool = False
    stdout_from: int = 0
    stderr_from: int = 0


class _Error(msgspec.Struct):
    code: str = "unavailable"
    message: str = ""


_encode = msgspec.msgpack.Encoder().encode
_decode_exit = msgspec.msgpack.Decoder(Exit).decode
_decode_hello = msgspec.msgpack.Decoder(_Hello).decode
_decode_started = msgspec.msgpack.Decoder(_Started).decode
_decode_error = msgspec.msgpack.Decoder(_Error).decode
_decode_listing = msgspec.msgpack.Decoder(list[ExecEntry]).decode


def _header(stream: int, kind: int, arg: int, length: int) -> bytes:
    """What comes before a payload of ``length`` bytes, in the widest form."""
    return _HEADER.pack(_HEADER.size - _PREFIX + length, _ARRAY_OF_4, _U32, stream, kind, _U64, arg, _BIN32, length)


def _frame(stream: int, kind: int, arg: int = 0, payload: bytes = b"") -> bytes:
    """One frame."""
    return _header(stream, kind, arg, len(payload)) + payload


class _Receiver:
    """Whoever a stream's frames are for."""

    __slots__ = ()
    counts = True
    """It stands for a command that runs."""
    exec_id = ""

    def receive(self, kind: int, arg: int, payload: memoryview) -> bool:
        """Takes a frame; True: it was the stream's last."""
        raise TypeError("a receiver says what it does with a frame")

    def fail(self, error: Exception) -> None:
        """The stream will get no more frames."""
        raise TypeError("a receiver says what an error means to it")


class _Captured(_Receiver):
    """Waits for the end of a captured command, and puts together output that was too large for EXIT."""

    __slots__ = ("exec_id", "future", "pieces")

    def __init__(self, future: asyncio.Future[Exit], exec_id: str) -> None:
        self.exec_id = exec_id
        self.future = future
        self.pieces: tuple[list[bytes], list[bytes]] | None = None

    def receive(self, kind: int, arg: int, payload: memoryview) -> bool:
        if kind == _EXIT:
            exit = _decode_exit(payload)
            if self.pieces is not None:
                exit.stdout, exit.stderr = b"".join(self.pieces[0]), b"".join(self.pieces[1])
            if not self.future.done():
                self.future.set_result(exit)
            return True
        if kind in (_STDOUT, _STDERR):
            if self.pieces is None:
                self.pieces = ([], [])
            self.pieces[kind - _STDOUT].append(bytes(payload))
            return False
        if kind == _ERROR:
            self.fail(_channel_error(arg, payload))
            return True
        return False

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class _Watch(_Receiver):
    """Stands for a command that nobody here follows any more, until it ends."""

    __slots__ = ("exec_id",)

    def __init__(self, exec_id: str) -> None:
        self.exec_id = exec_id

    def receive(self, kind: int, arg: int, payload: memoryview) -> bool:
        return kind in (_EXIT, _ERROR)

    def fail(self, error: Exception) -> None:
        """Nobody waits for it."""


class _Answer(_Receiver):
    """Waits for one LISTING."""

    __slots__ = ("future", "listed")
    counts = False

    def __init__(self, future: asyncio.Future[list[ExecEntry]], listed: Callable[[list[ExecEntry]], None]) -> None:
        """``listed`` is told the entries at once: frames behind this one may say of one that it has ended."""
        self.future = future
        self.listed = listed

    def receive(self, kind: int, arg: int, payload: memoryview) -> bool:
        if kind == _LISTING:
            entries = _decode_listing(payload)
            self.listed(entries)
            if not self.future.done():
                self.future.set_result(entries)
        elif kind == _ERROR:
            self.fail(_channel_error(arg, payload))
        return True

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


def _channel_error(errno: int, payload: memoryview) -> ChannelError:
    error = _decode_error(payload)
    return ChannelError(error.code, error.message, errno)


class Stream(_Receiver):
    """A command that is followed, or a connection to a port. One task may read and another write."""

    __slots__ = (
        "_channel",
        "_chunks",
        "_credit",
        "_error",
        "_exit",
        "_readable",
        "_started",
        "_taken",
        "_turns",
        "_writable",
        "attached",
        "counts",
        "exec_id",
        "id",
        "pid",
        "stderr_from",
        "stdout_from",
    )

    def __init__(self, channel: Channel, stream: int, exec_id: str, *, is_command: bool = True) -> None:
        self.counts = is_command
        self._channel = channel
        self.id = stream
        self._started: asyncio.Future[None] | None = channel.loop.create_future()
        self._chunks: deque[tuple[int, int, bytes]] = deque()
        self._taken = [0, 0, 0]
        self._turns = Turns()
        self._exit: Exit | None = None
        self._error: Exception | None = None
        self._credit = 0
        self._readable: list[asyncio.Future[None]] = []
        self._writable: asyncio.Future[None] | None = None
        self.exec_id = exec_id
        self.attached = False
        """It follows a command that was there before."""
        self.pid = 0
        self.stdout_from = 0
        self.stderr_from = 0

    def receive(self, kind: int, arg: int, payload: memoryview) -> bool:
        if kind in (_STDOUT, _STDERR):
            self._keep(kind - _STDOUT + 1, arg, bytes(payload))
        elif kind == _STDIN_CREDIT:
            self._credit += arg
            _wake_one(self._writable)
            return False
        elif kind == _STARTED:
            started = _decode_started(payload)
            self.exec_id = started.exec_id or self.exec_id
            self.attached = started.attached
            self.pid, self.stdout_from, self.stderr_from = arg, started.stdout_from, started.stderr_from
            self._announce()
            return False
        elif kind == _EXIT:
            self._end(_decode_exit(payload))
        elif kind == _ERROR:
            self.fail(_channel_error(arg, payload))
        self._wake_readers()
        return kind in (_EXIT, _ERROR)

    def _keep(self, source: int, offset: int, data: bytes) -> None:
        """Sets output aside for the reader."""
        if len(self._chunks) >= BACKLOG_PIECES:
            newest = -1 if self._chunks[-1][0] == source else -2
            of, begin, before = self._chunks[newest]
            if of == source and len(before) + len(data) <= JOINED_BYTES:
                self._chunks[newest] = (source, begin, before + data)
                return
        self._chunks.append((source, offset, data))

    def _end(self, exit: Exit) -> None:
        """Output of a captured command that stands in its EXIT is read like any other."""
        for source, data in ((1, exit.stdout), (2, exit.stderr)):
            if data:
                self._chunks.append((source, 0, data))
        exit.stdout = exit.stderr = b""
        self._exit = exit
        self._announce()
        _wake_one(self._writable)

    def fail(self, error: Exception) -> None:
        if self._exit is not None or self._error is not None:
            return
        self._error = error
        if self._started is not None and not self._started.done():
            self._started.set_exception(error)
            # Nobody may be waiting for it any more.
            self._started.exception()
        _wake_one(self._writable)
        self._wake_readers()

    def _announce(self) -> None:
        if self._started is not None and not self._started.done():
            self._started.set_result(None)

    async def started(self) -> Stream:
        """Returns itself once the command runs."""
        try:
            if self._started is not None:
                await self._started
        except asyncio.CancelledError:
            self.detach()
            raise
        self._started = None
        return self

    def _wake_readers(self) -> None:
        waiting, self._readable = self._readable, []
        for future in waiting:
            _wake_one(future)

    async def _wait_readable(self) -> None:
        future = self._channel.loop.create_future()
        self._readable.append(future)
        try:
            await future
        finally:
            if future in self._readable:
                self._readable.remove(future)

    async def read(self) -> tuple[int, int, bytes] | None:
        """The next piece of output: (1 stdout or 2 stderr, byte offset, data); None when the command has ended and all was read.

        What the previous call returned counts as taken from now on. Raises ChannelLost, or ChannelError where chronus ended the stream
        (``offset_gone``, say).
        """
        while not self._chunks:
            self._return_credit(1)
            if self._error is not None:
                raise self._error
            if self._exit is not None:
                return None
            await self._wait_readable()
        # A large piece is as much work as many small ones, for whoever decodes it.
        await self._turns.count(1 + len(self._chunks[0][2]) // JOINED_BYTES)
        self._return_credit(CREDIT_PIECE)
        chunk = self._chunks.popleft()
        self._taken[chunk[0]] += len(chunk[2])
        return chunk

    def _return_credit(self, least: int) -> None:
        if self._exit is not None or self._error is not None:
            return
        for source in (1, 2):
            if self._taken[source] >= least:
                self._channel.send(_frame(self.id, _CREDIT, self._taken[source], b"\x01" if source == 1 else b"\x02"))
                self._taken[source] = 0

    async def write(self, data: bytes | memoryview) -> None:
        """Sends standard input, which must not change any more; returns when all is handed to the connection. What nobody reads is
        swallowed, also after the end.

        Raises ChannelLost.
        """
        view = memoryview(data).cast("B")
        while view:
            await self._channel.drained()
            if self._error is not None:
                raise self._error
            if self._exit is not None:
                return
            if self._credit == 0:
                await self._wait_writable()
                continue
            count = min(self._credit, len(view), PIECE_BYTES)
            self._credit -= count
            self._channel.send(_header(self.id, _STDIN, 0, count), view[:count])
            view = view[count:]

    async def _wait_writable(self) -> None:
        self._writable = self._channel.loop.create_future()
        try:
            await self._writable
        finally:
            self._writable = None

    async def write_eof(self) -> None:
        """Nothing more comes on standard input."""
        if self._exit is None:
            if self._error is not None:
                raise self._error
            self._channel.send(_frame(self.id, _STDIN_EOF))

    async def wait(self) -> Exit:
        """How it ended. Output that is not read holds the end up once the credit is used up: read it, or start with ``follow=False``."""
        while self._exit is None:
            if self._error is not None:
                raise self._error
            await self._wait_readable()
        return self._exit

    async def signal(self, number: int, tree: bool = False) -> None:
        """Signals the leader's process group; with ``tree`` (SIGKILL only) every process of the command."""
        if self._exit is None:
            self._channel.send(_frame(self.id, _SIGNAL, number, b"tree" if tree else b""))

    async def resize(self, rows: int, cols: int) -> None:
        if self._exit is None:
            self._channel.send(_frame(self.id, _RESIZE, rows << 16 | cols))

    def detach(self) -> None:
        """Stops following; the command goes on. Idempotent."""
        self._channel.release(self.id, self.exec_id)
        self.fail(ChannelError("conflict", "this stream was detached"))


def _wake_one(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)


class Channel(asyncio.BufferedProtocol):
    """A connection to one chronus. Only one exists at a time: connecting again makes the earlier one lose."""

    __slots__ = (
        "_filled",
        "_hello",
        "_incomplete",
        "_last_stream",
        "_lost",
        "_on_lost",
        "_prefix",
        "_resumed",
        "_streams",
        "_transport",
        "_unlisted",
        "_unseen",
        "loop",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, on_lost: Callable[[ChannelLost], None]) -> None:
        self.loop = loop
        self._on_lost: Callable[[ChannelLost], None] | None = on_lost
        self._transport: asyncio.Transport | None = None
        self._hello: asyncio.Future[None] | None = loop.create_future()
        self._streams: dict[int, _Receiver] = {}
        self._last_stream = 0
        self._prefix = b""
        self._incomplete: bytearray | None = None
        self._filled = 0
        self._lost: ChannelLost | None = None
        self._resumed: asyncio.Future[None] | None = None
        self._unlisted = 0
        """Commands that HELLO counted, until a listing names them."""
        self._unseen: frozenset[str] = frozenset()
        """Those that ran when they were listed and were not seen to end since."""

    @classmethod
    async def connect(cls, path: str, *, on_lost: Callable[[ChannelLost], None], timeout_s: float = 5) -> Channel:
        """Connects to the Unix socket and waits for HELLO.

        ``on_lost`` is called once if the connection breaks later (not after ``close``). Raises ChannelLost when there is no connection or
        no HELLO within ``timeout_s`` seconds.
        """
        loop = asyncio.get_running_loop()
        channel = cls(loop, on_lost)
        try:
            async with asyncio.timeout(timeout_s):
                await loop.create_unix_connection(lambda: channel, path)
                if channel._hello is not None:
                    await channel._hello
            if channel._lost is not None:
                # Right behind HELLO: on_lost was not called.
                raise channel._lost
        except (OSError, TimeoutError, ChannelLost) as error:
            channel.close()
            raise ChannelLost(f"no chronus at {path}: {error or 'no HELLO in time'}") from error
        except BaseException:
            channel.close()
            raise
        channel._hello = None
        return channel

    @property
    def running(self) -> int:
        """Commands that have not ended, as far as is known here: those that this connection started or follows, and those that the last
        ``list`` showed (until there is one: that HELLO counted) besides. Of the latter an end is not seen."""
        followed = {receiver.exec_id or id(receiver) for receiver in self._streams.values() if receiver.counts}
        return self._unlisted + len(self._unseen | followed if self._unseen else followed)

    async def run(self, start: Start) -> Exit:
        """Runs a captured command to its end. Cancelling lets go of it: a command goes on, a builtin is killed.

        Raises ChannelLost; ChannelError where the request is refused. A command that can't be started is an Exit with ``start_error``.
        """
        return await self._captured(_START, _encode(start), start.exec_id)

    async def shell(self, shell: Shell) -> Exit:
        """Runs a command in a session; raises as ``run``, and ChannelError ``invalid_argument`` for cwd, env or user on an open session."""
        return await self._captured(_SHELL, _encode(shell), shell.exec_id)

    async def close_session(self, session: str) -> None:
        """Kills a session with its children; one that isn't open is closed already."""
        await self._captured(_CLOSE_SESSION, _encode({"session": session}), "")

    async def _captured(self, kind: int, payload: bytes, exec_id: str) -> Exit:
        _check_size(payload)
        future: asyncio.Future[Exit] = self.loop.create_future()
        stream = self._open(_Captured(future, exec_id))
        self.send(_frame(stream, kind, 0, payload))
        try:
            return await future
        except asyncio.CancelledError:
            self.release(stream, exec_id)
            raise

    async def start(self, start: Start, *, follow: bool = False) -> Stream:
        """Starts a command and returns once it runs. With ``follow`` its output comes by ``read``; without, only its exit.

        Raises as ``run``.
        """
        start = msgspec.structs.replace(start, follow=follow)
        payload = _encode(start)
        _check_size(payload)
        return await self._stream(_START, 0, payload, start.exec_id)

    async def attach(self, exec_id: str, *, stdout_from: int | None = None, stderr_from: int | None = None, stdin: bool = False) -> Stream:
        """Follows a command that exists, each output from a byte offset on (None: not at all), with ``stdin`` also writing to it.

        Raises ChannelError ``process_not_found``, ``offset_gone``, ``invalid_argument`` (an offset beyond the end); ChannelLost.
        """
        request = _Attach(exec_id=exec_id, stdout_from=stdout_from, stderr_from=stderr_from, stdin=stdin)
        return await self._stream(_ATTACH, 0, _encode(request), exec_id)

    async def open_port(self, port: int, host: bytes = b"") -> Stream:
        """Connects to a TCP port inside; ``host`` is an IP address, empty: this sandbox itself. ``read`` gives what comes as source 1.

        Raises ChannelError with the kernel's errno where nobody listens; ChannelLost.
        """
        return await self._stream(_CONNECT, port, host, "", is_command=False)

    async def _stream(self, kind: int, arg: int, payload: bytes, exec_id: str, *, is_command: bool = True) -> Stream:
        if self._lost is not None:
            raise self._lost
        stream = Stream(self, self._next_stream(), exec_id, is_command=is_command)
        self._streams[stream.id] = stream
        self.send(_frame(stream.id, kind, arg, payload))
        return await stream.started()

    def _listed(self, entries: list[ExecEntry]) -> None:
        self._unlisted = 0
        self._unseen = frozenset(entry.exec_id for entry in entries if entry.running)

    async def list(self) -> list[ExecEntry]:
        """The commands that run and those that are kept after their end, oldest first."""
        future: asyncio.Future[list[ExecEntry]] = self.loop.create_future()
        stream = self._open(_Answer(future, self._listed))
        self.send(_frame(stream, _LIST))
        try:
            return await future
        except asyncio.CancelledError:
            self._streams.pop(stream, None)
            raise

    async def signal(self, exec_id: str, number: int, *, tree: bool = False) -> None:
        """Signals a command's process group, or with ``tree`` (SIGKILL only) all of its processes. One that has ended gets nothing.

        Raises ChannelError ``process_not_found``; ChannelLost.
        """
        await self._poke(exec_id, _SIGNAL, number, b"tree" if tree else b"")

    async def resize(self, exec_id: str, rows: int, cols: int) -> None:
        """Changes the size of a command's terminal; raises as ``signal``."""
        await self._poke(exec_id, _RESIZE, rows << 16 | cols, b"")

    async def _poke(self, exec_id: str, kind: int, arg: int, payload: bytes) -> None:
        """Attaches for as long as one frame takes; all are sent at once, in order."""
        if self._lost is not None:
            raise self._lost
        stream = Stream(self, self._next_stream(), exec_id, is_command=False)
        self._streams[stream.id] = stream
        attach = _frame(stream.id, _ATTACH, 0, _encode(_Attach(exec_id=exec_id)))
        self.send(attach + _frame(stream.id, kind, arg, payload) + _frame(stream.id, _DETACH))
        try:
            await stream.started()
        finally:
            self._streams.pop(stream.id, None)

    def close(self) -> None:
        """Closes the connection; commands go on. What is pending fails with ChannelLost. Idempotent."""
        self._on_lost = None
        self._lose(ChannelLost("this channel was closed"))

    # ---- streams

    def _next_stream(self) -> int:
        stream = self._last_stream % 0xFFFFFFFF + 1
        while stream in self._streams:
            stream = stream % 0xFFFFFFFF + 1
        self._last_stream = stream
        return stream

    def _open(self, receiver: _Receiver) -> int:
        if self._lost is not None:
            raise self._lost
        stream = self._next_stream()
        self._streams[stream] = receiver
        return stream

    def release(self, stream: int, exec_id: str) -> None:
        """Detaches a stream that may not have ended. A command that can be found again is watched to its end, for ``running``."""
        receiver = self._streams.pop(stream, None)
        if receiver is None or self._lost is not None:
            return
        frames = _frame(stream, _DETACH)
        if exec_id and receiver.counts and all(other.exec_id != exec_id for other in self._streams.values()):
            watch = self._open(_Watch(exec_id))
            frames += _frame(watch, _ATTACH, 0, _encode(_Attach(exec_id=exec_id)))
        self.send(frames)

    def send(self, *pieces: bytes | memoryview) -> None:
        """Hands frames to the transport, which keeps what it can't write at once: no piece may change later. Raises ChannelLost."""
        if self._lost is not None or self._transport is None:
            raise self._lost or ChannelLost("not connected")
        self._transport.writelines(pieces)

    async def drained(self) -> None:
        """Returns when the transport takes more."""
        while self._resumed is not None:
            await asyncio.shield(self._resumed)

    # ---- the protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_HIGH)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose(ChannelLost(f"the connection to chronus broke: {exc or 'closed by the other side'}"))

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        if self._resumed is None:
            self._resumed = self.loop.create_future()

    def resume_writing(self) -> None:
        resumed, self._resumed = self._resumed, None
        _wake_one(resumed)

    def _lose(self, error: ChannelLost) -> None:
        if self._lost is not None:
            return
        self._lost = error
        if self._transport is not None:
            self._transport.abort()
        streams, self._streams = self._streams, {}
        for receiver in streams.values():
            receiver.fail(error)
        self.resume_writing()
        self._unlisted, self._unseen = 0, frozenset()
        if self._hello is not None and not self._hello.done():
            self._hello.set_exception(error)
            # Nobody may be waiting for it any more.
            self._hello.exception()
        on_lost, self._on_lost = self._on_lost, None
        if on_lost is not None and self._hello is None:
            on_lost(error)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._incomplete is not None:
            return memoryview(self._incomplete)[self._filled :]
        kept = len(self._prefix)
        READ_BUFFER[:kept] = self._prefix
        return memoryview(READ_BUFFER)[kept:]

    def buffer_updated(self, nbytes: int) -> None:
        try:
            if self._incomplete is None:
                end = len(self._prefix) + nbytes
                self._prefix = b""
                self._parse(memoryview(READ_BUFFER)[:end])
                return
            self._filled += nbytes
            if self._filled == len(self._incomplete):
                frame, self._incomplete = self._incomplete, None
                self._parse(memoryview(frame))
        except (ValueError, msgspec.MsgspecError) as error:
            self._lose(ChannelLost(f"chronus sent what is no frame: {error}"))

    def _parse(self, data: memoryview) -> None:
        """Hands each whole frame over, and sets what is left of ``data`` aside."""
        position, end = 0, len(data)
        while end - position >= _HEADER.size:
            length, array, t1, stream, kind, t2, arg, t3, size = _HEADER.unpack_from(data, position)
            if (array, t1, t2, t3) != (_ARRAY_OF_4, _U32, _U64, _BIN32) or size > MAX_PAYLOAD or length != _HEADER.size - _PREFIX + size:
                raise ValueError("a frame's header is malformed")
            start = position + _HEADER.size
            if start + size > end:
                self._incomplete = bytearray(_HEADER.size + size)
                self._filled = end - position
                self._incomplete[: self._filled] = data[position:]
                return
            position = start + size
            self._dispatch(stream, kind, arg, data[start:position])
        self._prefix = bytes(data[position:])

    def _dispatch(self, stream: int, kind: int, arg: int, payload: memoryview) -> None:
        if kind == _HELLO:
            if arg != PROTOCOL_VERSION:
                raise ValueError(f"protocol version {arg}")
            self._unlisted = _decode_hello(payload).running
            _wake_one(self._hello)
            return
        # What still comes on a stream that was let go of is for nobody.
        receiver = self._streams.get(stream)
        if receiver is not None and receiver.receive(kind, arg, payload):
            self._streams.pop(stream, None)
            if receiver.exec_id in self._unseen and (kind == _EXIT or _decode_error(payload).code == "process_not_found"):
                self._unseen -= {receiver.exec_id}


def _check_size(payload: bytes) -> None:
    if len(payload) > MAX_PAYLOAD:
        raise ChannelError("invalid_argument", f"the request takes {len(payload)} bytes, more than {MAX_PAYLOAD}")
