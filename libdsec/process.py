"""A command that was started in a sandbox: its output as streams, its input, its end."""

from __future__ import annotations

import asyncio
import secrets
import signal as signals
from collections.abc import AsyncGenerator, AsyncIterator

from libdsec.durations import check_timeout
from libdsec.errors import DeadlineExceeded, InvalidArgument, Unavailable
from libdsec.ids import exec_path
from libdsec.schema import CommandResult, ProcessInfo, PtySize, SignalRequest
from libdsec.streams import ByteSource, body_of
from libdsec.transport import OCTETS, Answer, Transport, encode

_command_result = Answer(CommandResult)
_process_info = Answer(ProcessInfo)


class OutputStream:
    """One output stream of a command, addressed by byte offset.

    ``async for chunk in stream`` yields bytes from where the last iteration stopped (at first: the beginning) until the command has ended
    and everything was read. A connection that breaks is made again at the same offset, unseen by the caller. The command blocks once 1 MiB
    waits to be read; nothing is dropped. What was sent stays readable in a window of 8 MiB.

    Iterating raises OffsetGone (the offset has left that window), InvalidArgument (it is beyond what was written), ProcessNotFound,
    SandboxGone, SandboxFailed, and Unavailable when the server can't be reached for a minute. Iterating again is safe.
    """

    def __init__(self, transport: Transport, path: str, offset: int = 0) -> None:
        self._transport = transport
        self._path = path
        self._offset = offset

    @property
    def offset(self) -> int:
        """Offset of the next byte that iteration yields."""
        return self._offset

    def __call__(self, *, from_offset: int) -> OutputStream:
        """A second, independent reader of the same stream, beginning at byte ``from_offset``."""
        return OutputStream(self._transport, self._path, from_offset)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._chunks()

    async def read(self) -> bytes:
        """Everything from the current offset to the end of the stream. Raises what iteration raises; repeating it is safe."""
        return b"".join([chunk async for chunk in self])

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        clock = asyncio.get_running_loop().time
        retry = self._transport.retry()
        while True:
            started = clock()
            try:
                url = self._transport.at(self._path, {"from_offset": self._offset})
                async with self._transport.request("GET", url, headers={"Accept": OCTETS}) as response:
                    self._offset = int(response.headers.get("X-DSec-Offset", self._offset))
                    async for chunk in response.content.iter_any():
                        self._offset += len(chunk)
                        yield chunk
                return
            except Unavailable as error:
                delay = retry.delay(error, attempt_started=started, now=clock())
                if delay is None:
                    raise
            await asyncio.sleep(delay)


class Process:
    """A command started by :meth:`Sandbox.start`, or found again by :meth:`Sandbox.process`. It runs on whether or not anybody follows
    it. Every call may raise what any call of a :class:`Sandbox` may; the docstrings name what comes on top."""

    def __init__(self, transport: Transport, sandbox_path: str, info: ProcessInfo) -> None:
        self._transport = transport
        self._path = exec_path(sandbox_path, info.exec_id)
        self._stdin_turn = asyncio.Lock()
        self._started_as = info
        self.stdout = OutputStream(transport, f"{self._path}/stdout")
        """Standard output (with a PTY: everything)."""
        self.stderr = OutputStream(transport, f"{self._path}/stderr")
        """Standard error (empty with a PTY)."""

    @property
    def exec_id(self) -> str:
        """The command's id: any client of the project finds it again by this."""
        return self._started_as.exec_id

    @property
    def pid(self) -> int:
        """The leader's process id inside the sandbox."""
        return self._started_as.pid

    def __repr__(self) -> str:
        return f"<Process {self.exec_id} pid={self.pid}>"

    async def info(self) -> ProcessInfo:
        """How the command stands now. Raises ProcessNotFound, SandboxGone. Safe to repeat."""
        return await self._transport.call("GET", self._transport.at(self._path), _process_info)

    async def write_stdin(self, data: ByteSource) -> None:
        """Write to the command's standard input and wait until it is taken over; blocks while the command doesn't read.

        ``data``: bytes, str (sent as UTF-8) or an async iterable of bytes. Concurrent calls are carried out one after the other. What comes
        behind the end of the input, or of the command, is dropped. Raises ProcessNotFound, what an iterable raises, and Unavailable (the
        connection broke: how much arrived is unknown). Not safe to repeat.
        """
        async with self._stdin_turn:
            await self._put_stdin(data, eof=False)

    async def close_stdin(self) -> None:
        """End of the standard input. With a PTY this sends its end-of-file character. Raises what write_stdin raises; safe to repeat."""
        async with self._stdin_turn:
            await self._put_stdin(b"", eof=True)

    async def _put_stdin(self, data: ByteSource, *, eof: bool) -> None:
        url = self._transport.at(f"{self._path}/stdin", {"eof": eof})
        async with self._transport.request("PUT", url, data=body_of(data), headers={"Content-Type": OCTETS}) as response:
            await response.read()

    async def resize(self, rows: int, cols: int) -> None:
        """Set the size of the command's terminal, in character cells; without a PTY nothing happens. Raises InvalidArgument for a size that
        no terminal has, ProcessNotFound. Safe to repeat."""
        await self._transport.send("POST", self._transport.at(f"{self._path}/resize"), body=encode(PtySize(rows, cols)))

    async def signal(self, signal: str | int, *, tree: bool = False) -> None:
        """Send a signal (``"TERM"``, ``"SIGTERM"``, 15, ``signal.SIGTERM``) to the command's process group.

        ``tree=True`` reaches every process of the command, also those that left the group; only KILL takes it.
        Raises InvalidArgument (no such signal, or ``tree`` with another than KILL), ProcessNotFound. An interrupted call is recognized, so
        that it signals once (unless the service was restarted meanwhile); your own repetition signals again.
        """
        request = SignalRequest(signal=_signal_name(signal), tree=tree)
        headers = {"Idempotency-Key": secrets.token_hex(12)}
        await self._transport.send("POST", self._transport.at(f"{self._path}/signal"), body=encode(request), headers=headers)

    async def kill(self) -> None:
        """SIGKILL to every process of the command. Killing one that has ended changes nothing. Raises ProcessNotFound. Safe to repeat."""
        await self.signal("KILL", tree=True)

    async def wait(self, *, timeout: float | None = None) -> CommandResult:
        """Wait for the end of the command. The result has no output: that is read from ``stdout`` and ``stderr``.

        A command whose output nobody reads blocks at 1 MiB a stream, so read it, or send it to /dev/null.
        ``timeout``: seconds to wait, then DeadlineExceeded; the command runs on. With 0 it is only asked whether it has ended. Raises
        ProcessNotFound, SandboxGone, SandboxFailed. Safe to repeat.
        """
        check_timeout(timeout)
        url = self._transport.at(f"{self._path}/wait")
        if timeout is not None and timeout <= 0:
            if (await self.info()).running:
                raise DeadlineExceeded(f"{self.exec_id} still runs")
            timeout = None
        try:
            async with asyncio.timeout(timeout):
                return await self._transport.call("GET", url, _command_result)
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self.exec_id} still runs after {timeout} s") from error


def _signal_name(signal: str | int) -> str | int:
    if isinstance(signal, str):
        name = signal.upper().removeprefix("SIG")
        if not hasattr(signals, f"SIG{name}"):
            raise InvalidArgument(f"there is no signal {signal!r}", field="signal")
        return name
    return int(signal)
