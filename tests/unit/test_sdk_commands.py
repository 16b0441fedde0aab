"""Commands: never run twice, output complete, input sent whole, whatever the connection does."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
from sdk_server import FakeServer

from libdsec import (
    CommandFailed,
    CommandResult,
    Conflict,
    DeadlineExceeded,
    DSecClient,
    DSecContainerRunArgs,
    DSecError,
    FileNotFound,
    InvalidArgument,
    ProcessNotFound,
    PtySize,
    Sandbox,
    SandboxFailed,
    SandboxGone,
    Unavailable,
)
from libdsec.schema import MAX_ARGS_BYTES
from libdsec.signing import port_signature


async def test_a_broken_exec_is_attached_to_and_not_run_again(server: FakeServer, sandbox: Sandbox) -> None:
    server.result = CommandResult(exit_code=3, stdout_bytes=b"caf\xc3\xa9 \xff", stderr_bytes=b"e")
    server.cut_after_act = 2
    result = await sandbox.exec(["make"])
    assert (result.exit_code, result.stdout, result.stderr) == (3, "café \ufffd", "e")
    assert list(server.runs.values()) == [1]


async def test_a_broken_shell_call_repeats_its_exec_id(server: FakeServer, sandbox: Sandbox) -> None:
    server.cut_after_act = 1
    await sandbox.run_shell("x=1", session="s", cwd="/tmp", timeout=5)
    assert len(server.shells) == 2 and len(server.runs) == 1
    assert (server.shells[0].session, server.shells[0].cwd, server.shells[0].timeout_s) == ("s", "/tmp", 5)


async def test_each_call_is_a_command_of_its_own(server: FakeServer, sandbox: Sandbox) -> None:
    await asyncio.gather(*(sandbox.exec("true") for _ in range(50)))
    assert len(server.runs) == 50


async def test_a_string_is_a_shell_command_and_a_sequence_an_argument_vector(server: FakeServer, sandbox: Sandbox) -> None:
    await sandbox.exec("echo $X", env={"X": "1"}, user="nobody", cwd="/tmp", timeout=2.5, max_output=7, leftovers="keep")
    await sandbox.exec(("echo", "a b"))
    first, second = server.execs.values()
    assert (first.command, first.argv, first.env, first.user, first.cwd) == ("echo $X", None, {"X": "1"}, "nobody", "/tmp")
    assert (first.timeout_s, first.max_output, first.leftovers) == (2.5, 7, "keep")
    assert (second.command, second.argv) == (None, ["echo", "a b"])


async def test_check_raises_with_the_result_and_its_last_words(server: FakeServer, sandbox: Sandbox) -> None:
    server.result = CommandResult(exit_code=2, stderr_bytes=b"no rule to make target")
    assert (await sandbox.exec(["make"])).exit_code == 2
    with pytest.raises(CommandFailed, match="exit code 2: no rule") as caught:
        await sandbox.exec(["make"], check=True)
    assert caught.value.result is not None and caught.value.result.exit_code == 2
    server.result = CommandResult(exit_code=137, signal=9, oom_killed=True)
    with pytest.raises(CommandFailed, match="memory limit"):
        await sandbox.run_shell("make", check=True)


@pytest.mark.parametrize("command", [[], ["x" * (MAX_ARGS_BYTES + 1)], "x" * (MAX_ARGS_BYTES + 1), ["\udcff"]])
async def test_what_cannot_be_an_argument_vector_is_refused_here(server: FakeServer, sandbox: Sandbox, command: list[str] | str) -> None:
    with pytest.raises(InvalidArgument):
        await sandbox.exec(command)
    assert not server.execs


@pytest.mark.parametrize("named", [{"env": {"A": "\udcff"}}, {"env": {"\udcff": "1"}}, {"cwd": "/\udcff"}], ids=["value", "name", "cwd"])
async def test_text_that_is_not_utf8_is_refused_here(server: FakeServer, sandbox: Sandbox, named: dict[str, Any]) -> None:
    for call in (sandbox.exec, sandbox.start, sandbox.run_shell):
        with pytest.raises(InvalidArgument, match="UTF-8"):
            await call("true", **named)
    assert not server.execs and not server.shells


@pytest.mark.parametrize("timeout", [float("nan"), "5"])
async def test_a_timeout_that_is_no_number_of_seconds_is_refused_here(client: DSecClient, sandbox: Sandbox, timeout: Any) -> None:
    process = await sandbox.start(["true"])
    args = DSecContainerRunArgs(container_image="x")
    for call in (process.wait(timeout=timeout), client.run(args, timeout=timeout), sandbox.fork(timeout=timeout)):
        with pytest.raises(InvalidArgument) as caught:
            await call
        assert caught.value.field == "timeout"


async def test_an_environment_that_is_too_large_is_refused_by_name(sandbox: Sandbox) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await sandbox.exec(["true"], env={"BIG": "x" * (MAX_ARGS_BYTES + 1)})
    assert caught.value.field == "env"


async def test_after_stop_every_call_tells_when_and_why(sandbox: Sandbox) -> None:
    await sandbox.stop()
    with pytest.raises(SandboxGone) as caught:
        await sandbox.exec(["true"])
    assert caught.value.reason == "stopped" and caught.value.at == 1.0


class TestStdin:
    async def test_a_little_travels_within_the_request(self, server: FakeServer, sandbox: Sandbox) -> None:
        await sandbox.exec(["cat"], stdin=b"\0\xff")
        await sandbox.exec(["cat"], stdin="ü")
        await sandbox.exec(["cat"], stdin=b"")
        await sandbox.exec(["cat"])
        assert [request.stdin for request in server.execs.values()] == [b"\0\xff", "ü".encode(), b"", None]
        assert not any(request.stdin_stream for request in server.execs.values())

    async def test_a_lot_is_streamed(self, server: FakeServer, sandbox: Sandbox) -> None:
        data = bytes(range(256)) * 20_000
        result = await sandbox.exec(["wc"], stdin=data)
        assert server.stdin[result.exec_id] == data

    async def test_an_iterator_is_streamed(self, server: FakeServer, sandbox: Sandbox) -> None:
        async def chunks() -> AsyncIterator[bytes]:
            for number in range(100):
                yield b"%d\n" % number

        result = await sandbox.exec(["wc"], stdin=chunks())
        assert server.stdin[result.exec_id].count(b"\n") == 100

    async def test_a_command_that_ends_without_reading_is_answered(self, server: FakeServer, sandbox: Sandbox) -> None:
        async def endless() -> AsyncIterator[bytes]:
            while True:
                yield b"x" * 1000
                await asyncio.sleep(0)

        server.stdin_needed = False
        assert (await asyncio.wait_for(sandbox.exec(["true"], stdin=endless()), 10)).exit_code == 0

    async def test_a_source_that_fails_is_the_callers_error_and_ends_the_command(self, server: FakeServer, sandbox: Sandbox) -> None:
        async def broken() -> AsyncIterator[bytes]:
            yield b"some"
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await sandbox.exec(["cat"], stdin=broken())
        assert [(entry.signal, entry.tree) for entry in server.signals] == [("KILL", True)]

    @pytest.mark.parametrize("failure", [FileNotFound("of another sandbox"), InvalidArgument("mine"), Unavailable("mine")], ids=repr)
    async def test_a_source_that_fails_with_an_error_of_the_tree_is_no_answer_of_the_server(
        self, server: FakeServer, sandbox: Sandbox, failure: DSecError
    ) -> None:
        async def broken() -> AsyncIterator[bytes]:
            yield b"some"
            raise failure

        with pytest.raises(type(failure)) as caught:
            await asyncio.wait_for(sandbox.exec(["cat"], stdin=broken()), 10)
        assert caught.value is failure
        assert [(entry.signal, entry.tree) for entry in server.signals] == [("KILL", True)]
        process = await sandbox.start(["cat"])
        with pytest.raises(type(failure)) as caught:
            await asyncio.wait_for(process.write_stdin(broken()), 10)
        assert caught.value is failure

    async def test_a_source_of_text_is_the_callers_mistake(self, server: FakeServer, sandbox: Sandbox) -> None:
        async def text() -> AsyncIterator[Any]:
            yield "text"

        with pytest.raises(TypeError, match="yield bytes, not str"):
            await sandbox.exec(["cat"], stdin=text())
        assert [entry.signal for entry in server.signals] == ["KILL"]
        process = await sandbox.start(["cat"])
        with pytest.raises(TypeError, match="yield bytes, not str"):
            await process.write_stdin(text())


class TestIds:
    @pytest.mark.parametrize("exec_id", ["", "../../x", "a/b", "x" * 129, "ü"])
    async def test_what_no_command_can_be_called_is_not_found(self, server: FakeServer, sandbox: Sandbox, exec_id: str) -> None:
        server.requests.clear()
        with pytest.raises(ProcessNotFound):
            await sandbox.process(exec_id)
        assert not server.requests

    async def test_a_command_cannot_be_given_such_a_name(self, server: FakeServer, sandbox: Sandbox) -> None:
        for call in (sandbox.exec, sandbox.start):
            with pytest.raises(InvalidArgument) as caught:
                await call("true", exec_id="../x")
            assert caught.value.field == "exec_id"
        assert not server.execs

    @pytest.mark.parametrize("session", ["", "../x", "a b"])
    async def test_what_no_session_can_be_called_is_refused(self, server: FakeServer, sandbox: Sandbox, session: str) -> None:
        server.requests.clear()
        with pytest.raises(InvalidArgument) as caught:
            await sandbox.close_session(session)
        assert caught.value.field == "session" and not server.requests


class TestProcess:
    async def test_output_goes_on_where_the_connection_broke(self, server: FakeServer, sandbox: Sandbox) -> None:
        server.output = bytes(range(256)) * 1000
        server.cut_output_every = 100_000
        process = await sandbox.start(["yes"])
        assert await process.stdout.read() == server.output
        assert server.output_offsets[0] == 0 and len(server.output_offsets) >= 3
        assert server.output_offsets == sorted(server.output_offsets)

    async def test_a_second_iteration_continues_and_a_second_reader_begins_where_told(self, server: FakeServer, sandbox: Sandbox) -> None:
        server.output = b"0123456789"
        process = await sandbox.start("cat")
        async for _ in process.stdout:
            break
        assert await process.stdout.read() == b""
        assert await process.stdout(from_offset=4).read() == b"456789"

    async def test_input_is_written_in_order_and_closed(self, server: FakeServer, sandbox: Sandbox) -> None:
        process = await sandbox.start(["cat"])
        assert server.execs[process.exec_id].stdin_stream and process.pid == 7
        await asyncio.gather(*(process.write_stdin(b"%d," % number) for number in range(20)))
        await process.close_stdin()
        assert server.stdin[process.exec_id] == b"".join(b"%d," % number for number in range(20))
        assert (await process.wait()).exec_id == process.exec_id

    async def test_stdin_may_be_none_or_given_at_once(self, server: FakeServer, sandbox: Sandbox) -> None:
        first = await sandbox.start(["cat"], stdin=False)
        second = await sandbox.start(["cat"], stdin="text", pty=PtySize(24, 80), exec_id="mine")
        assert (server.execs[first.exec_id].stdin_stream, server.execs[first.exec_id].stdin) == (False, None)
        assert server.execs["mine"].stdin == b"text" and server.execs["mine"].pty == PtySize(24, 80)
        assert second.exec_id == "mine"

    async def test_a_lost_answer_to_start_starts_nothing_twice(self, server: FakeServer, sandbox: Sandbox) -> None:
        server.cut_after_act = 1
        process = await sandbox.start(["server"])
        assert server.runs == {process.exec_id: 1}

    async def test_a_signal_whose_answer_is_lost_is_repeated_under_its_key(self, server: FakeServer, sandbox: Sandbox) -> None:
        process = await sandbox.start("x")
        server.cut_after_act = 1
        await process.signal("TERM")
        await process.signal("TERM")
        first, again, second = server.changes
        assert first == again and first and second not in ("", first)

    async def test_it_is_found_again_by_its_id_and_signalled(self, server: FakeServer, sandbox: Sandbox) -> None:
        started = await sandbox.start(["sleep"])
        process = await sandbox.process(started.exec_id)
        await process.signal(signal.SIGTERM)
        await process.signal("sigint")
        await process.kill()
        assert [(entry.signal, entry.tree) for entry in server.signals] == [(15, False), ("INT", False), ("KILL", True)]
        with pytest.raises(InvalidArgument):
            await process.signal("NOPE")
        with pytest.raises(ProcessNotFound):
            await sandbox.process("ex-unknown")

    async def test_waiting_has_a_deadline_of_its_own(self, sandbox: Sandbox) -> None:
        process = await sandbox.start(["sleep"])
        with pytest.raises(DeadlineExceeded):
            await process.wait(timeout=0.05)

    async def test_waiting_for_no_time_asks_once(self, sandbox: Sandbox) -> None:
        process = await sandbox.start(["cat"])
        with pytest.raises(DeadlineExceeded):
            await process.wait(timeout=0)
        await process.close_stdin()
        assert (await process.wait(timeout=0)).exec_id == process.exec_id


class TestPorts:
    async def test_a_connection_is_a_pair_of_streams(self, sandbox: Sandbox) -> None:
        reader, writer = await sandbox.connect(8000)
        data = b"line\n" + bytes(range(256)) * 8000
        writer.write(data)
        await writer.drain()
        assert await reader.readline() == b"line\n"
        assert await reader.readexactly(len(data) - 5) == data[5:]
        writer.write(b"bye")
        assert await reader.read() == b""
        await writer.wait_closed()

    async def test_closing_sends_what_waits(self, sandbox: Sandbox) -> None:
        _, writer = await sandbox.connect(8000)
        writer.write(b"x" * 3_000_000)
        writer.close()
        await writer.wait_closed()
        assert writer.is_closing()

    @pytest.mark.parametrize("waiting", [0, 30_000_000], ids=["idle", "blocked"])
    async def test_aborting_loses_what_waits_at_once_and_without_a_handshake(
        self, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, waiting: int
    ) -> None:
        async def close(*_: object, **__: object) -> bool:
            raise AssertionError("a handshake")

        monkeypatch.setattr("aiohttp.ClientWebSocketResponse.close", close)
        before = asyncio.all_tasks()
        reader, writer = await sandbox.connect(7)
        writer.write(b"z" * waiting)
        with contextlib.suppress(TimeoutError):
            # Until the kernel takes no more: the rest is what the peer doesn't read.
            await asyncio.wait_for(writer.drain(), 0.3)
        carriers = asyncio.all_tasks() - before
        writer.transport.abort()
        writer.transport.abort()
        await asyncio.wait_for(writer.wait_closed(), 2)
        assert await asyncio.wait_for(reader.read(), 2) == b""
        assert writer.is_closing()
        done, pending = await asyncio.wait([task for task in carriers if "_WebSocketTransport" in repr(task)], timeout=2)
        assert len(done) == 2 and not pending

    async def test_aborting_cuts_an_orderly_close_short(self, sandbox: Sandbox) -> None:
        _, writer = await sandbox.connect(7)
        writer.write(b"z" * 30_000_000)
        writer.close()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(writer.wait_closed()), 0.2)
        writer.transport.abort()
        await asyncio.wait_for(writer.wait_closed(), 2)

    async def test_a_break_is_not_an_end_of_file(self, sandbox: Sandbox) -> None:
        reader, writer = await sandbox.connect(8000)
        writer.write(b"break")
        with pytest.raises(ConnectionResetError, match="sandbox failed"):
            await reader.read()

    async def test_a_port_where_nothing_listens_is_told_from_a_sandbox_that_is_gone(self, sandbox: Sandbox) -> None:
        with pytest.raises(Conflict, match="port 9"):
            await sandbox.connect(9)
        with pytest.raises(InvalidArgument):
            await sandbox.connect(70_000)

    async def test_a_sandbox_that_has_ended_tells_when_and_why(self, server: FakeServer, sandbox: Sandbox) -> None:
        info = server.sandboxes[sandbox.id]
        info.state, info.reason, info.ended_at = "failed", "agent_died", 2.0
        with pytest.raises(SandboxFailed) as failed:
            await sandbox.connect(8000)
        assert (failed.value.reason, failed.value.at) == ("agent_died", 2.0)
        await sandbox.stop()
        with pytest.raises(SandboxGone) as gone:
            await sandbox.connect(8000)
        assert (gone.value.reason, gone.value.at) == ("stopped", 1.0)

    async def test_an_address_for_a_port(self, sandbox: Sandbox) -> None:
        assert sandbox.url(8000) == f"http://ports/{sandbox.id}/8000/{port_signature('key', 8000)}/"
        assert port_signature("key", 8000) not in (port_signature("key", 8001), port_signature("other", 8000))
        with pytest.raises(InvalidArgument):
            sandbox.url(0)


async def test_an_unreachable_server_is_unavailable_to_streams_too(
    server: FakeServer, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("libdsec.transport.RETRY_FOR_S", 0.05)
    process = await sandbox.start(["cat"])
    await server.stop()
    with pytest.raises(Unavailable):
        await process.stdout.read()
    await server.start()
