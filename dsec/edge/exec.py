"""Commands and shell sessions: run, start, find again, feed, read, signal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal as signals
from collections.abc import Callable

import msgspec

from dsec.edge.call import OCTETS, Body, Call, Socket
from dsec.edge.channel import (
    LEFTOVERS_KEEP,
    LEFTOVERS_KILL,
    MODE_CAPTURE,
    MODE_STREAM,
    STDIN_INLINE,
    STDIN_NONE,
    STDIN_STREAM,
    Channel,
    ChannelError,
    ChannelLost,
    ExecEntry,
    Exit,
    Shell,
    Start,
    Stream,
)
from dsec.edge.ids import new_exec_id
from dsec.edge.sandbox import Command, Sandbox, os_encode
from dsec.edge.sandboxes import Sandboxes
from dsec.edge.validation import check_env, check_exec_id, check_path, check_seconds, check_session, check_user
from libdsec.errors import DeadlineExceeded, InvalidArgument, ProcessNotFound
from libdsec.schema import (
    MAX_ARG_BYTES,
    MAX_ARGS_BYTES,
    MAX_OUTPUT_LIMIT,
    CommandResult,
    ExecRequest,
    ProcessInfo,
    PtySize,
    ShellRequest,
    SignalRequest,
)

INLINE_STDIN_MAX = 256 << 10
"""Bytes of standard input that travel with the command; more is sent behind it, as a frame has 1 MiB."""
STDIN_MAX = 16 << 20
"""Bytes of standard input in one request; more is streamed to ``…/stdin``."""
PTY_MAX = 1 << 15
_EMPTY_ENV: dict[bytes, bytes] = {}

_exec_body = Body(ExecRequest, large=("argv", "command", "env", "stdin"))
_shell_body = Body(ShellRequest, large=("command", "env"))
_signal_body = Body(SignalRequest)
_size_body = Body(PtySize)
_control_message = msgspec.json.Decoder(dict[str, object])


class Commands:
    """The routes below ``…/exec`` and ``…/shell``."""

    def __init__(self, sandboxes: Sandboxes, observe: Callable[[float], None]) -> None:
        """``observe`` is told the seconds that each captured command took, as its caller saw it."""
        self._sandboxes = sandboxes
        self._clock = sandboxes.clock
        self._observe = observe

    # --- running

    async def run(self, call: Call, sandbox: Sandbox) -> None:
        """POST …/exec"""
        request = await _exec_body.read(call)
        start = self._start_of(sandbox, request, call.header(b"idempotency-key"))
        channel = sandbox.channel or await self._sandboxes.agents.channel(sandbox)
        text = request.command if request.command is not None else " ".join(request.argv or ())
        command = self._sandboxes.agents.begin(sandbox, start.exec_id, text)
        if request.mode == "start":
            await call.reply(await self._start(sandbox, channel, start, request, command))
            return
        begun = self._clock.monotonic()
        if start.stdin == STDIN_STREAM and request.stdin is not None:
            exit = await self._run_fed(channel, start, request.stdin)
        else:
            exit = await channel.run(start)
        result = self._result(sandbox, exit, command)
        self._observe(self._clock.monotonic() - begun)
        await call.reply(result)

    async def shell(self, call: Call, sandbox: Sandbox) -> None:
        """POST …/shell"""
        request = await _shell_body.read(call)
        shell = self._shell_of(sandbox, request, call.header(b"idempotency-key"))
        channel = sandbox.channel or await self._sandboxes.agents.channel(sandbox)
        command = self._sandboxes.agents.begin(sandbox, shell.exec_id, request.command)
        begun = self._clock.monotonic()
        exit = await channel.shell(shell)
        result = self._result(sandbox, exit, command)
        self._observe(self._clock.monotonic() - begun)
        await call.reply(result)

    async def close_session(self, call: Call, sandbox: Sandbox) -> None:
        """DELETE …/shell/{session}"""
        session = call.names[0]
        check_session(session)
        channel = await self._sandboxes.agents.channel(sandbox)
        await channel.close_session(session)
        await call.reply_empty()

    # --- finding again

    async def list(self, call: Call, sandbox: Sandbox) -> None:
        """GET …/exec"""
        channel = await self._sandboxes.agents.channel(sandbox)
        await call.reply([_process_info(entry) for entry in await channel.list()])

    async def show(self, call: Call, sandbox: Sandbox) -> None:
        """GET …/exec/{exec_id}"""
        channel = await self._sandboxes.agents.channel(sandbox)
        for entry in await channel.list():
            if entry.exec_id == call.names[0]:
                await call.reply(_process_info(entry))
                return
        raise ProcessNotFound(f"sandbox {sandbox.id} has no command {call.names[0]!r}")

    async def wait(self, call: Call, sandbox: Sandbox) -> None:
        """GET …/exec/{exec_id}/wait"""
        exec_id = _exec_id(call)
        timeout_s = _seconds(call, "timeout_s")
        channel = await self._sandboxes.agents.channel(sandbox)
        stream = await channel.attach(exec_id)
        try:
            async with asyncio.timeout(timeout_s), call.until_disconnect():
                exit = await stream.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"command {exec_id} still runs after {timeout_s:g} s") from None
        finally:
            stream.detach()
        await call.reply(self._result(sandbox, exit, (sandbox.commands or {}).get(exec_id)))

    async def history(self, call: Call, sandbox: Sandbox) -> None:
        """GET …/commands"""
        await call.reply([command.entry for command in (sandbox.commands or {}).values()])

    # --- streams

    async def stdout(self, call: Call, sandbox: Sandbox) -> None:
        """GET …/exec/{exec_id}/stdout"""
        offset = call.integer("from_offset", 0)
        channel = await self._sandboxes.agents.channel(sandbox)
        stream = await channel.attach(_exec_id(call), stdout_from=offset)
        await self._pass_output(call, stream, stream.stdout_from)

    async def stderr(self, call: Call, sandbox: Sandbox) -> None:
        """GET …/exec/{exec_id}/stderr"""
        offset = call.integer("from_offset", 0)
        channel = await self._sandboxes.agents.channel(sandbox)
        stream = await channel.attach(_exec_id(call), stderr_from=offset)
        await self._pass_output(call, stream, stream.stderr_from)

    async def _pass_output(self, call: Call, stream: Stream, offset: int) -> None:
        try:
            await call.begin(OCTETS, [(b"x-dsec-offset", b"%d" % offset)])
            async with call.until_disconnect():
                while (piece := await stream.read()) is not None:
                    await call.send(piece[2])
            await call.end()
        finally:
            stream.detach()

    async def stdin(self, call: Call, sandbox: Sandbox) -> None:
        """PUT …/exec/{exec_id}/stdin"""
        channel = await self._sandboxes.agents.channel(sandbox)
        stream = await channel.attach(_exec_id(call), stdin=True)
        try:
            async for chunk in call.chunks():
                await stream.write(chunk)
            if call.flag("eof"):
                await stream.write_eof()
        finally:
            stream.detach()
        await call.reply_empty()

    async def signal(self, call: Call, sandbox: Sandbox) -> None:
        """POST …/exec/{exec_id}/signal"""
        request = await _signal_body.read(call)
        number = _signal_number(request.signal)
        if request.tree and number != signals.SIGKILL:
            raise InvalidArgument("only KILL reaches the whole tree", field="tree")
        channel = await self._sandboxes.agents.channel(sandbox)
        await channel.signal(_exec_id(call), number, tree=request.tree)
        await call.reply_empty()

    async def resize(self, call: Call, sandbox: Sandbox) -> None:
        """POST …/exec/{exec_id}/resize"""
        size = await _size_body.read(call)
        _check_size(size)
        channel = await self._sandboxes.agents.channel(sandbox)
        await channel.resize(_exec_id(call), size.rows, size.cols)
        await call.reply_empty()

    async def attach(self, call: Call, socket: Socket, sandbox: Sandbox) -> None:
        """WS …/exec/{exec_id}/attach"""
        exec_id = _exec_id(call)
        stdout_from, stderr_from = call.integer("stdout_from", 0), call.integer("stderr_from", 0)
        channel = await self._sandboxes.agents.channel(sandbox)
        stream = await channel.attach(exec_id, stdout_from=stdout_from, stderr_from=stderr_from, stdin=True)
        try:
            await socket.accept()
            output = asyncio.ensure_future(self._send_output(socket, sandbox, exec_id, stream))
            input = asyncio.ensure_future(_take_input(socket, stream))
            try:
                await asyncio.wait((output, input), return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (output, input):
                    task.cancel()
                ended = await asyncio.gather(output, input, return_exceptions=True)
            for outcome in ended:
                if isinstance(outcome, Exception):
                    raise outcome
        finally:
            stream.detach()

    async def _send_output(self, socket: Socket, sandbox: Sandbox, exec_id: str, stream: Stream) -> None:
        while (piece := await stream.read()) is not None:
            await socket.send(bytes((piece[0],)) + piece[2])
        exit = await stream.wait()
        result = self._result(sandbox, exit, (sandbox.commands or {}).get(exec_id))
        await socket.send(msgspec.json.encode({"exit": result}).decode())
        await socket.close()

    # --- from requests to frames, and back

    async def _start(self, sandbox: Sandbox, channel: Channel, start: Start, request: ExecRequest, command: Command) -> ProcessInfo:
        stream = await channel.start(start, follow=False)
        self._sandboxes.agents.follow(sandbox, command, stream)
        if request.stdin is not None and start.stdin == STDIN_STREAM:
            self._feed(channel, stream, request.stdin)
        argv = [arg.decode("utf-8", "replace") for arg in start.argv or ()]
        return ProcessInfo(exec_id=start.exec_id, argv=argv, pid=stream.pid, running=True, started_at=command.entry.started_at)

    async def _run_fed(self, channel: Channel, start: Start, stdin: bytes) -> Exit:
        """A captured command whose input is too long for its frame and is sent behind it."""
        stream = await channel.start(start, follow=True)
        try:
            self._feed(channel, stream, stdin)
            outputs: tuple[list[bytes], list[bytes]] = ([], [])
            while (piece := await stream.read()) is not None:
                outputs[piece[0] - 1].append(piece[2])
            exit = await stream.wait()
        finally:
            stream.detach()
        exit.stdout, exit.stderr = b"".join(outputs[0]), b"".join(outputs[1])
        return exit

    def _feed(self, channel: Channel, stream: Stream, stdin: bytes) -> None:
        """Has its input written to a command, beside the caller: it may not read for long. One that was there before got it from the caller
        who started it."""
        if not stream.attached:
            self._sandboxes.inventory.tasks.start(_write_input(channel, stream.exec_id, stdin), f"feed {stream.exec_id}")

    def _start_of(self, sandbox: Sandbox, request: ExecRequest, key: bytes | None) -> Start:
        record = sandbox.record
        if (request.argv is None) == (request.command is None):
            raise InvalidArgument("exactly one of argv and command is needed", field="argv")
        argv = (
            [b"/bin/sh", b"-c", os_encode(request.command)] if request.command is not None else [os_encode(a) for a in request.argv or ()]
        )
        named = "argv" if request.command is None else "command"
        if not argv:
            raise InvalidArgument("argv is empty", field="argv")
        if any(b"\0" in arg for arg in argv):
            raise InvalidArgument(f"{named} has a NUL in it", field=named)
        _check_args(argv, request.env, named)
        longest = max(map(len, argv), default=0)
        if longest >= MAX_ARG_BYTES:
            raise InvalidArgument(
                f"{named} has {longest} bytes in one argument: {MAX_ARG_BYTES - 1} are possible;"
                " a long script goes by stdin, run_shell or in a file",
                field=named,
            )
        _check_output(request.max_output)
        if request.stdin is not None and len(request.stdin) > STDIN_MAX:
            raise InvalidArgument(f"stdin may have {STDIN_MAX} bytes in a request; stream more to …/stdin", field="stdin")
        if request.stdin is not None and request.stdin_stream:
            raise InvalidArgument("stdin and stdin_stream exclude each other", field="stdin")
        if request.pty is not None:
            _check_size(request.pty)
        stdin = STDIN_NONE
        if request.stdin_stream or (request.stdin is not None and len(request.stdin) > INLINE_STDIN_MAX):
            stdin = STDIN_STREAM
        elif request.stdin is not None:
            stdin = STDIN_INLINE
        return Start(
            exec_id=_named(request.exec_id, key),
            argv=argv,
            cwd=_cwd(request.cwd, record.workdir),
            env=sandbox.env | _encoded(request.env) if request.env else sandbox.env,
            user=_user(request.user, record.init_user),
            stdin=stdin,
            stdin_data=request.stdin if stdin == STDIN_INLINE and request.stdin is not None else b"",
            mode=MODE_CAPTURE if request.mode == "wait" else MODE_STREAM,
            max_output=request.max_output,
            timeout_ms=_milliseconds(request.timeout_s),
            leftovers=LEFTOVERS_KEEP if request.leftovers == "keep" else LEFTOVERS_KILL,
            pty=None if request.pty is None else (request.pty.rows, request.pty.cols),
            no_new_privs=record.no_new_privs,
        )

    def _shell_of(self, sandbox: Sandbox, request: ShellRequest, key: bytes | None) -> Shell:
        record = sandbox.record
        check_session(request.session)
        command = os_encode(request.command)
        if b"\0" in command:
            raise InvalidArgument("command has a NUL in it", field="command")
        _check_args([command], request.env or {}, "command")
        _check_output(request.max_output)
        return Shell(
            exec_id=_named(request.exec_id, key),
            session=request.session,
            command=command,
            timeout_ms=_milliseconds(request.timeout_s),
            max_output=request.max_output,
            cwd=None if request.cwd is None else _cwd(request.cwd, record.workdir),
            env=None if request.env is None else _encoded(request.env),
            user=None if request.user is None else _user(request.user, record.init_user),
            no_new_privs=record.no_new_privs,
            base_env=sandbox.env,
            base_cwd=os_encode(record.workdir),
            base_user=record.init_user,
        )

    def _result(self, sandbox: Sandbox, exit: Exit, command: Command | None) -> CommandResult:
        """The end of a command as its caller sees it. ``command`` is None if the sandbox doesn't remember it."""
        oom_killed = command is not None and self._sandboxes.agents.end(sandbox, command, exit)
        return CommandResult(
            exit_code=exit.exit_code,
            signal=exit.signal,
            stdout_bytes=exit.stdout,
            stderr_bytes=exit.stderr,
            stdout_total=exit.stdout_total,
            stderr_total=exit.stderr_total,
            truncated=exit.truncated,
            timed_out=exit.timed_out,
            oom_killed=oom_killed,
            duration_s=exit.duration_us / 1e6,
            exec_id=exit.exec_id,
            session_restarted=exit.session_restarted,
            start_error=exit.start_error,
        )


async def _write_input(channel: Channel, exec_id: str, stdin: bytes) -> None:
    """On a stream of its own: whoever waits for the command may go away meanwhile. A command that ends before it took all of its input is
    no failure: its result says what it made of it."""
    with contextlib.suppress(ChannelError, ChannelLost):
        stream = await channel.attach(exec_id, stdin=True)
        try:
            await stream.write(stdin)
            await stream.write_eof()
        finally:
            stream.detach()


async def _take_input(socket: Socket, stream: Stream) -> None:
    """From the client of a WebSocket to the command."""
    while (message := await socket.receive()) is not None:
        if isinstance(message, bytes):
            await stream.write(message)
            continue
        try:
            control = _control_message.decode(message)
            if control.get("eof"):
                await stream.write_eof()
            elif "resize" in control:
                size = msgspec.convert(control["resize"], PtySize)
                _check_size(size)
                await stream.resize(size.rows, size.cols)
            elif "signal" in control:
                await stream.signal(_signal_number(msgspec.convert(control["signal"], str | int)))
            else:
                raise InvalidArgument('a text message is {"resize": [rows, cols]}, {"eof": true} or {"signal": "TERM"}')
        except msgspec.MsgspecError as error:
            raise InvalidArgument(f"the text message can't be read: {error}") from error


def _process_info(entry: ExecEntry) -> ProcessInfo:
    return ProcessInfo(
        exec_id=entry.exec_id,
        argv=[arg.decode("utf-8", "replace") for arg in entry.argv],
        pid=entry.pid,
        running=entry.running,
        started_at=entry.started_ms / 1000,
        stdout_total=entry.stdout_total,
        stderr_total=entry.stderr_total,
        exit_code=None if entry.running else entry.exit_code,
    )


def _named(exec_id: str | None, key: bytes | None) -> str:
    """The command's name: the caller's, else its idempotency key, else a new one."""
    if exec_id is None and key is None:
        return new_exec_id()
    name = exec_id if exec_id is not None else (key or b"").decode("ascii", "replace")
    check_exec_id(name)
    return name


def _exec_id(call: Call) -> str:
    exec_id = call.names[0]
    check_exec_id(exec_id)
    return exec_id


def _check_args(argv: list[bytes], env: dict[str, str], named: str) -> None:
    check_env(env)
    argv_bytes = sum(map(len, argv)) + len(argv)
    env_bytes = sum(len(name) + len(value) + 2 for name, value in env.items())
    if argv_bytes + env_bytes > MAX_ARGS_BYTES:
        field = named if argv_bytes >= env_bytes else "env"
        raise InvalidArgument(
            f"{named} has {argv_bytes} bytes, env {env_bytes}: together {MAX_ARGS_BYTES} are possible;"
            " long data goes by stdin or in a file",
            field=field,
        )


def _check_output(max_output: int) -> None:
    if not 0 <= max_output <= MAX_OUTPUT_LIMIT:
        raise InvalidArgument(f'max_output must be between 0 and {MAX_OUTPUT_LIMIT} bytes; read more with mode "start"', field="max_output")


def _check_size(size: PtySize) -> None:
    if not (0 < size.rows < PTY_MAX and 0 < size.cols < PTY_MAX):
        raise InvalidArgument(f"a terminal has 1 to {PTY_MAX - 1} rows and columns", field="pty")


def _milliseconds(timeout_s: float | None) -> int:
    if timeout_s is None:
        return 0
    check_seconds("timeout_s", timeout_s)
    return max(1, round(timeout_s * 1000))


def _seconds(call: Call, name: str) -> float | None:
    text = call.text(name)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        raise InvalidArgument(f"{name} is no number", field=name) from None
    check_seconds(name, seconds)
    return seconds


def _cwd(cwd: str | None, workdir: str) -> bytes:
    """A relative directory is meant below the sandbox's own."""
    if cwd is None:
        return os_encode(workdir)
    check_path("cwd", cwd)
    return os_encode(cwd if cwd.startswith("/") else os.path.join(workdir, cwd))


def _user(user: str | None, init_user: str) -> str:
    if user is None:
        return init_user
    check_user("user", user)
    return user


def _encoded(env: dict[str, str]) -> dict[bytes, bytes]:
    return {os_encode(name): os_encode(value) for name, value in env.items()}


def _signal_number(signal: str | int) -> int:
    """``"TERM"``, ``"SIGTERM"`` or 15."""
    if isinstance(signal, int):
        if 1 <= signal <= 64:
            return signal
        raise InvalidArgument("a signal's number is between 1 and 64", field="signal")
    try:
        return signals.Signals["SIG" + signal.upper().removeprefix("SIG")]
    except KeyError:
        raise InvalidArgument(f"there is no signal {signal[:32]!r}", field="signal") from None
